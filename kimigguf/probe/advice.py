"""What would tell where a comparison has told nothing, in the words of the options that there are. Pure."""

from collections.abc import Mapping
from typing import Final

from kimigguf.probe.barren import Reason, in_words, way_out
from kimigguf.probe.calls import Shape
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.score import Metric, Scores

MOST_QUESTIONS: Final = 2000
"""Nobody asks a model this large more of them: at its pace on one's own machine they would take weeks."""
_EASY: Final = "basics"
"""The shipped suite that almost any chat model mostly gets right."""
_OWN: Final = "a suite of your own (--suite FILE; counts in [generate] make as many as you write)"


def needed(metric: Metric) -> int | None:
    """About how many questions would settle an open metric, in all; None where that cannot be said."""
    return None if metric.more_needed is None else metric.items + metric.more_needed


def advice(scores: Scores) -> str | None:
    """What to do where too little, or nothing, could be compared; None where something was, or nothing is known."""
    if scores.verdict is Verdict.UNKNOWN:
        return _cut_off(scores) or _ways_out(scores)
    if scores.verdict is not Verdict.NOT_ENOUGH:
        return None
    if (ways := _ways_out(scores)) is not None:
        return f"more questions like these would not tell: {ways}"
    return _more_questions(scores)


def _cut_off(scores: Scores) -> str | None:
    cut = sum(arm.shapes.get(Shape.CUT_OFF_THINKING, 0) for arm in scores.arms)
    calls = sum(arm.calls for arm in scores.arms)
    if cut * 4 < calls or not cut:
        return None
    return f"{cut} of {calls} answers were cut off while thinking: raise --max-tokens"


def _ways_out(scores: Scores) -> str | None:
    """What to do about a reference that shows nothing to fall short of; each of it once."""
    found: dict[str, None] = {
        f"{in_words(metric.reason, metric.reference)}: {way_out(metric.reason, scores.temperature)}": None
        for metric in scores.metrics
        if metric.category is None and metric.reason is not None
    }
    hard = any(metric.category is None and metric.reason is Reason.NEVER_RIGHT for metric in scores.metrics)
    if hard and _EASY in scores.suites and scores.suite != _EASY:
        found[f"--suite {_EASY} ({scores.suites[_EASY]:,} questions) is easier"] = None
    return "; ".join(found) or None


def _more_questions(scores: Scores) -> str:
    open_ones = [m for m in scores.metrics if m.category is None and m.verdict is Verdict.NOT_ENOUGH]
    counted = [(count, metric) for metric in open_ones if (count := needed(metric)) is not None]
    if not counted:
        return f"what would tell: more questions, such as {_named(scores.suites, scores.items + 1) or _OWN}"
    hopeless = [metric.name for count, metric in counted if count > MOST_QUESTIONS]
    practical = [one for one in counted if one[0] <= MOST_QUESTIONS]
    text = ""
    if practical:
        wanted = max(count for count, _ in practical)
        about = f" about {' and '.join(metric.name for _, metric in practical)}" if hopeless else ""
        text = f"what would tell{about}: about {wanted:,} questions in place of {scores.items:,}: "
        text += f"{_where_from(scores.suites, wanted)}; "
    if hopeless:
        points = f"{scores.tolerance * 100:g} points"
        text += f"no practical number of questions would tell about {' and '.join(hopeless)}: the difference is too "
        text += f"near to the tolerance of {points}, and a larger --tolerance may be meant; "
    # More rounds take the chance out of single answers: where the same is said each time there is none in them.
    if any(metric.noise for _, metric in counted):
        cold = "" if scores.temperature == 0 else "--temperature 0, where it takes one, or "
        text += f"the reference differs from itself: {cold}--repeat 3 makes that less"
    return text.removesuffix("; ")


def _where_from(suites: Mapping[str, int], wanted: int) -> str:
    if (named := _named(suites, wanted)) is not None:
        return f"{named}, or {_OWN}"
    if not suites:
        return _OWN
    largest = max(suites, key=lambda name: suites[name])
    return f"no suite here has so many ({largest}, the largest, has {suites[largest]:,}), only {_OWN}"


def _named(suites: Mapping[str, int], least: int) -> str | None:
    """The suites that have enough questions, the largest first."""
    enough = sorted((name for name, count in suites.items() if count >= least), key=lambda name: -suites[name])
    return " or ".join(f"--suite {name} ({suites[name]:,})" for name in enough) or None
