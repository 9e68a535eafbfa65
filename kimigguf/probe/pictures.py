"""The pictures of a report, as SVG that takes its colours from the page. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final

from kimigguf.probe.calls import Arm, Call, Reply
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.score import Metric, Scores

CLASSES: Final[Mapping[Verdict, str]] = {
    Verdict.SAME: "same",
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.NOT_ENOUGH: "not-enough",
    Verdict.UNKNOWN: "unknown",
}
_MOST_DOTS: Final = 400
_LEFT: Final = 92
_RIGHT: Final = 390


def forest(scores: Scores) -> str:
    """One bar a metric, on a scale that holds all of them and the tolerance."""
    drawn = [metric for metric in scores.metrics if metric.difference is not None]
    if not drawn:
        return "<p>There are too few answers for any interval.</p>"
    reach = max(scores.tolerance, *(max(abs(m.difference.low), abs(m.difference.high)) for m in drawn if m.difference))
    reach = min(1.0, reach * 1.1)

    def x(value: float) -> float:
        return 200 + 185 * max(-1.0, min(1.0, value / reach))

    height = 44 * len(drawn) + 34
    left, right = x(-scores.tolerance), x(scores.tolerance)
    parts = [
        f'<svg viewBox="0 0 400 {height}" role="img" aria-label="differences with their intervals">',
        f'<rect class="band" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{height - 24}"/>',
        f'<line class="zero" x1="200" y1="0" x2="200" y2="{height - 24}"/>',
    ]
    parts += [line for row, metric in enumerate(drawn) for line in _bar(metric, 44 * row, x)]
    base = height - 24
    parts.append(f'<line class="axis" x1="15" y1="{base}" x2="385" y2="{base}"/>')
    for value, anchor in ((-reach, "start"), (0.0, "middle"), (reach, "end")):
        parts.append(f'<text x="{x(value):.1f}" y="{base + 16}" text-anchor="{anchor}">{value * 100:+.0f} %</text>')
    return "".join([*parts, "</svg>"])


def _bar(metric: Metric, top: int, x: Callable[[float], float]) -> list[str]:
    found = metric.difference
    if found is None:
        return []
    y = top + 32
    return [
        f'<text x="15" y="{top + 16}">{escape(metric.name)}</text>',
        f'<g class="{CLASSES[metric.verdict]}">',
        f'<line class="bar" x1="{x(found.low):.1f}" y1="{y}" x2="{x(found.high):.1f}" y2="{y}"/>',
        f'<circle class="dot" cx="{x(found.mean):.1f}" cy="{y}" r="5"/></g>',
    ]


_MEASURES: Final[Mapping[str, tuple[str, Callable[[Reply], float | None]]]] = {
    "length of answers, tokens with thinking": ("{:,.0f}", lambda reply: reply.completion_tokens),
    "time to the first token, s": ("{:.2f}", lambda reply: reply.first_token_seconds),
    "time of the whole answer, s": ("{:.1f}", lambda reply: reply.seconds),
    "speed of decoding, tokens/s": ("{:.1f}", lambda reply: reply.tokens_per_second),
}


def distributions(calls: Iterable[Call]) -> str:
    """Lengths and speeds of every reply, arm by arm, one picture a measure; what nobody measured is left out."""
    replies: dict[Arm, list[Reply]] = {arm: [] for arm in Arm}
    for call in calls:
        if isinstance(call.outcome, Reply):
            replies[call.arm].append(call.outcome)
    pictures = []
    for title, (form, measure) in _MEASURES.items():
        values = {
            arm: sorted(float(value) for reply in found if (value := measure(reply)) is not None)
            for arm, found in replies.items()
        }
        if any(values.values()):
            pictures.append(f"<figure><figcaption>{title}</figcaption>{_strips(title, values, form)}</figure>")
    return "".join(pictures) or "<p>Nobody measured anything.</p>"


def _strips(title: str, values: Mapping[Arm, Sequence[float]], form: str) -> str:
    most = max(value for found in values.values() for value in found) or 1.0
    height = 34 * len(values) + 22

    def x(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * value / most

    parts = [f'<svg viewBox="0 0 400 {height}" role="img" aria-label="{escape(title)}">']
    for row, (arm, found) in enumerate(values.items()):
        y = 34 * row + 15
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{arm}</text>')
        parts += [_dot(x(value), y, place) for place, value in enumerate(found[:: 1 + len(found) // _MOST_DOTS])]
        if found:
            parts.append(_median(statistics.median(found), most, x, y, form))
    base = height - 16
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_RIGHT}" y2="{base}"/>')
    parts.append(f'<text x="{_LEFT}" y="{base + 13}">0</text>')
    parts.append(f'<text x="{_RIGHT}" y="{base + 13}" text-anchor="end">{form.format(most)}</text>')
    return "".join([*parts, "</svg>"])


def _median(value: float, most: float, x: Callable[[float], float], y: int, form: str) -> str:
    """A line with its number, which stays within the picture."""
    anchor = "end" if value > 0.8 * most else "start" if value < 0.2 * most else "middle"
    at = f"{x(value):.1f}"
    line = f'<line class="median" x1="{at}" y1="{y - 10}" x2="{at}" y2="{y + 10}"/>'
    return f'{line}<text class="small" x="{at}" y="{y + 19}" text-anchor="{anchor}">{form.format(value)}</text>'


def _dot(x: float, y: float, place: int) -> str:
    """Moved up or down a little, always alike, so that equal values do not hide each other."""
    return f'<circle class="one" cx="{x:.1f}" cy="{y + (place * 7 % 13 - 6) * 1.1:.1f}" r="2"/>'
