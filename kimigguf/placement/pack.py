"""Packs a model's elements into devices: the arithmetic of placement, in whole bytes and without any policy.

An element is a layer's trunk with what it keeps per sequence, or the head, which comes last. Devices take contiguous
runs of elements, in order; elements before the first run stay on the host, as llama.cpp has it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
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
    """For each element the device of its trunk (None: host), and of each of its expert tensors."""

    device: tuple[int | None, ...]
    experts: tuple[tuple[int | None, ...], ...]

    @property
    def holds_all(self) -> bool:
        """Whether nothing stays on the host."""
        return None not in self.device and all(None not in places for places in self.experts)

    def expert_bytes(self, elements: Sequence[Element]) -> int:
        """Expert bytes on devices."""
        return sum(
            size
            for element, places in zip(elements, self.experts, strict=True)
            for size, place in zip(element.experts, places, strict=True)
            if place is not None
        )

    def used_bytes(self, elements: Sequence[Element], device: int) -> int:
        """What lies on one device."""
        return sum(
            (element.trunk_bytes if trunk == device else 0)
            + sum(size for size, place in zip(element.experts, places, strict=True) if place == device)
            for element, trunk, places in zip(elements, self.device, self.experts, strict=True)
        )


def pack(elements: Sequence[Element], capacities: Sequence[int]) -> Packing:
    """The best packing: first the fewest trunks left on the host, then the most expert bytes on devices.

    Experts lie with their trunk as far as that loses nothing; what a device has left over takes tensors of other
    layers rather than leave them to the host. Where everything fits, devices are filled in proportion, so that none
    is left without slack. A negative capacity is a device that cannot hold even its own buffers: it takes nothing.
    """
    first = _first_on_device(elements, capacities)
    if first == len(elements):
        return Packing(device=(None,) * len(elements), experts=tuple((None,) * len(e.experts) for e in elements))
    whole = [element.trunk_bytes + element.expert_bytes for element in elements]
    if first == 0 and (ends := _balanced(whole, capacities)) is not None:
        return _fill(elements, capacities, first, ends)
    gains = _Gains(elements)
    near = _fill(elements, capacities, first, _best_ends(gains, capacities, first, gains.beside))
    if first > 0 or len(capacities) == 1:
        return near
    ends = _best_ends(gains, capacities, first, gains.anywhere)
    far = _spill(elements, capacities, _fill(elements, capacities, first, ends))
    return far if far.expert_bytes(elements) > near.expert_bytes(elements) else near


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
    """What a run of elements and the slack beside their trunks are worth, in expert bytes."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self.trunk = [0, *accumulate(element.trunk_bytes for element in elements)]
        self.experts = [0, *accumulate(element.expert_bytes for element in elements)]
        self.tensors = [sorted(element.experts, reverse=True) for element in elements]
        self.largest = max((size for element in elements for size in element.experts), default=0) or 1

    def beside(self, start: int, end: int, slack: int) -> int:
        """Bytes kept of the run's own experts: whole elements in order, then tensors; as ``_fill`` chooses them."""
        experts = self.experts
        if experts[end] - experts[start] <= slack:
            return experts[end] - experts[start]
        whole = bisect_right(experts, experts[start] + slack, start, end + 1) - 1
        kept = experts[whole] - experts[start]
        for size in self.tensors[whole]:
            if kept + size <= slack:
                kept += size
        return kept

    def anywhere(self, _start: int, _end: int, slack: int) -> int:
        """Bytes that whole tensors of any layer can take of ``slack``, taking all as large as the largest."""
        return slack // self.largest * self.largest


def _best_ends(
    gains: _Gains, capacities: Sequence[int], first: int, worth: Callable[[int, int, int], int]
) -> list[int]:
    """Ends of the devices' runs that are worth the most, by dynamic programming over devices and ends."""
    trunk = gains.trunk
    count = len(trunk) - 1
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
                    if end > start:
                        break
                    slack = 0  # a device without room takes nothing, and that is fine
                if is_last and end != count:
                    continue
                total = value + worth(start, end, slack)
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
    experts: list[list[int | None]] = [[None] * len(element.experts) for element in elements]
    start = first
    for number, (capacity, end) in enumerate(zip(capacities, ends, strict=True)):
        device[start:end] = [number] * (end - start)
        slack = capacity - sum(element.trunk_bytes for element in elements[start:end])
        _take_own(elements, experts, range(start, end), number, slack)
        start = end
    return Packing(device=tuple(device), experts=tuple(map(tuple, experts)))


def _take_own(
    elements: Sequence[Element], experts: list[list[int | None]], run: range, number: int, slack: int
) -> None:
    """Give a device the experts of its own run that fit in its slack."""
    for index in run:
        element = elements[index]
        if element.expert_bytes <= slack:
            experts[index] = [number] * len(element.experts)
            slack -= element.expert_bytes
            continue
        # One layer is split at most: its largest tensors that still fit; the layers after it stay on the host.
        for tensor in _largest_first(element):
            if element.experts[tensor] <= slack:
                experts[index][tensor] = number
                slack -= element.experts[tensor]
        break


def _spill(elements: Sequence[Element], capacities: Sequence[int], packing: Packing) -> Packing:
    """Give what devices have left over to tensors that would stay on the host: whole layers first, then single ones."""
    experts = [list(places) for places in packing.experts]
    left = [capacity - packing.used_bytes(elements, number) for number, capacity in enumerate(capacities)]
    for index, element in enumerate(elements):
        if element.experts and all(place is None for place in experts[index]):
            number = max(range(len(left)), key=lambda d: left[d])
            if element.expert_bytes <= left[number]:
                experts[index] = [number] * len(element.experts)
                left[number] -= element.expert_bytes
    for index, element in enumerate(elements):
        for tensor in _largest_first(element):
            fitting = [d for d, room in enumerate(left) if room >= element.experts[tensor]]
            if experts[index][tensor] is None and fitting:
                number = min(fitting, key=lambda d: left[d])  # the tightest: larger gaps stay for larger tensors
                experts[index][tensor] = number
                left[number] -= element.experts[tensor]
    return Packing(device=packing.device, experts=tuple(map(tuple, experts)))


def _largest_first(element: Element) -> list[int]:
    return sorted(range(len(element.experts)), key=lambda tensor: -element.experts[tensor])
