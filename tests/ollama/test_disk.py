import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.ollama.disk import Way, need, way_for


@pytest.mark.parametrize(
    ("version", "files", "way"),
    [
        ("0.32.15", 14, Way.MERGE),
        ("0.34.9", 14, Way.MERGE),
        ("0.35.0", 14, Way.KEEP),
        ("1.2.3", 14, Way.KEEP),
        ("0.35.0-rc1", 14, Way.MERGE),
        ("0.0.0", 14, Way.MERGE),
        (None, 14, Way.MERGE),
        ("0.32.15", 1, Way.SINGLE),
    ],
)
def test_a_version_that_may_merge_is_taken_for_one_that_does(version: str | None, files: int, way: Way) -> None:
    assert way_for(version, files) is way


def test_a_merge_needs_three_times_the_set_and_leaves_two_until_a_restart() -> None:
    found = need(Way.MERGE, [(10, False), (30, False)])
    assert (found.send_bytes, found.peak_bytes, found.after_bytes, found.settled_bytes) == (40, 120, 80, 40)


def test_kept_shards_need_the_set_once() -> None:
    found = need(Way.KEEP, [(10, False), (30, False)])
    assert (found.send_bytes, found.peak_bytes, found.after_bytes, found.settled_bytes) == (40, 40, 40, 40)


def test_what_ollama_has_is_not_counted_again() -> None:
    found = need(Way.MERGE, [(10, True), (30, False)])
    assert (found.send_bytes, found.present_bytes, found.peak_bytes) == (30, 10, 110)


@given(st.sampled_from(Way), st.lists(st.tuples(st.integers(0, 1 << 41), st.booleans()), max_size=40))
def test_the_peak_is_never_below_what_is_taken_afterwards(way: Way, sizes: list[tuple[int, bool]]) -> None:
    found = need(way, sizes)
    assert found.peak_bytes >= found.after_bytes >= found.send_bytes >= 0
    assert found.send_bytes + found.present_bytes == sum(size for size, _ in sizes)
