"""Picks the engine to use out of those on this machine, or says what to do."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kimigguf.catalogue.quants import EngineNeed
from kimigguf.engines.discover import ENVIRONMENT_VARIABLE, MIN_BUILD, discover
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.errors import MachineError, UsageError

ENGINE_CHOICES: Final = ("auto", "llama-server", "embedded", "llama-cpp-python")
_WAYS: Final = (
    "install a current llama.cpp (curl -LsSf https://llama.app/install.sh | sh, or brew install llama.cpp), "
    "use the embedded one (--engine embedded), or name another with --engine-path"
)
_KINDS: Final = {
    "auto": (EngineKind.LLAMA_SERVER, EngineKind.LLAMA, EngineKind.EMBEDDED),
    "llama-server": (EngineKind.LLAMA_SERVER, EngineKind.LLAMA),
    "embedded": (EngineKind.EMBEDDED,),
    "llama-cpp-python": (EngineKind.LLAMA_CPP_PYTHON,),
}


def choose(
    environ: Mapping[str, str],
    *,
    kind: str = "auto",
    engine_path: str | Path | None = None,
    need: EngineNeed | None = None,
    found: tuple[FoundEngine, ...] | None = None,
) -> FoundEngine:
    """The engine to use: the one named by the user, or the first that can load Kimi K3.

    One that the user named (``--engine-path`` or ``KIMIGGUF_LLAMA_SERVER``) is used or refused, never replaced.
    llama-cpp-python is taken only when asked for.

    Raises:
        UsageError: ``unknown-engine`` for a kind that does not exist.
        MachineError: ``no-engine``, ``engine-too-old``, ``quant-unsupported`` - with the build found, the build
            needed, and the ways to get it.
    """
    if kind not in ENGINE_CHOICES:
        raise UsageError(
            f"there is no engine {kind!r}", code="unknown-engine", hint="one of: " + ", ".join(ENGINE_CHOICES)
        )
    found = discover(environ, engine_path=engine_path, closely=False) if found is None else found
    engine = _pick(found, kind)
    if need is not None:
        _check_need(engine, need)
    return engine


def _pick(found: tuple[FoundEngine, ...], kind: str) -> FoundEngine:
    matching = [engine for engine in found if engine.kind in _KINDS[kind]]
    if not matching:
        raise MachineError(
            f"there is no engine{'' if kind == 'auto' else f' of kind {kind}'} on this machine",
            code="no-engine",
            cause=f"looked at --engine-path, {ENVIRONMENT_VARIABLE}, PATH and the installed Python packages",
            hint=_get(kind),
        )
    if matching[0].explicit:
        matching = matching[:1]
    able = [e for e in matching if e.supports_k3] or [e for e in matching if e.supports_k3 is None]
    if able:
        return able[0]
    first = matching[0]
    runs = first.version is not None
    raise MachineError(
        f"the engine {first.path} {'cannot load Kimi K3' if runs else 'cannot be used'}",
        code="engine-too-old" if runs else "engine-unusable",
        cause="; ".join(f"{e.path}: {e.version or 'no version'}: {e.reason}" for e in matching),
        hint=_WAYS if runs else _get(kind),
    )


def _get(kind: str) -> str:
    match kind:
        case "embedded":
            return f"{sys.executable} -m pip install 'xllamacpp>=2026.10.11549'"
        case "llama-cpp-python":
            wanted = "'llama-cpp-python[server]>=0.3.36'"
            return f"{sys.executable} -m pip install {wanted} (it compiles for about ten minutes)"
        case _:
            return (
                f"{sys.executable} -m pip install 'xllamacpp>=2026.10.11549' for the embedded engine, or llama.cpp "
                f"build {MIN_BUILD} or later: curl -LsSf https://llama.app/install.sh | sh"
            )


def _check_need(engine: FoundEngine, need: EngineNeed) -> None:
    if need.min_build is None:
        # Only a fork reads these files, and forks number and name their builds themselves (b10472-mix-...).
        if need.reason is not None and not (engine.explicit and "mix" in (engine.version or "")):
            raise MachineError(
                f"no mainline llama.cpp reads this quant, and {engine.title} is one",
                code="quant-unsupported",
                cause=need.reason,
                hint=need.alternative,
            )
    elif engine.build is not None and engine.build < need.min_build:
        raise MachineError(
            f"this quant needs llama.cpp build {need.min_build}, and {engine.title} is build {engine.build}",
            code="engine-too-old",
            cause=need.reason,
            hint=need.alternative or _WAYS,
        )
