"""llama-cpp-python as an engine: its own OpenAI server, in a process of its own, driven by a plan.

``python -m kimigguf.engines.llama_cpp_python --plan FILE`` serves until SIGTERM or the death of its starter. What it
lacks against llama.cpp's own server, by its source (0.3.36): no placement of experts apart from their layer, one
request at a time, no parser for K3's format (thinking and tool calls stay in the text), no default sampling per
server, no context checkpoints. It is never chosen unasked.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kimigguf.engines.command import DEFAULT_PORT, LOOPBACK, model_path
from kimigguf.engines.keys import read_keys
from kimigguf.engines.lifeline import die_with_parent
from kimigguf.engines.offload import offload
from kimigguf.engines.serving import ServingProfile, chat_template_arguments, load_serving
from kimigguf.errors import KimiggufError, MachineError
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import load_plan

_GGML_TYPES: Final = MappingProxyType(
    {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
)
"""Numbers of ggml_type in ggml.h, which this package takes in place of names."""
_READ_BY_THE_SERVER: Final = ("CONFIG_FILE", "HOST", "PORT")
"""Variables by which its server replaces what it is told."""


def model_settings(plan: Plan, profile: ServingProfile, *, alias: str, effort: str | None = None) -> dict[str, Any]:
    """The plan in the fields of llama_cpp.server's ModelSettings. Pure.

    Raises:
        MachineError: ``engine-lacks-offload`` or ``engine-lacks-slots`` for a plan that this engine cannot carry out.
    """
    words, settings = offload(plan.layout), plan.settings
    if words.overrides:
        raise MachineError(
            "llama-cpp-python takes no rules for single tensors, and the plan needs some",
            code="engine-lacks-offload",
            hint="use --engine llama-server or --engine embedded",
        )
    if settings.slots > 1:
        raise MachineError(
            f"llama-cpp-python answers one request at a time, and the plan has {settings.slots} slots",
            code="engine-lacks-slots",
            hint="use --slots 1, or --engine embedded",
        )
    kv_type = _GGML_TYPES[settings.kv_type.value]
    return {
        "model": model_path(plan),
        "model_alias": alias,
        "n_gpu_layers": words.gpu_layers,
        "tensor_split": [float(count) for count in words.split] or None,
        "n_ctx": settings.context_tokens,
        "n_batch": settings.batch_tokens,
        "n_ubatch": settings.ubatch_tokens,
        "type_k": kv_type,
        "type_v": kv_type,
        "flash_attn": settings.flash_attention,
        "offload_kqv": settings.kv_offload,
        # On by default: logits of every position, 86 GB at a context of 131,072 tokens.
        "logits_all": False,
        # On by default where the system can: it would pin a terabyte in memory.
        "use_mlock": False,
        "use_mmap": True,
        "chat_template_kwargs": chat_template_arguments(profile, effort) or None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimigguf.engines.llama_cpp_python", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--folder", help="where the shards lie, in place of the plan's folder")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--alias")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--effort")
    parser.add_argument("--agent", action="store_true", help="ignored: this server has no default sampling")
    return parser


def application(fields: dict[str, Any], *, host: str, port: int, key: str | None) -> Any:  # noqa: ANN401 -- FastAPI's
    """The package's server with the model loaded, closed to web pages, and with the /health that others have."""
    # Optional packages: they come with kimigguf[llama-cpp-python].
    from llama_cpp.server.app import create_app  # noqa: PLC0415 -- the engine is loaded only in a process made for it
    from llama_cpp.server.settings import ModelSettings, ServerSettings  # noqa: PLC0415 -- likewise

    app = create_app(
        server_settings=ServerSettings(host=host, port=port, api_key=key, interrupt_requests=False),
        model_settings=[ModelSettings(**fields)],
    )
    # It lets pages of any origin read answers, credentials included.
    app.user_middleware = [item for item in app.user_middleware if item.cls.__name__ != "CORSMiddleware"]
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])
    return app


def serve(options: argparse.Namespace) -> int:
    """Load the model and serve until told to stop. 1 if it cannot start."""
    die_with_parent()
    for name in _READ_BY_THE_SERVER:
        os.environ.pop(name, None)
    try:
        plan = load_plan(options.plan)
        profile = load_serving(plan.model.architecture)
        fields = model_settings(plan, profile, alias=options.alias or profile.alias, effort=options.effort)
        fields["model"] = model_path(plan, options.folder)
        key = read_keys(options.api_key_file)[0] if options.api_key_file else None
    except KimiggufError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    try:
        import uvicorn  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 -- comes with the extra alone

        app = application(fields, host=options.host, port=options.port, key=key)
    except (ImportError, ValueError, RuntimeError, AssertionError) as error:
        sys.stderr.write(f"error: llama-cpp-python did not start: {error}\n")
        return 1
    uvicorn.run(app, host=options.host, port=options.port)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    return serve(_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
