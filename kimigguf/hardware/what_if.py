"""What-ifs: a machine with one thing changed, written ``ram=1536GiB`` or ``gpu+=2xrtx-pro-6000``."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kimigguf.errors import UsageError
from kimigguf.hardware.snapshot import Accelerator, Disk, DiskKind, Machine, MemoryKind, Ram
from kimigguf.units import memory, parse_size, storage

HINT: Final = "write ram=1536GiB, ram+=256GiB, gpu=rtx-4090, gpu+=2xrtx-pro-6000, gpu+=24GiB, gpu=none or disk+=4TB"
_CHANGE: Final = re.compile(r"(ram|gpu|disk)(\+?)=(.+)")
_COUNTED: Final = re.compile(r"(?:(\d{1,4})x[ -]?)?(.+)")
_MOST_GPUS: Final = 1024
_MAKERS: Final = frozenset({"nvidia", "amd", "intel", "geforce", "radeon"})
"""Words that nobody types and that tell no two cards apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change: what (``ram``, ``gpu``, ``disk``), whether it adds to what is there, and the value as written."""

    what: str
    adds: bool
    value: str


def parse_change(text: str) -> Change:
    """The change that ``text`` means.

    Raises:
        UsageError: ``bad-change``.
    """
    match = _CHANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no change of a machine", code="bad-change", hint=HINT)
    return Change(what=match[1], adds=match[2] == "+", value=match[3].strip())


def change(machine: Machine, texts: Sequence[str], known: Iterable[Accelerator]) -> Machine:
    """The machine with every change made, in order.

    What was measured of the present one no longer holds: the parts that change are at rest in the new one.

    Args:
        machine: Live or described.
        texts: Such as ``ram=1536GiB``.
        known: The accelerators that may be named, usually those of all machine files.

    Raises:
        UsageError: ``bad-change``, ``unknown-gpu``, ``ambiguous-gpu``, or a size that is none.
    """
    choices = tuple(known)
    changed = machine
    for text in texts:
        one = parse_change(text)
        match one.what:
            case "ram":
                changed = _with_ram(changed, one)
            case "gpu":
                changed = _with_gpus(changed, one, choices)
            case _:
                changed = _with_disk(changed, one)
    if not texts:
        return machine
    note = ", ".join(texts)
    return replace(
        changed, name=f"{machine.name} with {note}", note=f"{machine.note}; {note}" if machine.note else note
    )


def _with_ram(machine: Machine, one: Change) -> Machine:
    size = parse_size(one.value)
    if one.adds and machine.ram.total_bytes is None:
        raise UsageError(f"the RAM of {machine.name} is unknown, so nothing can be added", code="bad-change", hint=HINT)
    total = size + (machine.ram.total_bytes or 0 if one.adds else 0)
    # A unified accelerator's memory is the RAM: it grows with it, and so does the share that it may have.
    cards = (
        None if machine.accelerators is None else tuple(_in_ram(c, machine.ram, total) for c in machine.accelerators)
    )
    return replace(
        machine, ram=Ram(total_bytes=total, swap_total_bytes=machine.ram.swap_total_bytes), accelerators=cards
    )


def _in_ram(card: Accelerator, before: Ram, total: int) -> Accelerator:
    if card.memory_kind is not MemoryKind.UNIFIED:
        return card
    most = card.working_set_bytes
    if most is not None and before.total_bytes:
        most = most * total // before.total_bytes
    return replace(card, total_bytes=total, free_bytes=None, working_set_bytes=most)


def _with_gpus(machine: Machine, one: Change, known: Sequence[Accelerator]) -> Machine:
    present = machine.accelerators or () if one.adds else ()
    if one.value.lower() == "none":
        if one.adds:
            raise UsageError("no GPU cannot be added", code="bad-change", hint="write gpu=none")
        return replace(machine, accelerators=())
    match = _COUNTED.fullmatch(one.value)
    count, name = (int(match[1] or 1), match[2]) if match else (1, one.value)
    if not 1 <= count <= _MOST_GPUS:
        raise UsageError(f"{count} GPUs are no plausible number", code="bad-change", hint=HINT)
    card = find_accelerator(name, known)
    return replace(machine, accelerators=(*present, *(card for _ in range(count))))


def find_accelerator(text: str, known: Iterable[Accelerator]) -> Accelerator:
    """The accelerator that ``text`` means: a size (a discrete card of that much memory), or words of a known name.

    Raises:
        UsageError: ``unknown-gpu`` with what is known, ``ambiguous-gpu`` with what it could be.
    """
    if re.match(r"\d", text) and re.search(r"(?i)[kmgt]i?b?$", text):
        size = parse_size(text)
        return Accelerator(name=f"GPU with {memory(size)}", memory_kind=MemoryKind.DISCRETE, total_bytes=size)
    by_name = {card.name: card for card in known if card.name and card.memory_kind is MemoryKind.DISCRETE}
    asked = _words(text)
    found = {name: card for name, card in by_name.items() if asked and asked <= _words(name)}
    # "rtx 4090" must not be ambiguous only because there is also an "RTX 4090 D": all words used up wins.
    exact = {name: card for name, card in found.items() if _words(name) - _MAKERS == asked - _MAKERS}
    chosen = exact or found
    if len({card.total_bytes for card in chosen.values()}) == 1:
        # Editions of one card with the same memory: the verdict is the same for all of them, so the fastest is taken.
        best = max(chosen.values(), key=lambda card: card.bandwidth_bytes_per_second or 0)
        return replace(best, free_bytes=None, uuid=None, used_by_others_bytes=None)
    if chosen:
        names = ", ".join(sorted(chosen))
        raise UsageError(f"{text!r} may mean several GPUs", code="ambiguous-gpu", hint=f"name one of: {names}")
    names = ", ".join(sorted(by_name)) or "none"
    sized = f"{text}GiB for a card of that much memory; " if text.isdecimal() else ""
    hint = f"{sized}known: {names}"
    raise UsageError(f"there is no GPU {text!r} in the machine files", code="unknown-gpu", hint=hint)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9.]+", name.lower()))


def _with_disk(machine: Machine, one: Change) -> Machine:
    size = parse_size(one.value)
    new = Disk(mount="/", file_system=None, kind=DiskKind.NVME, total_bytes=size, free_bytes=size)
    if not one.adds:
        return replace(machine, disks=(new,))
    mount = f"/added-{storage(size).replace(' ', '')}"
    return replace(machine, disks=(*(machine.disks or ()), replace(new, mount=mount)))
