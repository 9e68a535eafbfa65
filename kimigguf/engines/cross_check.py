"""Holds what an engine says it can use against what the hardware room found: a disagreement is worth a line."""

from collections.abc import Iterable

from kimigguf.engines.builds import foreign_cards, unused_extensions
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


def remarks(machine: Machine, engines: Iterable[FoundEngine]) -> tuple[str, ...]:
    """What is wrong with a build on this machine: known broken, without code for a card, or slower than it could be.

    The last is said only of the engine that would be used, the first that can load Kimi K3.
    """
    able = [engine for engine in engines if engine.supports_k3 is not False]
    broken = [f"{engine.kind.value}: {warning}" for engine in able for warning in engine.warnings]
    cards = [
        f"{engine.kind.value} is built for compute {' '.join(engine.built.cuda_architectures or ())}, and "
        f"{card.name or 'a card'} is {card.compute_capability}: its kernels are made at the first start or not at all"
        for engine in able
        if engine.built is not None
        for card in {one.name: one for one in foreign_cards(engine.built, machine.accelerators or ())}.values()
    ]
    unused = unused_extensions(able[0].built, machine.cpu) if able else ()
    slow = (
        [f"{able[0].kind.value} is built without {' '.join(unused)}, which this CPU has: it may read prompts slower"]
        if unused
        else []
    )
    return (*broken, *cards, *slow)


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
