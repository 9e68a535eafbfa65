"""An engine as found on this machine."""

from dataclasses import dataclass
from enum import StrEnum


class EngineKind(StrEnum):
    """The ways to run llama.cpp, in order of preference."""

    LLAMA_SERVER = "llama-server"
    LLAMA = "llama"
    """The unified binary; serves by ``llama serve``."""
    EMBEDDED = "embedded"
    """xllamacpp's copy of llama.cpp's own server, in a process of its own."""
    LLAMA_CPP_PYTHON = "llama-cpp-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """``supports_k3`` None: could not be told. ``reason`` says how it was told, or why not."""

    kind: EngineKind
    path: str | None
    version: str | None
    build: int | None
    supports_k3: bool | None
    backends: tuple[str, ...] | None
    reason: str | None = None
