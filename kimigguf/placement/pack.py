"""Packs a model's elements into devices: the arithmetic of placement, in whole bytes and without any policy.

An element is a layer's trunk with what it keeps per sequence, or the head, which comes last. Devices take contiguous
runs of elements, in order; elements before the first run stay on the host, as llama.cpp has it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_HOP: Final = 8
"""One part in so many of what experts on a device save is lost where it is not their trunk's device: every token's
activations go there and back. About 60 us, where 340 us would be spent on reading them from RAM: a layer of UD-IQ1_S
has 100 MB of experts per token, and 300 GB/s are usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """``trunk_bytes`` must move as one; each of ``experts`` (bytes per expert tensor, may be empty) may stay behind.

    ``shared_bytes`` is what a device needs once, however many elements with it it holds; all that have it, alike.
    """

    trunk_bytes: int
    experts: tuple[int, ...] = ()
    shared_bytes: int = 0

    @property
    def expert_bytes(self) -> int:
        return sum(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """For each element the device of its trunk (None: host), and of each of its expert tensors."""

    device: tuple[int | None, ...]
    experts: tuple[tuple[int | None, ...], ...]

    def worth(self, elements: Sequence[Element]) -> int:
        """Expert bytes on devices, less a part of those that lie on another device than their trunk."""
        kept = away = 0
        for element, trunk, places in zip(elements, self.device, self.experts, strict=True):
            for size, place in zip(element.experts, places, strict=True):
                if place is not None:
                    kept += size
                    away += size if place != trunk else 0
        return kept - away // _HOP

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
        """What lies on one device, without what its elements share."""
        return sum(
            (element.trunk_bytes if trunk == device else 0)
            + sum(size for size, place in zip(element.experts, places, strict=True) if place == device)
            for element, trunk, places in zip(elements, self.device, self.experts, strict=True)
        )

    def shared_bytes(self, elements: Sequence[Element], device: int) -> int:
        """What the elements of one device share."""
        return max(
            (e.shared_bytes for e, trunk in zip(elements, self.device, strict=True) if trunk == device), default=0
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
    if first == 0 and (ends := _balanced(elements, capacities)) is not None:
        return _fill(elements, capacities, first, ends)
    near, far = (_fill(elements, capacities, first, ends) for ends in _best_ends(elements, capacities, first))
    if first > 0 or len(capacities) == 1:
        return near
    return max((_spill(elements, capacities, packing) for packing in (near, far)), key=lambda p: p.worth(elements))


def stretched(elements: Sequence[Element], capacities: Sequence[int], packing: Packing, device: int) -> Packing | None:
    """One trunk fewer on the host: ``device`` takes one more, and runs before it begin and end one earlier.

    None where no trunk is on the host, or the device has no room for the one that comes to it.
    """
    first = packing.device.count(None)
    # Where a device has no run, it would begin where the next one's does.
    starts = [next((i for i, d in enumerate(packing.device) if d is not None and d >= n), len(elements))
              for n in range(len(capacities))]  # fmt: skip
    if first == 0 or elements[starts[device] - 1].trunk_bytes > capacities[device] - packing.used_bytes(
        elements, device
    ):
        return None
    ends = [start - 1 if number <= device else start for number, start in enumerate(starts)][1:]
    return _fill(elements, capacities, first - 1, [*ends, len(elements)])


def _first_on_device(elements: Sequence[Element], capacities: Sequence[int]) -> int:
    """How many trunks must stay on the host: each device, from the last to the first, takes all that it can."""
    index = len(elements)
    for capacity in reversed(capacities):
        room, shared = capacity, 0
        while index > 0:
            element = elements[index - 1]
            more = max(shared, element.shared_bytes)
            room -= element.trunk_bytes + more - shared
            if room < 0:
                break
            shared = more
            index -= 1
    return index


_PRECISION: Final = 1024


def _balanced(elements: Sequence[Element], capacities: Sequence[int]) -> list[int] | None:
    """Ends of runs that hold everything with the lowest highest share of capacity used, None where it does not fit."""
    sizes = [element.trunk_bytes + element.expert_bytes for element in elements]

    def ends_at(share: int) -> list[int] | None:
        ends, index = [], 0
        for capacity in capacities:
            room, shared = capacity * share // _PRECISION, 0
            while index < len(sizes):
                more = max(shared, elements[index].shared_bytes)
                room -= sizes[index] + more - shared
                if room < 0:
                    break
                shared = more
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


class _Runs:
    """What every run of elements is worth on a device, in expert bytes."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self.count = len(elements)
        self._trunk = [0, *accumulate(element.trunk_bytes for element in elements)]
        self._experts = [0, *accumulate(element.expert_bytes for element in elements)]
        self._tensors = [sorted(element.experts, reverse=True) for element in elements]
        self._sharing = [0, *accumulate(element.shared_bytes > 0 for element in elements)]
        self._shared = max((element.shared_bytes for element in elements), default=0)
        self._largest = max((size for element in elements for size in element.experts), default=0) or 1

    def of(self, start: int, capacity: int, least_end: int) -> tuple[list[int], list[int]]:
        """Two values for each end from ``least_end`` on that a run from ``start`` can have on a device.

        The first is what the device keeps of the run's own experts, chosen as ``_fill`` chooses them. The second counts
        tensors of other runs too that would take what is left, all as large as the largest; they may run out.
        """
        experts, trunk, sharing, largest = self._experts, self._trunk, self._sharing, self._largest
        room, before, shares = trunk[start] + capacity, experts[start], sharing[start]
        # Experts of elements up to here are kept whole; of fewer and fewer as the run grows.
        whole = bisect_right(experts, before + room - trunk[start], start) - 1
        beside: list[int] = []
        anywhere: list[int] = []
        for end in range(least_end, self.count + 1):
            slack = room - trunk[end]
            if sharing[end] > shares:
                slack -= self._shared
            if slack < 0:
                if end > start:
                    break
                slack = 0  # a device without room takes nothing, and that is fine
            own = experts[end] - before
            if own > slack:
                while experts[whole] - before > slack:
                    whole -= 1
                own = experts[whole] - before
                for size in self._tensors[whole]:
                    if own + size <= slack:
                        own += size
            beside.append(own)
            away = (slack - own) // largest * largest
            anywhere.append(own + away - away // _HOP)
        return beside, anywhere


def _best_ends(elements: Sequence[Element], capacities: Sequence[int], first: int) -> tuple[list[int], list[int]]:
    """Ends of the devices' runs that are worth the most, for each of the two values of ``_Runs``.

    By dynamic programming over devices and ends; -1 is the value of an end that cannot be reached.
    """
    runs = _Runs(elements)
    nothing = [-1] * (runs.count + 1)
    best = list(nothing), list(nothing)
    best[0][first] = best[1][first] = 0
    came_from: list[tuple[list[int], list[int]]] = []
    last = len(capacities) - 1
    for position, capacity in enumerate(capacities):
        following, origin = (list(nothing), list(nothing)), (list(nothing), list(nothing))
        for start in range(first, runs.count + 1):
            if best[0][start] < 0:
                continue
            least_end = runs.count if position == last else start
            for which, values in enumerate(runs.of(start, capacity, least_end)):
                so_far, reached, source = best[which][start], following[which], origin[which]
                for end, value in enumerate(values, least_end):
                    if so_far + value > reached[end]:
                        reached[end] = so_far + value
                        source[end] = start
        came_from.append(origin)
        best = following
    return _followed(came_from, 0, runs.count), _followed(came_from, 1, runs.count)


def _followed(came_from: Sequence[tuple[list[int], list[int]]], which: int, count: int) -> list[int]:
    ends = [count]
    for origin in reversed(came_from[1:]):
        ends.append(origin[which][ends[-1]])
    return ends[::-1]


def _fill(elements: Sequence[Element], capacities: Sequence[int], first: int, ends: Sequence[int]) -> Packing:
    device: list[int | None] = [None] * len(elements)
    experts: list[list[int | None]] = [[None] * len(element.experts) for element in elements]
    start = first
    for number, (capacity, end) in enumerate(zip(capacities, ends, strict=True)):
        device[start:end] = [number] * (end - start)
        run = elements[start:end]
        slack = capacity - sum(element.trunk_bytes for element in run)
        slack -= max((element.shared_bytes for element in run), default=0)
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
    left = [
        capacity - packing.used_bytes(elements, number) - packing.shared_bytes(elements, number)
        for number, capacity in enumerate(capacities)
    ]
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
