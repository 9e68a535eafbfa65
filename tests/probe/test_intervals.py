import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.probe.intervals import Interval, Verdict, interval, judge, proportion


def made(mean: float, half: float, clusters: int = 30) -> Interval:
    return Interval(mean=mean, low=mean - half, high=mean + half, level=0.95, clusters=clusters)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (made(-0.30, 0.10), Verdict.WORSE),
        (made(-0.06, 0.05), Verdict.WORSE),
        (made(-0.04, 0.03), Verdict.NOT_ENOUGH),
        (made(-0.02, 0.02), Verdict.SAME),
        (made(0.0, 0.04), Verdict.SAME),
        (made(0.0, 0.20), Verdict.NOT_ENOUGH),
        (made(-0.20, 0.25), Verdict.NOT_ENOUGH),
        (made(0.2, 0.1), Verdict.BETTER),
        (None, Verdict.NOT_ENOUGH),
    ],
)
def test_a_verdict_needs_an_interval_that_bears_it(found: Interval | None, verdict: Verdict) -> None:
    assert judge(found, 0.05)[0] is verdict


def test_an_open_verdict_says_how_many_more_it_would_take() -> None:
    assert judge(made(0.0, 0.20, 30), 0.05) == (Verdict.NOT_ENOUGH, 450)  # a quarter of the width: 16 times as many
    assert judge(made(-0.20, 0.25, 32), 0.05) == (Verdict.NOT_ENOUGH, 18)
    assert judge(None, 0.05) == (Verdict.NOT_ENOUGH, None)


def test_equal_differences_do_not_make_a_certain_zero() -> None:
    few, many = interval([0.0] * 5, level=0.95), interval([0.0] * 500, level=0.95)
    assert few is not None
    assert many is not None
    assert few.low < -0.4
    assert -0.01 < many.low < 0


def test_one_sample_has_no_interval() -> None:
    assert interval([0.5], level=0.95) is None
    assert interval([], level=0.95) is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_mean_lies_in_its_interval_and_more_confidence_is_wider(values: list[float]) -> None:
    narrow, wide = interval(values, level=0.8), interval(values, level=0.99)
    assert narrow is not None
    assert wide is not None
    assert -1 <= wide.low <= narrow.low + 1e-9
    assert narrow.low - 1e-9 <= narrow.mean <= narrow.high + 1e-9
    assert narrow.high <= wide.high + 1e-9 <= 1 + 2e-9


def test_a_proportion_is_unknown_only_where_nothing_was_counted() -> None:
    found = proportion(0, 10)
    assert found is not None
    assert found[0] == pytest.approx(0.0, abs=1e-9)
    assert 0.2 < found[1] < 0.35
    assert proportion(0, 0) is None


@pytest.mark.parametrize(("worse", "better", "clusters"), [(0.10, 0.05, 150), (0.25, 0.10, 60), (0.05, 0.05, 150)])
def test_intervals_of_paired_answers_cover_the_truth(worse: float, better: float, clusters: int) -> None:
    """2,000 simulated comparisons of right answers: -1 with ``worse``, +1 with ``better``, 0 else."""
    chance = random.Random(7)
    covered = 0
    for _ in range(2000):
        draws = [chance.random() for _ in range(clusters)]
        values = [-1.0 if draw < worse else 1.0 if draw > 1 - better else 0.0 for draw in draws]
        found = interval(values, level=0.95)
        assert found is not None
        covered += found.low <= better - worse <= found.high
    assert 0.93 <= covered / 2000 <= 0.97
