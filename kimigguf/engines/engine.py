"""An engine as found on this machine."""

from dataclasses import dataclass
from enum import StrEnum

from kimigguf.hardware.snapshot import Unknown


class EngineKind(StrEnum):
    """The ways to run llama.cpp, in order of preference."""

    LLAMA_SERVER = "llama-server"
    LLAMA = "llama"
    """The unified binary; serves by ``llama serve``."""
    EMBEDDED = "embedded"
    """xllamacpp's copy of llama.cpp's own server, in a process of its own."""
    LLAMA_CPP_PYTHON = "llama-cpp-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDevice:
    """An accelerator in the engine's own words (``CUDA0``, ``Vulkan1``), in the engine's own order. Sizes in bytes."""

    name: str
    description: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What an engine was built with; None: unknown, with the reason in ``unknown``.

    ``backends`` are compiled in or lie beside the program, whether or not a device answers to them; ``cpu_variants``
    the CPU libraries that it chooses from, and ``cpu_variant`` the one it loads here (None where it is built in one
    piece). ``cpu_extensions`` are in the names of /proc/cpuinfo, ``cuda_architectures`` as compute capabilities.
    """

    backends: tuple[str, ...] | None = None
    cuda_version: str | None = None
    cuda_architectures: tuple[str, ...] | None = None
    cpu_extensions: tuple[str, ...] | None = None
    cpu_variants: tuple[str, ...] = ()
    cpu_variant: str | None = None
    unknown: tuple[Unknown, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEngine:
    """``supports_k3`` None: could not be told. ``reason`` says how it was told, or why not.

    ``devices`` is what the engine itself lists on this machine, None where it could not be asked; ``backends`` follows
    from it and always holds ``cpu``. ``chosen_by`` names what pointed here (``--engine-path``, ``PATH``, ...), and
    ``explicit`` is True where that was the user rather than a search. ``warnings`` are sentences about builds that are
    known to be broken; ``built`` is None where nobody looked.
    """

    kind: EngineKind
    path: str | None
    version: str | None
    build: int | None
    supports_k3: bool | None
    backends: tuple[str, ...] | None
    reason: str | None = None
    devices: tuple[EngineDevice, ...] | None = None
    chosen_by: str | None = None
    explicit: bool = False
    built: Build | None = None
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How the engine is called to people: by its file where it is a program, else by its package."""
        if self.kind is EngineKind.EMBEDDED:
            return f"the embedded llama.cpp ({self.version})"
        if self.kind is EngineKind.LLAMA_CPP_PYTHON:
            return str(self.version)
        return f"{self.path} ({self.version})" if self.version else str(self.path)
