"""The embedded engine: llama.cpp's own HTTP server inside xllamacpp, in a process of its own, driven by a plan.

``python -m kimigguf.engines.embedded --plan FILE`` serves until SIGTERM, SIGINT or the death of the process that
started it. ``--devices`` prints the accelerators that xllamacpp sees, as one line of JSON.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kimigguf.engines.command import DEFAULT_PORT, LOOPBACK, device_names, model_path, override_argument, setting_values
from kimigguf.engines.discover import backends, parse_embedded_devices
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.engines.keys import read_keys
from kimigguf.engines.lifeline import die_with_parent
from kimigguf.engines.offload import offload
from kimigguf.engines.serving import ServingProfile, Value, chat_template_arguments, load_serving
from kimigguf.errors import KimiggufError
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import load_plan

_MAX_DEVICES: Final = 128
"""The length that xllamacpp demands of a tensor split."""
_SAMPLING_BITS: Final = MappingProxyType(
    {
        "sampling.temp": "COMMON_PARAMS_SAMPLING_CONFIG_TEMP",
        "sampling.top_k": "COMMON_PARAMS_SAMPLING_CONFIG_TOP_K",
        "sampling.top_p": "COMMON_PARAMS_SAMPLING_CONFIG_TOP_P",
        "sampling.min_p": "COMMON_PARAMS_SAMPLING_CONFIG_MIN_P",
    }
)
"""What marks a sampling value as the user's, so that one in the model's metadata does not replace it."""


def attributes(
    plan: Plan, profile: ServingProfile, names: tuple[str, ...], *, agent: bool, effort: str | None
) -> dict[str, Any]:
    """The plan as CommonParams attributes: plain values, dotted names for nested ones. Pure.

    Enumerations stand as their names (``GGML_TYPE_F16``) and are resolved where they are set.
    """
    found: dict[str, Any] = {}
    for setting, value in zip(profile.settings, setting_values(profile, plan.settings, agent=agent), strict=True):
        found[setting.attribute] = _converted(setting.attribute, value)
    words = offload(plan.layout)
    found["n_gpu_layers"] = words.gpu_layers
    if words.split:
        found["tensor_split"] = [float(count) for count in words.split]
    if words.overrides:
        found["tensor_buft_overrides"] = override_argument(words, names)
    arguments = chat_template_arguments(profile, effort)
    found["default_template_kwargs"] = {name: json.dumps(value) for name, value in arguments.items()}
    return found


def _converted(attribute: str, value: Value) -> Any:  # noqa: ANN401 -- attributes of many types
    match attribute:
        case "cache_type_k" | "cache_type_v":
            return f"GGML_TYPE_{str(value).upper()}"
        case "flash_attn_type":
            return f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if value == 'on' else 'DISABLED'}"
        case "fit_params":
            return value == "on"
        case _:
            return value


def apply(params: Any, library: Any, found: Mapping[str, Any]) -> None:  # noqa: ANN401 -- xllamacpp has no types
    """Set the attributes on xllamacpp's CommonParams.

    Raises:
        ValueError, AttributeError, TypeError: where this xllamacpp does not take one of them.
    """
    enumerations = {
        "cache_type_k": library.ggml_type,
        "cache_type_v": library.ggml_type,
        "flash_attn_type": library.llama_flash_attn_type,
    }
    bits = 0
    for name, value in found.items():
        target, _, last = name.rpartition(".")
        if name in enumerations:
            setattr(params, name, enumerations[name][value])
        elif name == "tensor_split":
            params.tensor_split = [*value, *([0.0] * (_MAX_DEVICES - len(value)))]
        else:
            setattr(getattr(params, target) if target else params, last, value)
        if name in _SAMPLING_BITS:
            bits |= int(library.common_params_sampling_config[_SAMPLING_BITS[name]])
    params.sampling.user_sampling_config = bits


def list_devices() -> str:
    """The accelerators that xllamacpp sees and what it was compiled for, as one line of JSON. Sizes in bytes."""
    import xllamacpp  # noqa: PLC0415 -- the engine is loaded only in a process made for it

    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    devices = [
        {
            "name": device["name"],
            "description": device["description"],
            "total_bytes": device["memory_total"],
            "free_bytes": device["memory_free"],
        }
        for device in xllamacpp.get_device_info()
        if device["type"] != cpu
    ]
    return json.dumps({"devices": devices, "system_info": xllamacpp.get_system_info()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimigguf.engines.embedded", description=__doc__)
    parser.add_argument("--devices", action="store_true", help="print the accelerators as JSON and exit")
    parser.add_argument("--plan", type=Path, help="the plan to serve, as written by kimigguf plan --json")
    parser.add_argument("--folder", help="where the shards lie, in place of the plan's folder")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--alias")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--effort")
    parser.add_argument("--agent", action="store_true")
    return parser


def _settings(options: argparse.Namespace) -> tuple[Plan, ServingProfile, dict[str, Any]]:
    plan = load_plan(options.plan)
    profile = load_serving(plan.model.architecture)
    devices = parse_embedded_devices(list_devices())
    engine = FoundEngine(
        kind=EngineKind.EMBEDDED,
        path=None,
        version=None,
        build=None,
        supports_k3=None,
        backends=backends(devices),
        devices=devices,
    )
    names = device_names(plan, engine)
    found = attributes(plan, profile, names, agent=options.agent, effort=options.effort)
    found |= {
        "model.path": model_path(plan, options.folder),
        "hostnames": [options.host],
        "port": options.port,
        "model_alias": {options.alias or profile.alias},
    }
    if options.api_key_file:
        found["api_keys"] = list(read_keys(options.api_key_file))
    return plan, profile, found


def serve(options: argparse.Namespace) -> int:
    """Load the model and serve until told to stop. 0 after a signal, 1 if the engine cannot start."""
    die_with_parent()
    try:
        _, _, found = _settings(options)
    except (KimiggufError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    import xllamacpp  # noqa: PLC0415 -- the engine is loaded only in a process made for it

    params = xllamacpp.CommonParams()
    try:
        apply(params, xllamacpp, found)
        # The constructor loads the model and keeps the interpreter's lock meanwhile: until it returns no Python
        # handler can run, so signals keep their default, deadly meaning. There is nothing to clean up.
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        sys.stderr.write(f"error: the embedded engine did not start: {error}\n")
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    parent = os.getppid()
    while not stop.wait(0.5):
        if os.getppid() != parent:
            break
    del server  # ends the HTTP server and frees the model, in that order
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.devices:
        sys.stdout.write(list_devices() + "\n")
        return 0
    if options.plan is None:
        parser.error("--plan is needed")
    return serve(options)


if __name__ == "__main__":
    sys.exit(main())
