import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimigguf.probe.intervals import FAMILY_ERROR, Interval, Verdict, holm, interval, judge, proportion

RUNS = 2000


def made(mean: float, half: float, items: int = 30) -> Interval:
    return Interval(
        mean=mean, low=mean - half, high=mean + half, level=0.95, clusters=items, items=items, p_value=0.01
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "adjusted", "verdict"),
    [
        (made(-0.30, 0.10), 0.01, Verdict.WORSE),
        (made(-0.06, 0.05), 0.04, Verdict.WORSE),
        (made(-0.06, 0.05), 0.06, Verdict.NOT_ENOUGH),
        (made(-0.04, 0.03), 0.01, Verdict.NOT_ENOUGH),
        (made(-0.02, 0.02), 0.04, Verdict.SAME),
        (made(0.0, 0.04), 1.0, Verdict.SAME),
        (made(0.0, 0.20), 1.0, Verdict.NOT_ENOUGH),
        (made(-0.20, 0.25), 0.3, Verdict.NOT_ENOUGH),
        (made(0.2, 0.1), 0.01, Verdict.BETTER),
        (made(0.2, 0.1), 0.06, Verdict.SAME),
        (None, None, Verdict.NOT_ENOUGH),
    ],
)
def test_a_verdict_needs_an_interval_that_bears_it(
    found: Interval | None, adjusted: float | None, verdict: Verdict
) -> None:
    assert judge(found, adjusted, 0.05)[0] is verdict


def test_an_open_verdict_says_how_many_more_it_would_take() -> None:
    assert judge(made(0.0, 0.20, 30), 1.0, 0.05) == (Verdict.NOT_ENOUGH, 450)  # a quarter of the width: 16 times
    assert judge(made(-0.20, 0.25, 32), 0.2, 0.05) == (Verdict.NOT_ENOUGH, 18)
    assert judge(None, None, 0.05) == (Verdict.NOT_ENOUGH, None)


def test_an_open_verdict_asks_for_items_and_not_for_templates() -> None:
    found = interval([[0.0] * 9] * 20)
    assert found is not None
    verdict, more = judge(found, 1.0, 0.05)
    assert (found.clusters, found.items, verdict) == (20, 180, Verdict.NOT_ENOUGH)
    assert more is not None
    assert more > 180


@pytest.mark.parametrize("items_in_a_template", [1, 9])
def test_what_no_sample_has_shown_is_not_taken_for_impossible(items_in_a_template: int) -> None:
    few, many = interval([[0.0] * items_in_a_template] * 30), interval([[0.0] * items_in_a_template] * 500)
    assert few is not None
    assert many is not None
    assert -0.13 < few.low < -0.10  # in 30 samples an event that happens once in ten may well be missed
    assert -0.01 < many.low < 0
    assert few.p_value == many.p_value == 1.0


@pytest.mark.parametrize(("clusters", "found"), [(2, False), (5, False), (6, True), (30, True)])
def test_as_few_losses_as_chance_can_bring_are_no_finding(clusters: int, found: bool) -> None:
    """Two coins fall alike every second time, six in a row once in thirty-two."""
    lost = interval([[-1.0]] * clusters)
    assert lost is not None
    assert (lost.p_value < FAMILY_ERROR) == found
    assert judge(lost, lost.p_value, 0.05)[0] is (Verdict.WORSE if found else Verdict.NOT_ENOUGH)


def test_one_sample_has_no_interval() -> None:
    assert interval([[0.5, 0.5]]) is None
    assert interval([]) is None


def test_the_same_differences_make_the_same_interval() -> None:
    chance = random.Random(3)
    values = [[chance.choice((-1.0, 0.0, 0.0, 1.0)) for _ in range(chance.randint(1, 5))] for _ in range(40)]
    assert interval(values) == interval(values)


DIFFERENCES = st.lists(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=2)


@settings(deadline=None, max_examples=60)
@example([[0.5, 1.0], [1.0], [1.0], [1.0], [0.5, 1.0]])
@example([[1.0], [1.0], [0.5], [0.0], [1.0], [0.5], [1.0], [0.0], [0.5], [-0.5]])
@given(DIFFERENCES)
def test_an_interval_holds_its_mean_and_leaves_zero_only_with_its_p_value(values: list[list[float]]) -> None:
    """The decision (by p-value) and the interval shown come from one resampling and never contradict each other."""
    narrow, usual, wide = (interval(values, level=level, resamples=999) for level in (0.8, 0.95, 0.99))
    assert narrow is not None
    assert usual is not None
    assert wide is not None
    assert -1 <= wide.low <= narrow.low + 1e-9
    assert narrow.low - 1e-9 <= narrow.mean <= narrow.high + 1e-9
    assert narrow.high <= wide.high + 1e-9 <= 1 + 2e-9
    if usual.p_value < 0.05:
        assert usual.low >= -1e-9 or usual.high <= 1e-9
    spread = {sum(cluster) / len(cluster) for cluster in values}
    # The resamples are a grid, and with few clusters the interval's end lies beyond all but one or two of a thousand:
    # there the p-value, which counts one more, is the more careful of the two.
    if (usual.low > 1e-9 or usual.high < -1e-9) and len(spread) > 1 and len(values) > 8:
        assert usual.p_value < 0.06


def test_holm_corrects_as_published() -> None:
    """The worked example of R's ``p.adjust`` manual page form: 4 p-values, sorted and not, with ties and a cap at 1."""
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx((0.04, 0.06, 0.06, 0.06))
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx((0.06, 0.04, 0.06, 0.06))
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.9, 0.8]) == (1.0, 1.0)
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_no_correction_and_bonferronis(p_values: list[float]) -> None:
    for p_value, adjusted in zip(p_values, holm(p_values), strict=True):
        assert p_value <= adjusted <= min(1.0, max(p_values) * len(p_values))
    assert min(holm(p_values)) == pytest.approx(min(1.0, min(p_values) * len(p_values)))


def test_a_proportion_is_unknown_only_where_nothing_was_counted() -> None:
    found = proportion(0, 10)
    assert found is not None
    assert found[0] == pytest.approx(0.0, abs=1e-9)
    assert 0.2 < found[1] < 0.35
    assert proportion(0, 0) is None


Draw = Callable[[random.Random], list[list[float]]]


def answers(count: int, *, worse: float, better: float) -> Draw:
    """Paired answers: only the reference is right in ``worse`` of them, only the candidate in ``better``."""

    def draw(chance: random.Random) -> list[list[float]]:
        draws = [chance.random() for _ in range(count)]
        return [[-1.0 if value < worse else 1.0 if value > 1 - better else 0.0] for value in draws]

    return draw


def arms(sizes: list[int], *, lost: float) -> Draw:
    """Three arms over templates of those sizes, each as hard as it is; the candidate loses ``lost`` of what is right.

    A template's hardness is drawn anew from Beta(4, 1), whose mean is 0.8: the true difference is -0.8 ``lost``.
    """

    def draw(chance: random.Random) -> list[list[float]]:
        clusters = []
        for size in sizes:
            share = chance.betavariate(4, 1)
            clusters.append(
                [
                    float(chance.random() < share * (1 - lost))
                    - (float(chance.random() < share) + float(chance.random() < share)) / 2
                    for _ in range(size)
                ]
            )
        return clusters

    return draw


def kinds(count: int, questions: int, *, lost: float) -> tuple[Draw, float]:
    """Generated questions: the kinds and their hardness stay as they are, the questions are drawn; and the truth."""
    once = random.Random("kinds")
    shares = [once.betavariate(2, 1) for _ in range(count)]

    def draw(chance: random.Random) -> list[list[float]]:
        return [
            [
                float(chance.random() < share * (1 - lost))
                - (float(chance.random() < share) + float(chance.random() < share)) / 2
            ]
            for share in shares
            for _ in range(questions)
        ]

    return draw, -lost * sum(shares) / count


UNEQUAL = [1, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
SIMULATIONS = {
    "quick: 30 paired answers": (answers(30, worse=0.20, better=0.05), -0.15),
    "quick: three arms, no difference": (arms([1] * 30, lost=0.0), 0.0),
    "quick: three arms, a difference": (arms([1] * 30, lost=0.15), -0.12),
    "150 paired answers, few of them differ": (answers(150, worse=0.05, better=0.02), -0.03),
    "30 templates of unequal size": (arms(UNEQUAL, lost=0.10), -0.08),
    "20 templates of unequal size": (arms(UNEQUAL[:20], lost=0.10), -0.08),
    "standard: three arms": (arms([1] * 180, lost=0.10), -0.08),
    "standard: 25 kinds of 9 questions": kinds(25, 9, lost=0.10),
}


@pytest.mark.parametrize("name", SIMULATIONS)
def test_intervals_cover_the_truth_in_93_to_97_of_a_hundred_runs(name: str) -> None:
    draw, truth = SIMULATIONS[name]
    chance = random.Random(f"coverage of {name}")
    found = [interval(draw(chance), resamples=499) for _ in range(RUNS)]
    covered = sum(one is not None and one.low <= truth <= one.high for one in found)
    assert 0.93 <= covered / RUNS <= 0.97


def test_rare_losses_are_not_called_the_same_more_often_than_promised() -> None:
    """At a true loss of exactly the tolerance, "the same" is wrong: at most one in twenty says so, at any size."""
    for count in (30, 150):
        chance = random.Random(count)
        draw = answers(count, worse=0.05, better=0.0)
        found = [interval(draw(chance), resamples=999) for _ in range(1000)]
        assert sum(one is not None and one.low >= -0.05 for one in found) <= 55


def test_a_family_of_metrics_without_a_difference_rarely_has_a_finding() -> None:
    """Six metrics at quick's size: uncorrected, one in four runs would have a finding."""
    chance = random.Random("family")
    draw = arms([1] * 30, lost=0.0)
    findings = bare = 0
    for _ in range(400):
        p_values = [one.p_value for _ in range(6) if (one := interval(draw(chance), resamples=999)) is not None]
        findings += min(holm(p_values)) < FAMILY_ERROR
        bare += min(p_values) < FAMILY_ERROR
    assert findings <= 0.07 * 400 < bare


@pytest.mark.parametrize("count", [5, 32, 60])
@pytest.mark.parametrize("size", [1, 3])
def test_as_many_more_of_the_same_as_it_says_would_tell(count: int, size: int) -> None:
    """None differs: Wilson's interval shrinks faster than the square root, and 377 in place of 73 is no help."""
    verdict, more = judge(interval([[0.0] * size] * count), 1.0, 0.05)
    assert (verdict, more is not None) == (Verdict.NOT_ENOUGH, True)
    enough = -(-(count * size + (more or 0)) // size)
    assert enough == 73
    assert judge(interval([[0.0] * size] * enough), 1.0, 0.05)[0] is Verdict.SAME
    assert judge(interval([[0.0] * size] * (enough - 1)), 1.0, 0.05)[0] is Verdict.NOT_ENOUGH
