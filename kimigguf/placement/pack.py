"""Packs a model's elements into devices: the arithmetic of placement, in whole bytes and without any policy.

An element is a layer's trunk with what it keeps per sequence, or the head, which comes last. Devices take contiguous
runs of elements, in order; elements before the first run stay on the host, as llama.cpp has it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """``trunk_bytes`` must move as one; each of ``experts`` (bytes per expert tensor, may be empty) may stay behind."""

    trunk_bytes: int
    experts: tuple[int, ...] = ()

    @property
    def expert_bytes(self) -> int:
        return sum(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """For each element its device (None: host), and which of its expert tensors lie there too."""

    device: tuple[int | None, ...]
    kept: tuple[tuple[bool, ...], ...]

    def expert_bytes(self, elements: Sequence[Element]) -> int:
        """Expert bytes on devices."""
        return sum(
            size
            for element, kept in zip(elements, self.kept, strict=True)
            for size, here in zip(element.experts, kept, strict=True)
            if here
        )

    def used_bytes(self, elements: Sequence[Element], device: int) -> int:
        """What lies on one device."""
        return sum(
            element.trunk_bytes + sum(size for size, here in zip(element.experts, kept, strict=True) if here)
            for element, place, kept in zip(elements, self.device, self.kept, strict=True)
            if place == device
        )


def pack(elements: Sequence[Element], capacities: Sequence[int]) -> Packing:
    """The best packing: first the fewest trunks left on the host, then the most expert bytes on devices.

    Where everything fits, the devices are filled in proportion, so that none is left without slack.
    A negative capacity is a device that cannot even hold its own buffers: it takes nothing.
    """
    first = _first_on_device(elements, capacities)
    if first == len(elements):
        return Packing(device=(None,) * len(elements), kept=tuple((False,) * len(e.experts) for e in elements))
    whole = [element.trunk_bytes + element.expert_bytes for element in elements]
    ends = _balanced(whole, capacities) if first == 0 else None
    if ends is None:
        ends = _best_ends(elements, capacities, first)
    return _fill(elements, capacities, first, ends)


def _first_on_device(elements: Sequence[Element], capacities: Sequence[int]) -> int:
    """How many trunks must stay on the host: each device, from the last to the first, takes all that it can."""
    index = len(elements)
    for capacity in reversed(capacities):
        room = capacity
        while index > 0 and elements[index - 1].trunk_bytes <= room:
            index -= 1
            room -= elements[index].trunk_bytes
    return index


_PRECISION: Final = 1024


def _balanced(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Ends of runs that hold everything with the lowest highest share of capacity used, None where it does not fit."""

    def ends_at(share: int) -> list[int] | None:
        ends, index = [], 0
        for capacity in capacities:
            room = capacity * share // _PRECISION
            while index < len(sizes) and sizes[index] <= room:
                room -= sizes[index]
                index += 1
            ends.append(index)
        return ends if index == len(sizes) else None

    best = ends_at(_PRECISION)
    if best is None:
        return None
    low, high = 0, _PRECISION  # `high` is known to hold everything, `low` not to
    while high - low > 1:
        middle = (low + high) // 2
        ends = ends_at(middle)
        if ends is None:
            low = middle
        else:
            high, best = middle, ends
    return best


class _Gains:
    """Expert bytes that fit beside the trunks of a run: whole elements in order, then tensors of those left over."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self.trunk = [0, *accumulate(element.trunk_bytes for element in elements)]
        self.experts = [0, *accumulate(element.expert_bytes for element in elements)]
        self.tensors = [sorted(element.experts, reverse=True) for element in elements]

    def of(self, start: int, end: int, slack: int) -> int:
        """Bytes kept of elements ``start`` to ``end`` in ``slack`` bytes; the greedy choice that ``_fill`` makes."""
        experts = self.experts
        if experts[end] - experts[start] <= slack:
            return experts[end] - experts[start]
        whole = bisect_right(experts, experts[start] + slack, start, end + 1) - 1
        kept = experts[whole] - experts[start]
        for size in self.tensors[whole]:
            if kept + size <= slack:
                kept += size
        return kept


def _best_ends(elements: Sequence[Element], capacities: Sequence[int], first: int) -> list[int]:
    """Ends of the devices' runs that keep the most expert bytes, by dynamic programming over devices and ends."""
    gains, count = _Gains(elements), len(elements)
    trunk = gains.trunk
    best: dict[int, int] = {first: 0}
    came_from: list[dict[int, int]] = []
    for position, capacity in enumerate(capacities):
        is_last = position == len(capacities) - 1
        following: dict[int, int] = {}
        origin: dict[int, int] = {}
        for start, value in best.items():
            room = trunk[start] + capacity
            for end in range(start, count + 1):
                slack = room - trunk[end]
                if slack < 0:
                    if end == start:  # a device without room takes nothing, and that is fine
                        slack = 0
                    else:
                        break
                if is_last and end != count:
                    continue
                total = value + gains.of(start, end, slack)
                if total > following.get(end, -1):
                    following[end] = total
                    origin[end] = start
        came_from.append(origin)
        best = following
    ends = [count]
    for origin in reversed(came_from[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _fill(elements: Sequence[Element], capacities: Sequence[int], first: int, ends: Sequence[int]) -> Packing:
    device: list[int | None] = [None] * len(elements)
    kept = [[False] * len(element.experts) for element in elements]
    start = first
    for number, (capacity, end) in enumerate(zip(capacities, ends, strict=True)):
        slack = capacity - sum(element.trunk_bytes for element in elements[start:end])
        device[start:end] = [number] * (end - start)
        for index in range(start, end):
            element = elements[index]
            if element.expert_bytes <= slack:
                kept[index] = [True] * len(element.experts)
                slack -= element.expert_bytes
                continue
            # One layer is split at most: its largest expert tensors that still fit; the layers after it stay away.
            for tensor in sorted(range(len(element.experts)), key=lambda t: -elements[index].experts[t]):
                if element.experts[tensor] <= slack:
                    kept[index][tensor] = True
                    slack -= element.experts[tensor]
            break
        start = end
    return Packing(device=tuple(device), kept=tuple(map(tuple, kept)))
