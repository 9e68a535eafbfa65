"""Which machine was it? The few facts by which a plan or a measurement is held to the machine at hand."""

from dataclasses import dataclass
from typing import Final

from kimigguf.hardware.snapshot import Machine
from kimigguf.units import memory

_TOLERANCE: Final = 50
"""One part in so many: a kernel or firmware update moves MemTotal by less, a module more or less by more; and a card's
memory as rated is that much above what its driver reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator, by its name and its memory."""

    name: str | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """None: not known, or not told. An empty ``cards``: there is none."""

    name: str | None = None
    cpu: str | None = None
    ram_bytes: int | None = None
    cards: tuple[Card, ...] | None = None


def fingerprint(machine: Machine) -> Fingerprint:
    """The facts of ``machine`` that tell it from another."""
    cards = machine.accelerators
    return Fingerprint(
        name=machine.name,
        cpu=machine.cpu.model,
        ram_bytes=machine.ram.total_bytes,
        cards=None if cards is None else tuple(Card(name=one.name, total_bytes=one.total_bytes) for one in cards),
    )


def differences(then: Fingerprint, now: Fingerprint, *, told_by: str) -> tuple[str, ...]:
    """What differs in memory and accelerators, in words; what is unknown differs from nothing.

    ``told_by`` is where ``then`` stands: "the plan".
    """
    found: list[str] = []
    if then.ram_bytes is not None and now.ram_bytes is not None and not _alike(then.ram_bytes, now.ram_bytes):
        found.append(f"RAM: {memory(now.ram_bytes)} installed, {memory(then.ram_bytes)} in {told_by}")
    before, after = then.cards or (), now.cards or ()
    if len(before) != len(after):
        found.append(f"accelerators: {len(after)} now, {len(before)} in {told_by}")
        return tuple(found)
    for index, (was, card) in enumerate(zip(before, after, strict=True)):
        if was != card:
            found.append(
                f"gpu{index}: {card.name or 'unnamed'} with {memory(card.total_bytes)} now,"
                f" {was.name or 'unnamed'} with {memory(was.total_bytes)} in {told_by}"
            )
    return tuple(found)


def is_such(told: Fingerprint, machine: Fingerprint) -> bool:
    """Whether ``machine`` is one as ``told``: each fact that is told must be known there and be the same.

    Accelerators must be told, and where there are none the memory too: else anything would match. A name is no fact.
    """
    if told.cards is None or (not told.cards and told.ram_bytes is None):
        return False
    if told.cpu is not None and told.cpu != machine.cpu:
        return False
    if told.ram_bytes is not None and (machine.ram_bytes is None or not _alike(told.ram_bytes, machine.ram_bytes)):
        return False
    cards = machine.cards
    return cards is not None and len(cards) == len(told.cards) and all(map(_same_card, told.cards, cards))


def _same_card(told: Card, card: Card) -> bool:
    if told.name != card.name:
        return False
    if told.total_bytes is None or card.total_bytes is None:
        return told.total_bytes is None
    return _alike(told.total_bytes, card.total_bytes)


def _alike(one: int, other: int) -> bool:
    return abs(one - other) <= one // _TOLERANCE
