"""Packing against brute force and by property: contiguous, within capacity, the best there is."""

from itertools import combinations_with_replacement, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kimigguf.placement.pack import Element, Packing, _fill, pack, stretched

elements_lists = st.lists(
    st.builds(
        Element,
        trunk_bytes=st.integers(1, 20),
        experts=st.lists(st.integers(1, 60), max_size=3).map(tuple),
        shared_bytes=st.sampled_from([0, 0, 30]),
    ),
    min_size=1,
    max_size=7,
)
capacity_lists = st.lists(st.integers(-10, 200), max_size=4)


def check(elements: list[Element], capacities: list[int], packing: Packing) -> None:
    assert len(packing.device) == len(packing.experts) == len(elements)
    ranks = [-1 if device is None else device for device in packing.device]
    assert all(before <= after for before, after in pairwise(ranks)), "runs must be contiguous and in order"
    for number, capacity in enumerate(capacities):
        assert packing.used_bytes(elements, number) == 0 or holds(elements, packing, number, capacity)
    for element, device, places in zip(elements, packing.device, packing.experts, strict=True):
        assert len(places) == len(element.experts)
        assert device is not None or set(places) <= {None}, "experts go to a device only with their trunk on one"


def fewest_on_host(elements: list[Element], capacities: list[int]) -> int:
    """By trying every way to cut the suffix into runs."""
    count = len(elements)

    def need(start: int, end: int) -> int:
        run = elements[start:end]
        return sum(element.trunk_bytes for element in run) + max((element.shared_bytes for element in run), default=0)

    for first in range(count + 1):
        for inner in combinations_with_replacement(range(first, count + 1), max(0, len(capacities) - 1)):
            ends = (*inner, count) if capacities else ()
            if not capacities and first < count:
                continue
            starts = (first, *ends)
            if all(
                start == end or need(start, end) <= capacity
                for (start, end), capacity in zip(pairwise(starts), capacities, strict=True)
            ):
                return first
    return count


def most_expert_bytes(elements: list[Element], capacities: list[int], first: int) -> int:
    """Of all cuts, each filled with the experts of its own runs."""
    count, best = len(elements), 0
    for inner in combinations_with_replacement(range(first, count + 1), max(0, len(capacities) - 1)):
        ends = (*inner, count)
        filled = _fill(elements, capacities, first, ends)
        rooms = zip(pairwise((first, *ends)), enumerate(capacities), strict=True)
        if all(start == end or holds(elements, filled, number, room) for (start, end), (number, room) in rooms):
            best = max(best, filled.expert_bytes(elements))
    return best


def holds(elements: list[Element], packing: Packing, number: int, capacity: int) -> bool:
    return packing.used_bytes(elements, number) + packing.shared_bytes(elements, number) <= capacity


@settings(max_examples=150, deadline=None)
@given(elements_lists, capacity_lists)
def test_no_other_cut_leaves_fewer_trunks_on_the_host_or_keeps_more_experts(
    elements: list[Element], capacities: list[int]
) -> None:
    packing = pack(elements, capacities)
    check(elements, capacities, packing)
    first = fewest_on_host(elements, capacities)
    assert packing.device.count(None) == first
    if first < len(elements):
        assert packing.expert_bytes(elements) >= most_expert_bytes(elements, capacities, first)


@settings(max_examples=100, deadline=None)
@given(elements_lists, capacity_lists.filter(bool), st.data())
def test_more_capacity_never_places_less(elements: list[Element], capacities: list[int], data: st.DataObject) -> None:
    larger = list(capacities)
    larger[data.draw(st.integers(0, len(capacities) - 1))] += data.draw(st.integers(0, 100))
    small, large = pack(elements, capacities), pack(elements, larger)
    assert large.device.count(None) <= small.device.count(None)
    # Uneven expert tensors are filled greedily, so an exact comparison holds for the usual case: all tensors alike.
    if small.device.count(None) == large.device.count(None) and len({t for e in elements for t in e.experts}) <= 1:
        assert large.expert_bytes(elements) >= small.expert_bytes(elements)


def test_where_everything_fits_the_fullest_device_is_as_empty_as_can_be() -> None:
    elements = [Element(trunk_bytes=10, experts=(30,)) for _ in range(8)]
    capacities = [1000, 1000, 500]
    packing = pack(elements, capacities)
    shares = [packing.used_bytes(elements, number) / capacity for number, capacity in enumerate(capacities)]
    assert max(shares) == 0.16
    assert packing.expert_bytes(elements) == 240


def test_what_a_device_has_left_over_takes_another_layers_experts_before_the_host_does() -> None:
    # Three full layers leave 21 of the first device's room: too little for a fourth trunk, enough for two tensors.
    elements = [Element(trunk_bytes=35, experts=(10, 10, 10)) for _ in range(4)]
    packing = pack(elements, [216, 35])
    assert packing.device == (0, 0, 0, 1)
    assert packing.experts[3] == (0, 0, None)


def test_experts_lie_with_their_trunk_where_that_loses_nothing() -> None:
    elements = [Element(trunk_bytes=10, experts=(10, 10, 10)) for _ in range(6)]
    packing = pack(elements, [90, 90])
    for device, places in zip(packing.device, packing.experts, strict=True):
        assert set(places) <= {device, None}


def test_no_device_leaves_everything_on_the_host() -> None:
    elements = [Element(trunk_bytes=10, experts=(30, 30))]
    assert pack(elements, []) == Packing(device=(None,), experts=((None, None),))


@settings(max_examples=100, deadline=None)
@given(elements_lists, capacity_lists.filter(bool), st.data())
def test_a_stretched_packing_has_one_trunk_fewer_on_the_host(
    elements: list[Element], capacities: list[int], data: st.DataObject
) -> None:
    packing = pack(elements, capacities)
    roomier = [capacity + 40 for capacity in capacities]
    device = data.draw(st.integers(0, len(capacities) - 1))
    more = stretched(elements, roomier, packing, device)
    if packing.device.count(None) == 0:
        assert more is None
    elif more is not None:
        assert more.device.count(None) == packing.device.count(None) - 1
        ranks = [-1 if place is None else place for place in more.device]
        assert ranks == sorted(ranks)
        counts = [[p.device.count(number) for number in range(len(capacities))] for p in (packing, more)]
        grown = [after - before for before, after in zip(*counts, strict=True)]
        assert grown == [int(number == device) for number in range(len(capacities))]
