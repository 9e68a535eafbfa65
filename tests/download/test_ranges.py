import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.download.ranges import Ranges

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=20)


@given(SPANS)
def test_ranges_hold_exactly_the_bytes_that_were_added(spans: list[tuple[int, int]]) -> None:
    ranges = Ranges(spans)
    truth = {byte for start, end in spans for byte in range(start, end)}
    assert {byte for start, end in ranges for byte in range(start, end)} == truth
    assert ranges.total_bytes == len(truth)
    assert all(end < start for (_, end), (start, _) in zip(ranges, list(ranges)[1:], strict=False))
    assert ranges.prefix_bytes == next(n for n in range(100) if n not in truth)


@given(SPANS, st.integers(0, 90), st.integers(1, 20))
def test_ranges_and_gaps_cover_a_file_without_overlap(spans: list[tuple[int, int]], size: int, most: int) -> None:
    ranges = Ranges(spans).clipped(size)
    gaps = list(ranges.gaps(size, most))
    assert all(0 < end - start <= most for start, end in gaps)
    bytes_of = [byte for start, end in [*ranges, *gaps] for byte in range(start, end)]
    assert sorted(bytes_of) == list(range(size))


@given(SPANS, st.integers(0, 70), st.integers(0, 20))
def test_what_is_removed_is_gone_and_nothing_else(spans: list[tuple[int, int]], start: int, length: int) -> None:
    ranges = Ranges(spans)
    ranges.remove(start, start + length)
    truth = {byte for s, e in spans for byte in range(s, e)} - set(range(start, start + length))
    assert {byte for s, e in ranges for byte in range(s, e)} == truth
    assert all(s < e for s, e in ranges)


def test_what_is_no_range_is_refused() -> None:
    with pytest.raises(ValueError):
        Ranges([(5, 4)])
