"""Where every byte of a model goes: a pure function from model, budget and settings to a placement or a shortfall.

The trunk goes to the devices first, because every token reads all of it; then routed experts, of which a token reads
16 of 896. What the devices do not take stays in RAM. What does not fit there gives way in a fixed order, in words.
"""

from dataclasses import replace

from kimigguf.memory.layout import HOST
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import Budget
from kimigguf.placement.give_way import lower
from kimigguf.placement.placed import Placed, Policy, Shortfall, resident_bytes
from kimigguf.placement.table import Table
from kimigguf.units import memory


def place(spec: ModelSpec, budget: Budget, settings: Settings, *, policy: Policy | None = None) -> Placed | Shortfall:
    """Place ``spec`` on a machine with ``budget``, lowering ``settings`` only as far as it must to fit.

    A budget of unknown RAM bounds nothing there: the placement is made for the devices, and a notice says so.
    """
    policy = policy or Policy()
    table = Table(spec, budget)
    tried: dict[Settings, Placed] = {}

    def placed(wanted: Settings) -> Placed:
        if wanted not in tried:
            tried[wanted] = table.place(wanted)
        return tried[wanted]

    def fits(wanted: Settings) -> bool:
        answer = placed(wanted)
        return answer.ledger.total_bytes(HOST) <= table.host_have(answer)

    if fits(settings):
        return _noted(placed(settings), budget)
    lowest, words, fitting = lower(settings, fits, context_floor_tokens=policy.context_floor_tokens)
    if fitting:
        return _noted(replace(placed(lowest), gave_way=words), budget)
    if policy.may_stream and (streaming := _stream(table, settings, policy)):
        return _noted(streaming, budget)
    return _shortfall(table, placed(lowest), words, policy)


def _stream(table: Table, settings: Settings, policy: Policy) -> Placed | None:
    """A placement whose host experts are paged from disk, or None when even the rest has no room."""
    pageable = replace(settings, repack=False)

    def fits(wanted: Settings) -> bool:
        answer = table.place(wanted, experts_stay_pageable=True)
        return resident_bytes(answer.ledger) <= table.host_have(answer)

    words: tuple[str, ...] = ()
    if not fits(pageable):
        pageable, words, fitting = lower(pageable, fits, context_floor_tokens=policy.context_floor_tokens)
        if not fitting:
            return None
    placed = table.place(pageable, experts_stay_pageable=True)
    streamed = max(0, placed.ledger.total_bytes(HOST) - table.host_have(placed))
    notice = (
        f"{memory(streamed)} of the experts have no room in RAM and stream from disk as tokens need them:"
        " expect seconds per token, not tokens per second"
    )
    return replace(placed, gave_way=words, streamed_bytes=streamed, notices=(notice,))


def _shortfall(table: Table, lowest: Placed, words: tuple[str, ...], policy: Policy) -> Shortfall:
    have, need = table.host_have(lowest), lowest.ledger.total_bytes(HOST)
    resident = resident_bytes(lowest.ledger)
    if policy.may_stream:
        reason = f"even trunk, cache and buffers ({memory(resident)}) have no room in {memory(have)} of RAM"
    else:
        reason = f"RAM would have to hold {memory(need)} and can hold {memory(have)}; {memory(need - have)} are missing"
    return Shortfall(need_bytes=need, have_bytes=have, resident_bytes=resident, reason=reason, gave_way=words)


def _noted(placed: Placed, budget: Budget) -> Placed:
    notices = list(placed.notices)
    if budget.ram_bytes is None:
        notices.append("how much RAM may be used is unknown, so nothing was checked against it")
    notices.extend(
        f"{device.name} is left empty: its memory is unknown"
        for device in budget.devices
        if device.usable_bytes is None
    )
    if placed.ledger.unknown:
        what = ", ".join(sorted({row.component.value for row in placed.ledger.unknown}))
        notices.append(f"unknown, and so not counted: {what}")
    return replace(placed, notices=tuple(notices))
