"""What a request measured, what does not count, and what several say together: pure tables."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.speed.samples import (
    Clock,
    Sample,
    Spread,
    Warmth,
    by_the_client,
    by_the_server,
    judge,
    spread,
    summarise,
)

REAL = {
    "cache_n": 0,
    "prompt_n": 10,
    "prompt_ms": 74.732,
    "prompt_per_second": 133.8114863779907,
    "predicted_n": 8,
    "predicted_ms": 816.427,
    "predicted_per_second": 8.573944761748447,
}
"""``timings`` as llama-server build 11434 sent them for the tiny K3."""


def good(**changes: object) -> Sample:
    sample = by_the_server(REAL, depth_tokens=0, warmth=Warmth.COLD, client_seconds=0.08)
    return replace(sample, **changes)  # type: ignore[arg-type]  # names and types are the test's own


def test_the_servers_own_timings_are_taken_as_they_are() -> None:
    sample = good()
    assert sample.clock is Clock.SERVER
    assert (sample.prompt_tokens, sample.cached_tokens, sample.made_tokens) == (10, 0, 8)
    assert sample.first_token_seconds == pytest.approx(0.074732)
    assert sample.prompt_tokens_per_second == 133.8114863779907
    assert sample.decode_tokens_per_second == 8.573944761748447
    assert sample.waited_seconds == pytest.approx(0.08 - 0.074732)
    assert judge(sample) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # build 11434 reports 0 tokens/s for a single token, others infinity or a million
        ({"made_tokens": 1, "decode_tokens_per_second": 0.0}, "1 generated: a rate needs 2 tokens"),
        ({"made_tokens": 1, "decode_tokens_per_second": 1e6}, "1 generated"),
        ({"made_tokens": 0}, "0 generated"),
        ({"decode_tokens_per_second": math.inf}, "inf tokens/s"),
        ({"decode_tokens_per_second": math.nan}, "nan tokens/s"),
        ({"prompt_tokens_per_second": 0.0}, "0 tokens/s"),
        ({"prompt_tokens_per_second": -1.0}, "-1 tokens/s"),
        ({"cached_tokens": 6}, "6 tokens of its prompt came from a cache: it was not cold"),
        ({"warmth": Warmth.WARM, "cached_tokens": 0}, "reused nothing of the turn before"),
        ({"others": "300 tokens of other requests", "is_disturbed": True}, "not alone: 300 tokens of other requests"),
    ],
)
def test_a_figure_that_says_nothing_of_the_speed_is_rejected_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    rejected = judge(good(**changes))
    assert rejected is not None
    assert reason in rejected.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"warmth": Warmth.WARM, "cached_tokens": 500},
        {"warmth": Warmth.WARM, "cached_tokens": None},  # unknown is no reason
        {"made_tokens": 2},
        {"made_tokens": None, "decode_tokens_per_second": None},
        {"others": "one waits", "is_disturbed": False},
    ],
)
def test_what_is_merely_unknown_still_counts(changes: dict[str, object]) -> None:
    assert judge(good(**changes)) is None


@pytest.mark.parametrize("timings", [{}, {"prompt_ms": "fast"}, {"prompt_n": True, "predicted_per_second": None}])
def test_timings_that_hold_no_numbers_are_unknown_and_never_zero(timings: dict[str, object]) -> None:
    sample = by_the_server(timings, depth_tokens=0, warmth=Warmth.COLD, client_seconds=None)
    assert sample == Sample(depth_tokens=0, warmth=Warmth.COLD, clock=Clock.SERVER)


def test_the_clients_clock_counts_from_the_first_piece_to_the_last() -> None:
    usage = {"prompt_tokens": 600, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 100}}
    sample = by_the_client(usage, depth_tokens=0, warmth=Warmth.WARM, first_seconds=2.0, last_seconds=4.5)
    assert sample.clock is Clock.CLIENT
    assert (sample.prompt_tokens, sample.cached_tokens, sample.made_tokens) == (500, 100, 11)
    assert sample.prompt_tokens_per_second == 250.0
    assert sample.decode_tokens_per_second == 4.0
    assert sample.waited_seconds is None  # it cannot be told from the work


@pytest.mark.parametrize(
    ("usage", "first", "last"),
    [(None, 1.0, 2.0), ({"prompt_tokens": 5}, 1.0, 1.0), ({"completion_tokens": 9}, 1.0, 1.0), ({}, None, None)],
)
def test_rates_that_nothing_tells_are_unknown(
    usage: dict[str, int] | None, first: float | None, last: float | None
) -> None:
    sample = by_the_client(usage, depth_tokens=0, warmth=Warmth.COLD, first_seconds=first, last_seconds=last)
    assert sample.decode_tokens_per_second is None
    assert sample.first_token_seconds == first


def test_depths_and_kinds_are_kept_apart_in_their_order() -> None:
    samples = [
        good(depth_tokens=depth, warmth=warmth, decode_tokens_per_second=rate)
        for depth, warmth, rate in (
            (4096, Warmth.WARM, 4.0),
            (0, Warmth.WARM, 9.0),
            (0, Warmth.COLD, 5.0),
            (0, Warmth.COLD, 7.0),
            (0, Warmth.COLD, 20.0),
        )
    ]
    rows = summarise(samples)
    assert [(row.depth_tokens, row.warmth) for row in rows] == [
        (0, Warmth.COLD),
        (0, Warmth.WARM),
        (4096, Warmth.WARM),
    ]
    assert rows[0].decode_tokens_per_second == Spread(median=7.0, lowest=5.0, highest=20.0, count=3)
    assert summarise([]) == ()


@given(st.lists(st.none() | st.floats(min_value=0.01, max_value=1e6)))
def test_a_median_lies_between_its_ends_and_counts_only_what_is_known(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    found = spread(values)
    if not known:
        assert found is None
        return
    assert found is not None
    assert found.lowest is not None
    assert found.highest is not None
    assert found.lowest <= found.median <= found.highest
    assert found.count == len(known)
