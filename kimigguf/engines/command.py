"""Turns a plan into the exact command line of an engine. Pure: nothing is started, read or looked up here.

Either the engine decides the placement or the plan does, never a mixture: every command says ``--fit off`` and places
every layer, the experts and the head (llama.cpp issue 27872 is what a mixture does).
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import pairwise
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.engines.offload import Offload, offload
from kimigguf.engines.passthrough import check_known
from kimigguf.engines.serving import ServingProfile, Setting, Value, chat_template_arguments
from kimigguf.engines.sight import usable_devices
from kimigguf.errors import MachineError, UsageError
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import Plan
from kimigguf.units import MIB

LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8080
NOT_FOR_THE_ENGINE: Final = frozenset({"LLAMA_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"})
OVERRIDING_PREFIX: Final = "LLAMA_ARG_"
"""Variables by which llama.cpp takes options: one left in the environment would undo part of the plan unseen."""
VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--model": "LLAMA_ARG_MODEL",
        "--host": "LLAMA_ARG_HOST",
        "--port": "LLAMA_ARG_PORT",
        "--alias": "LLAMA_ARG_ALIAS",
        "--api-key-file": "LLAMA_ARG_API_KEY_FILE",
        "--device": "LLAMA_ARG_DEVICE",
        "--n-gpu-layers": "LLAMA_ARG_N_GPU_LAYERS",
        "--tensor-split": "LLAMA_ARG_TENSOR_SPLIT",
        "--override-tensor": "LLAMA_ARG_OVERRIDE_TENSOR",
        "--chat-template-kwargs": "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        "--ssl-key-file": "LLAMA_ARG_SSL_KEY_FILE",
        "--ssl-cert-file": "LLAMA_ARG_SSL_CERT_FILE",
    }
)
"""The variables that say what the flags given here say; those of a profile's settings stand beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start. ``environ`` is the child's whole environment.

    ``dropped`` names variables that were taken out of it, ``left_out`` the settings whose flag the engine lacks.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def planned_values(settings: Settings) -> Mapping[str, Value]:
    """The plan's settings under the names that a serving profile's ``from_plan`` uses; memory in whole MiB."""
    return MappingProxyType(
        {
            "context_tokens": settings.context_tokens,
            "slots": settings.slots,
            "unified_cache": settings.unified_cache,
            "batch_tokens": max(settings.batch_tokens, settings.ubatch_tokens),
            "ubatch_tokens": settings.ubatch_tokens,
            "kv_type": settings.kv_type.value,
            "flash_attention": "on" if settings.flash_attention else "off",
            "checkpoints": settings.checkpoints,
            # Rounded down: 0 switches the prompt cache off, and no rounding may take more than was counted.
            "prompt_cache_mib": settings.prompt_cache_bytes // MIB,
            "no_repack": not settings.repack,
            "no_kv_offload": not settings.kv_offload,
        }
    )


def setting_values(profile: ServingProfile, settings: Settings, *, agent: bool = False) -> tuple[Value, ...]:
    """The value of each setting of the profile, in its order.

    Raises:
        UsageError: ``bad-profile`` for a ``from_plan`` that names nothing in a plan.
    """
    planned = planned_values(settings)
    values: list[Value] = []
    for setting in profile.settings:
        value = setting.agent if agent and setting.agent is not None else setting.value
        if setting.from_plan is not None:
            value = planned.get(setting.from_plan)
        if value is None:
            raise UsageError(
                f"the serving profile {profile.name!r}: {setting.name} takes {setting.from_plan!r} from the plan, "
                f"which has {', '.join(planned)}",
                code="bad-profile",
            )
        values.append(value)
    return tuple(values)


def model_path(plan: Plan, folder: str | None = None) -> str:
    """The file to load: the first shard; the engine finds its siblings by name.

    Raises:
        UsageError: ``plan-without-files``.
    """
    where = folder or plan.model.folder
    if not plan.model.files:
        raise UsageError(
            "the plan was made from the catalogue alone and names no files",
            code="plan-without-files",
            hint="serve the quant by its name: kimigguf serve " + (plan.model.quant or "QUANT"),
        )
    name = plan.model.files[0].name
    return str(PurePath(where) / name) if where else name


def device_names(plan: Plan, engine: FoundEngine) -> tuple[str, ...]:
    """The engine's names for the layout's devices: ``gpu2`` is the engine's third, as ``sight.seen_by`` orders them.

    An engine that could not be asked gets CUDA's names, which are the common case.

    Raises:
        MachineError: ``engine-lacks-devices`` if the engine sees fewer accelerators than the plan uses.
    """
    wanted = [_position(name, index) for index, name in enumerate(plan.layout.devices)]
    devices = usable_devices(engine)
    if devices is None:
        return tuple(f"CUDA{position}" for position in wanted)
    if wanted and max(wanted) >= len(devices):
        raise MachineError(
            f"the plan uses {len(wanted)} accelerator(s), and the engine sees {len(devices)}",
            code="engine-lacks-devices",
            cause=f"{engine.title} offers: {', '.join(engine.backends or ()) or 'nothing'}",
            hint="name an engine built for these accelerators with --engine-path, or plan for this engine without them",
        )
    return tuple(devices[position].name for position in wanted)


def _position(name: str, index: int) -> int:
    """Which of the machine's accelerators a layout's device is: the number in its name, else its place in the list."""
    match = re.fullmatch(r"gpu(\d{1,3})", name)
    return int(match[1]) if match else index


def placement_arguments(plan: Plan, names: tuple[str, ...]) -> tuple[str, ...]:
    """``-dev``, ``-ngl``, ``-ts`` and ``-ot``: the whole layout, whatever the engine's defaults are."""
    words = offload(plan.layout)
    argv = ["--device", ",".join(names) if names else "none", "--n-gpu-layers", str(words.gpu_layers)]
    if words.split:
        argv += ["--tensor-split", ",".join(map(str, words.split))]
    if words.overrides:
        argv += ["--override-tensor", override_argument(words, names)]
    return tuple(argv)


def override_argument(words: Offload, names: tuple[str, ...]) -> str:
    """The rules for single tensors and experts as one argument; the engine takes the first that matches."""
    return ",".join(
        f"{rule.pattern}={'CPU' if rule.device is None else names[rule.device]}" for rule in words.overrides
    )


def engine_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment for an engine: without secrets it has no use for, and without options of its own."""
    dropped = tuple(
        sorted(name for name in environ if name in NOT_FOR_THE_ENGINE or name.startswith(OVERRIDING_PREFIX))
    )
    return {name: value for name, value in environ.items() if name not in dropped}, dropped


def command(
    plan: Plan,
    engine: FoundEngine,
    *,
    profile: ServingProfile,
    host: str = LOOPBACK,
    port: int = DEFAULT_PORT,
    api_key_file: str | None = None,
    alias: str | None = None,
    effort: str | None = None,
    agent: bool = False,
    folder: str | None = None,
    plan_file: str | None = None,
    known_flags: Collection[str] | None = None,
    extra: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> Command:
    """The command that serves ``plan`` on ``engine``.

    Args:
        plan: Where everything goes.
        engine: What runs it.
        profile: The settings with reasons (``serving.load_serving(plan.model.architecture)``).
        host: Address to listen on; anything but loopback needs ``api_key_file``.
        port: Port to listen on.
        api_key_file: File of API keys, one a line. Keys never stand in argv, which every user of a machine can read.
        alias: The model's name for clients.
        effort: Default thinking effort, in place of the profile's.
        agent: Take the profile's values for agents.
        folder: Where the shards lie, in place of the plan's.
        plan_file: The plan as a file; needed by the engines that run in a Python process of their own.
        known_flags: Flags that the engine's ``--help`` lists; optional settings it lacks are left out,
            and further arguments it lacks are refused.
        extra: Further arguments for llama-server, as they are.
        environ: The environment to start from.

    Raises:
        UsageError: ``key-needed``, ``unknown-effort``, ``layout-not-expressible``, ``plan-file-needed``,
            ``bad-profile`` or ``engine-flag-unknown`` for a further argument.
        MachineError: ``engine-lacks-devices``.
    """
    require_key(host, api_key_file)
    child, dropped = engine_environ(environ or {})
    bind = ("--host", host, "--port", str(port), "--alias", alias or profile.alias)
    keys = ("--api-key-file", api_key_file) if api_key_file else ()
    if engine.kind in {EngineKind.EMBEDDED, EngineKind.LLAMA_CPP_PYTHON}:
        device_names(plan, engine)  # refuses a plan for accelerators that the engine does not see
        argv = (*_python_engine(engine, plan_file, folder), *bind, *keys, *_choices(effort, agent=agent))
        return Command(argv=argv, environ=child, dropped=dropped)
    check_known(extra, known_flags)
    settings, left_out = _settings_arguments(profile, plan.settings, agent=agent, known_flags=known_flags)
    arguments = chat_template_arguments(profile, effort)
    template = ("--chat-template-kwargs", json.dumps(arguments, separators=(",", ":"))) if arguments else ()
    program = (engine.path or "llama-server", *(("serve",) if engine.kind is EngineKind.LLAMA else ()))
    placement = placement_arguments(plan, device_names(plan, engine))
    argv = (*program, "--model", model_path(plan, folder), *bind, *keys, *placement, *settings, *template, *extra)
    return Command(argv=argv, environ=child, dropped=dropped, left_out=left_out)


def require_key(host: str, api_key_file: str | None) -> None:
    """Refuse to open a server to the network without a key.

    Raises:
        UsageError: ``key-needed``.
    """
    if not is_loopback(host) and api_key_file is None:
        raise UsageError(
            f"serving on {host} lets others on the network in, and there is no API key",
            code="key-needed",
            hint="let one be made with --new-api-key, or give a file with --api-key-file; ssh -N -L needs neither",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``: 127.0.0.0/8, ::1 or localhost; any other name is not trusted."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _settings_arguments(
    profile: ServingProfile, settings: Settings, *, agent: bool, known_flags: Collection[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    argv: list[str] = []
    left_out: list[str] = []
    for setting, value in zip(profile.settings, setting_values(profile, settings, agent=agent), strict=True):
        if setting.optional and known_flags is not None and setting.flag not in known_flags:
            left_out.append(f"{setting.name} ({setting.flag})")
        else:
            argv += flag_words(setting, value)
    return tuple(argv), tuple(left_out)


def flag_words(setting: Setting, value: Value) -> tuple[str, ...]:
    """A setting as llama-server takes it; nothing for a switch that is off."""
    if isinstance(value, bool):
        return (setting.flag,) if value else ()
    return (setting.flag, str(value))


def locks_memory(argv: Sequence[str]) -> bool:
    """Whether a command line has the engine lock the model in memory, which ``ulimit -l`` must allow."""
    return any(flag in {"-lm", "--load-mode"} and "mlock" in value for flag, value in pairwise(argv)) or (
        "--mlock" in argv
    )


def _python_engine(engine: FoundEngine, plan_file: str | None, folder: str | None) -> tuple[str, ...]:
    if plan_file is None:
        raise UsageError(
            f"the engine {engine.kind} reads the plan from a file, and there is none",
            code="plan-file-needed",
            hint="write one with: kimigguf plan QUANT --json > plan.json",
        )
    module = "embedded" if engine.kind is EngineKind.EMBEDDED else "llama_cpp_python"
    where = ("--folder", folder) if folder else ()
    return (sys.executable, "-m", f"kimigguf.engines.{module}", "--plan", plan_file, *where)


def _choices(effort: str | None, *, agent: bool) -> tuple[str, ...]:
    return (*(("--effort", effort) if effort else ()), *(("--agent",) if agent else ()))
