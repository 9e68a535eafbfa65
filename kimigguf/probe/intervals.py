"""Intervals for paired differences, and what they can bear. Pure; the statistics are scipy's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FAMILY_ERROR: Final = 0.05
"""How often, over all metrics of a report together, a difference that is none may be called one."""


class Verdict(StrEnum):
    """What a metric says about the candidate."""

    SAME = "same-within-noise"
    WORSE = "worse"
    BETTER = "better"
    NOT_ENOUGH = "not-enough-samples"
    UNKNOWN = "unknown"
    """There is no noise floor, so nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean difference with the interval that holds the true one at ``level``; ``clusters`` independent samples."""

    mean: float
    low: float
    high: float
    level: float
    clusters: int


def interval(differences: Sequence[float], *, level: float) -> Interval | None:
    """Student's interval for the mean of independent differences; None for fewer than two.

    Where all differences are equal their spread says nothing of what was not seen: the half-width is then the upper end
    of Wilson's interval for an event that was seen in none of them. Differences lie between -1 and 1.
    """
    count = len(differences)
    if count < 2:  # noqa: PLR2004 -- one sample has no spread
        return None
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    mean = math.fsum(differences) / count
    if max(differences) - min(differences) < 1e-12:  # noqa: PLR2004 -- equal but for rounding
        half = float(stats.binomtest(0, count).proportion_ci(confidence_level=level, method="wilson").high)
        low, high = mean - half, mean + half
    else:
        found = stats.ttest_1samp(differences, 0.0).confidence_interval(confidence_level=level)
        low, high = float(found.low), float(found.high)
    return Interval(mean=mean, low=max(-1.0, low), high=min(1.0, high), level=level, clusters=count)


def proportion(passed: int, of: int, *, level: float = 0.95) -> tuple[float, float] | None:
    """Wilson's interval for a proportion; None where nothing was counted."""
    if of == 0:
        return None
    from scipy import stats  # noqa: PLC0415 -- takes half a second to import

    found = stats.binomtest(passed, of).proportion_ci(confidence_level=level, method="wilson")
    return float(found.low), float(found.high)


def judge(found: Interval | None, tolerance: float) -> tuple[Verdict, int | None]:
    """What a difference (candidate less reference) bears, and how many more samples would settle it, where too few.

    Worse: it lies below zero beyond doubt, and by more than ``tolerance`` on average. Same: the whole interval lies
    above ``-tolerance``.
    """
    if found is None:
        return Verdict.NOT_ENOUGH, None
    if found.high < 0 and found.mean < -tolerance:
        return Verdict.WORSE, None
    if found.low > 0:
        return Verdict.BETTER, None
    if found.low >= -tolerance:
        return Verdict.SAME, None
    return Verdict.NOT_ENOUGH, _more(found, tolerance)


def _more(found: Interval, tolerance: float) -> int | None:
    """How many more clusters, if the mean stays: half-widths shrink with the square root of their number."""
    half = found.mean - found.low
    wanted = found.mean + tolerance if found.mean > -tolerance else -found.mean
    if wanted <= 0:
        return None
    return max(1, math.ceil(found.clusters * (half / wanted) ** 2) - found.clusters)
