"""What an engine sees of a machine: a plan may only use accelerators that the engine can drive, in its own order."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kimigguf.engines.engine import EngineDevice, FoundEngine
from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind

_SOFTWARE: Final = ("llvmpipe", "lavapipe", "swiftshader")
"""Vulkan drivers that compute on the processor: they list main memory as a device's own."""


def usable_devices(engine: FoundEngine) -> tuple[EngineDevice, ...] | None:
    """The engine's devices that are real accelerators; None where it could not be asked."""
    if engine.devices is None:
        return None
    return tuple(
        device for device in engine.devices if not any(word in (device.description or "").lower() for word in _SOFTWARE)
    )


def seen_by(machine: Machine, engine: FoundEngine) -> Machine:
    """The machine with the accelerators that ``engine`` sees, in the engine's order; unchanged if that is unknown.

    CUDA numbers devices fastest first, NVML by bus: they are matched by name, then by size. What the engine reports
    as free counts where it is less than what the driver told.
    """
    devices = usable_devices(engine)
    if devices is None:
        return machine
    left = list(machine.accelerators or ())
    return replace(machine, accelerators=tuple(_match(device, left) for device in devices))


def unseen(machine: Machine, engine: FoundEngine) -> str | None:
    """A sentence about accelerators of the machine that the engine does not see; None if it sees all of them."""
    devices = usable_devices(engine)
    missing = len(machine.accelerators or ()) - len(devices or ())
    if devices is None or missing <= 0:
        return None
    backends = ", ".join(engine.backends or ())
    return (
        f"{engine.title}, for {backends}, does not see {missing} of this machine's {len(machine.accelerators or ())} "
        "accelerators; a llama.cpp built for them would: name it with --engine-path"
    )


def undescribed(machine: Machine, engine: FoundEngine) -> str | None:
    """A sentence about devices of the engine of whose memory nothing can be planned; None if there are none.

    The driver's own tools did not answer, or are not there: the engine has the device, and the plan would go without.
    """
    devices = usable_devices(engine)
    seen = seen_by(machine, engine).accelerators or ()
    lost = [device for device, found in zip(devices or (), seen, strict=False) if _is_undescribed(found)]
    if devices is None or not lost:
        return None
    names = ", ".join(f"{device.name} ({device.description or 'without a name'})" for device in lost)
    reasons = "; ".join(f"{one.what}: {one.reason}" for one in machine.unknown if one.what.startswith("accelerators"))
    return (
        f"{engine.title} has {names}, of whose memory this machine told too little, so nothing is planned on it"
        + (f" ({reasons})" if reasons else "")
        + "; kimigguf inspect shows what is missing"
    )


def _is_undescribed(found: Accelerator) -> bool:
    """What the budget cannot count: unified memory is the host's own, any other needs its kind and a size."""
    if found.memory_kind is MemoryKind.UNIFIED:
        return False
    return found.memory_kind is None or (found.total_bytes is None and found.free_bytes is None)


def _match(device: EngineDevice, left: list[Accelerator]) -> Accelerator:
    """Take the accelerator that is meant out of ``left``; one that nobody detected is described by the engine alone."""
    index = _best(device, left)
    if index is None:
        # Whether its memory is its own, the engine does not say: Metal's is the host's, the rest stays unknown.
        kind = MemoryKind.UNIFIED if device.name.startswith(("MTL", "Metal")) else None
        return Accelerator(
            name=device.description, memory_kind=kind, total_bytes=device.total_bytes, free_bytes=device.free_bytes
        )
    found = left.pop(index)
    free = [size for size in (found.free_bytes, device.free_bytes) if size is not None]
    return replace(found, free_bytes=min(free) if free else None)


def _best(device: EngineDevice, left: Sequence[Accelerator]) -> int | None:
    """The accelerator of the same name, of those the nearest in size; else one whose name is unknown."""
    wanted = _words(device.description)
    same = [index for index, item in enumerate(left) if item.name and _words(item.name) == wanted]
    same = same or [index for index, item in enumerate(left) if item.name and _words(item.name) & wanted]
    same = same or [index for index, item in enumerate(left) if not item.name]
    if not same:
        return None
    size = device.total_bytes or 0
    return min(same, key=lambda index: abs((left[index].total_bytes or 0) - size))


def _words(name: str | None) -> frozenset[str]:
    """The words of a device's name that tell models apart."""
    words = re.findall(r"[a-z0-9]+", (name or "").lower())
    return frozenset(words) - {"nvidia", "amd", "intel", "geforce", "graphics", "gpu", "r", "tm", "radeon"}
