"""Holds what an engine says it can use against what the hardware room found: a disagreement is worth a line."""

from collections.abc import Iterable

from kimigguf.engines.engine import FoundEngine
from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind
from kimigguf.units import memory

_TOLERANCE = 0.1
"""Drivers and runtimes report the same card up to a few per cent apart (ECC, reserved pages)."""


def disagreements(machine: Machine, engines: Iterable[FoundEngine]) -> tuple[str, ...]:
    """One sentence per engine that sees other accelerators than ``machine`` has; none where either is unknown."""
    if machine.accelerators is None:
        return ()
    return tuple(
        sentence for engine in engines if (sentence := _disagreement(engine, machine.accelerators)) is not None
    )


def _disagreement(engine: FoundEngine, cards: tuple[Accelerator, ...]) -> str | None:
    if engine.devices is None or engine.supports_k3 is False:
        return None
    name = engine.kind.value
    if cards and not engine.devices:
        return f"{name} sees none of the {len(cards)} accelerator(s) here: its backends are {_backends(engine)}"
    if len(engine.devices) != len(cards):
        seen = ", ".join(device.description or device.name for device in engine.devices)
        return f"{name} lists {len(engine.devices)} accelerator(s) ({seen}), this machine shows {len(cards)}"
    ours = sorted(card.total_bytes or 0 for card in cards if card.memory_kind is MemoryKind.DISCRETE)
    theirs = sorted(device.total_bytes or 0 for device in engine.devices)
    if len(ours) != len(theirs):  # unified memory is counted in as many ways as there are backends
        return None
    for mine, its in zip(ours, theirs, strict=True):
        if mine and its and abs(mine - its) > _TOLERANCE * mine:
            return f"{name} counts {memory(its)} on an accelerator that the driver says has {memory(mine)}"
    return None


def _backends(engine: FoundEngine) -> str:
    return " ".join(engine.backends) if engine.backends else "unknown"
