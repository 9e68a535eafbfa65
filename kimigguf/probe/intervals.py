"""Intervals for paired differences, and what they can bear. Pure; the resampling and the distributions are scipy's.

Every item gives one difference (candidate less reference, averaged over its repeats). What is drawn again is the
cluster, so that variants of one question that a suite's author calls so (``template``), which fail together, are not
taken for so many independent samples. Generated questions are clusters of their own: of the fixed kinds that a suite
names they are independent draws, and drawing them again regardless of kind makes an interval wider, if anything. The
intervals shown hold each metric's truth in 95 % of cases, for itself alone. Whether a metric is called worse or better
is decided on its p-value corrected over all metrics of the report (Holm), and that p-value comes from the same
resampling: a metric that is called worse or better has an interval without zero. The other way round does not hold: an
interval that barely leaves zero may be chance where many metrics are looked at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FAMILY_ERROR: Final = 0.05
"""How often, over all metrics of a report together, a difference that is none may be called one."""
LEVEL: Final = 0.95
_RESAMPLES: Final = 4999
_SEED: Final = 20261130
"""The same calls make the same report."""
_PSEUDO_ITEM: Final = 0.5
"""Half an item that only the candidate wins, and half a one that only the reference wins, join every sample.

Without them a sample in which little differed would hardly have a spread. The idea is Bonett and Price's ("Adjusted
Wald confidence interval for a difference of binomial proportions based on paired data", 2012), who add whole ones; half
ones come closer to 95 % here (see the coverage tests).
"""


class Verdict(StrEnum):
    """What a metric says about the candidate."""

    SAME = "same-within-noise"
    WORSE = "worse"
    BETTER = "better"
    NOT_ENOUGH = "not-enough-samples"
    UNKNOWN = "unknown"
    """There is no noise floor, or all is noise, so nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean difference with the interval that holds the true one at ``level``.

    ``clusters`` are independent samples, ``items`` what they hold. ``p_value`` is that of "there is no difference", for
    this metric alone: the interval at the level of one less ``p_value`` ends at zero.
    """

    mean: float
    low: float
    high: float
    level: float
    clusters: int
    items: int
    p_value: float


def interval(
    clusters: Sequence[Sequence[float]], *, level: float = LEVEL, resamples: int = _RESAMPLES
) -> Interval | None:
    """The mean over all items of differences between -1 and 1, by resampling clusters; None for fewer than two.

    A percentile bootstrap whose ends are moved out for small samples, as the quantiles of Student's t lie further out
    than the normal ones (Hesterberg, "What Teachers Should Know about the Bootstrap", 2015). Where all clusters show
    the same there is nothing to draw again: the half-width is then the upper end of Wilson's interval for an event that
    was seen in none of them.
    """
    count = len(clusters)
    if count < 2:  # noqa: PLR2004 -- one sample has no spread
        return None
    sums, sizes = [math.fsum(cluster) for cluster in clusters], [float(len(cluster)) for cluster in clusters]
    mean = math.fsum(sums) / math.fsum(sizes)
    means = [total / size for total, size in zip(sums, sizes, strict=True)]
    if max(means) - min(means) < 1e-12:  # noqa: PLR2004 -- equal but for rounding
        low, high, p_value = _unseen(mean, count, level)
    else:
        low, high, p_value = _resampled(sums, sizes, level, resamples)
    return Interval(
        mean=mean,
        low=max(-1.0, min(low, mean)),
        high=min(1.0, max(high, mean)),
        level=level,
        clusters=count,
        items=sum(map(len, clusters)),
        p_value=p_value,
    )


def _unseen(mean: float, count: int, level: float) -> tuple[float, float, float]:
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    half = float(stats.binomtest(0, count).proportion_ci(confidence_level=level, method="wilson").high)
    # Wilson's upper end for none of n is z^2 / (n + z^2); the p-value is that of the z whose half-width is the mean. As
    # few clusters as can all fall on one side by chance (the sign test) prove nothing, however far they fall.
    z = math.inf if abs(mean) >= 1 else math.sqrt(count * abs(mean) / (1 - abs(mean)))
    signs = 1.0 if mean == 0 else float(stats.binomtest(0, count, 0.5).pvalue)
    return mean - half, mean + half, max(2 * float(stats.norm.sf(z)), signs)


def _unseen_square(level: float) -> float:
    """z^2 of Wilson's interval: its upper end for none of n is z^2 / (n + z^2)."""
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    return float(stats.norm.isf((1 - level) / 2)) ** 2


def _resampled(
    sums: Sequence[float], sizes: Sequence[float], level: float, resamples: int
) -> tuple[float, float, float]:
    import numpy as np  # noqa: PLC0415 -- takes a tenth of a second to import
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    degrees = len(sums) - 1
    outward = math.sqrt(len(sums) / degrees)
    drawn = stats.bootstrap(
        (np.array([*sums, _PSEUDO_ITEM, -_PSEUDO_ITEM]), np.array([*sizes, _PSEUDO_ITEM, _PSEUDO_ITEM])),
        lambda total, size, axis: total.sum(axis=axis) / size.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=1000,
        confidence_level=1 - 2 * float(stats.norm.sf(outward * stats.t.isf((1 - level) / 2, degrees))),
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    values = drawn.bootstrap_distribution
    beyond = (1 + min(int((values <= 0).sum()), int((values >= 0).sum()))) / (1 + resamples)
    p_value = 2 * float(stats.t.sf(stats.norm.isf(min(0.5, beyond)) / outward, degrees))
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high), min(1.0, p_value)


def proportion(passed: int, of: int, *, level: float = LEVEL) -> tuple[float, float] | None:
    """Wilson's interval for a proportion; None where nothing was counted."""
    if of == 0:
        return None
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    found = stats.binomtest(passed, of).proportion_ci(confidence_level=level, method="wilson")
    return float(found.low), float(found.high)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """The p-values corrected for their number, in their order; one below the family's error is a finding.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979. scipy has only corrections of the false
    discovery rate, and statsmodels would bring pandas along for these lines.
    """
    adjusted = [1.0] * len(p_values)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        so_far = max(so_far, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = so_far
    return tuple(adjusted)


def judge(found: Interval | None, adjusted_p: float | None, tolerance: float) -> tuple[Verdict, int | None]:
    """What a difference (candidate less reference) bears, and how many more items would settle it, where too few.

    Worse: there is a difference beyond doubt, and it is more than ``tolerance`` on average. Same: the whole interval
    lies above ``-tolerance``. That all metrics are the same needs no correction, for each of them must be shown.
    """
    if found is None or adjusted_p is None:
        return Verdict.NOT_ENOUGH, None
    certain = adjusted_p < FAMILY_ERROR
    if certain and found.mean < -tolerance:
        return Verdict.WORSE, None
    if certain and found.mean > 0:
        return Verdict.BETTER, None
    if found.low >= -tolerance:
        return Verdict.SAME, None
    return Verdict.NOT_ENOUGH, _more(found, tolerance)


def _more(found: Interval, tolerance: float) -> int | None:
    """How many more items, if they go on like these: half-widths shrink with the square root of their number.

    Where all have shown the same, they shrink with the number itself (see ``_unseen``).
    """
    half = found.mean - found.low
    wanted = found.mean + tolerance if found.mean > -tolerance else -found.mean
    if wanted <= 0:
        return None
    square = _unseen_square(found.level)
    if math.isclose(half, square / (found.clusters + square), rel_tol=1e-6):
        clusters = square * (1 - wanted) / wanted
        return max(1, math.ceil(found.items * clusters / found.clusters) - found.items)
    # An interval that would do for this metric alone may still be too wide for the correction: then a tenth more.
    return max(1, found.items // 10, math.ceil(found.items * (half / wanted) ** 2) - found.items)
