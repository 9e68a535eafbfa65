"""A comparison as JSON and as text for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kimigguf.probe.advice import MOST_QUESTIONS, advice, needed
from kimigguf.probe.barren import in_words, way_out
from kimigguf.probe.calls import Shape
from kimigguf.probe.client import Endpoint
from kimigguf.probe.cost import cost_rows, nothing_priced
from kimigguf.probe.intervals import Verdict, proportion
from kimigguf.probe.logprobs import TokenLevel
from kimigguf.probe.score import ArmSummary, Metric, Scores
from kimigguf.probe.triggers import Triggers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WORDS = {
    Verdict.SAME: "the same within noise",
    Verdict.WORSE: "worse",
    Verdict.BETTER: "better",
    Verdict.NOT_ENOUGH: "not enough samples",
    Verdict.UNKNOWN: "unknown",
}
_COLOURS = {
    Verdict.SAME: "green",
    Verdict.WORSE: "bold red",
    Verdict.BETTER: "green",
    Verdict.NOT_ENOUGH: "yellow",
    Verdict.UNKNOWN: "yellow",
}


METHOD = (
    "the reference's right answers are the mean of both times it was asked; differences are candidate less reference, "
    "with 95 % intervals; worse and better are decided with Holm's correction for the number of metrics"
)


def record(
    scores: Scores, candidate: Endpoint, reference: Endpoint, *, spent_usd: float | None = None
) -> dict[str, Any]:
    """The answer as JSON. ``spent_usd`` is what this run paid the reference, where that is known."""
    return {
        "schema": "kimigguf.quality-probe/1",
        "suite": {"name": scores.suite, "sha256": scores.suite_sha256, "items": scores.items},
        "candidate": {"url": candidate.url, "model": candidate.model},
        "reference": {"url": reference.url, "model": reference.model},
        "repeats": scores.repeats,
        "tolerance": scores.tolerance,
        "verdict": scores.verdict,
        "advice": advice(scores),
        "metrics": [asdict(metric) for metric in scores.metrics],
        "prompt_tokens": asdict(scores.parity) | {"meaning": scores.parity.sentence},
        "tool_triggers": _trigger_record(scores.triggers),
        "tool_triggers_noise": _trigger_record(scores.triggers_noise),
        "token_level": None if scores.tokens is None else asdict(scores.tokens),
        "cost": _cost_record(scores, spent_usd),
        "arms": [_arm_record(arm) for arm in scores.arms],
        "items": [asdict(result) for result in scores.results],
    }


def _arm_record(arm: ArmSummary) -> dict[str, Any]:
    interval = proportion(arm.right, arm.checked)
    return asdict(arm) | {"right_interval_95": None if interval is None else list(interval)}


def _cost_record(scores: Scores, spent_usd: float | None) -> dict[str, Any] | None:
    if scores.economics is None:
        return None
    return {"spent_usd": None if spent_usd is None else round(spent_usd, 6), **asdict(scores.economics)}


def _trigger_record(found: Triggers) -> dict[str, Any]:
    return asdict(found) | {"precision": found.precision, "recall": found.recall, "f1": found.f1}


def trigger_sentence(scores: Scores) -> str | None:
    """How alike both decide to call a tool, in words; None where no question had tools."""
    found, noise = scores.triggers, scores.triggers_noise
    if found.both + found.only_here + found.only_reference + found.neither == 0:
        return None
    own = f"the reference against itself: {percent(noise.f1)}"
    return f"calls a tool where the reference does: F1 {percent(found.f1)} ({own})"


def token_sentences(found: TokenLevel | None) -> tuple[str, ...]:
    """What both hold for likely, in words; nothing where nobody asked."""
    if found is None:
        return ()
    lines = [f"token level, {found.questions} answers' beginnings:"]
    for name, pair in (("candidate against the reference", found.pair), ("the reference against itself", found.noise)):
        if pair is None:
            lines.append(f"{name}: unknown")
        else:
            span = "" if pair.low is None else f" [{percent(pair.low)}, {percent(pair.high)}]"
            lines.append(
                f"{name}: the same likeliest token for {percent(pair.agreement)}{span} of {pair.tokens:,} shared "
                f"tokens; divergence at least {pair.divergence:.4f} nats (of the {pair.top} likeliest)"
            )
    lines += [
        f"{name}, of its own text: {own.mean_logprob:.3f} nats a token on average ({own.tokens:,} tokens)"
        for name, own in (("the candidate", found.candidate), ("the reference", found.reference))
        if own is not None
    ]
    return (*lines, *(f"unknown: {reason}" for reason in found.unknown))


def headline(scores: Scores) -> str:
    """The verdict in words; where it is unknown, with what is wrong."""
    if scores.verdict is not Verdict.UNKNOWN:
        return WORDS[scores.verdict]
    whys = [
        in_words(metric.reason, metric.reference)
        for metric in scores.metrics
        if metric.category is None and metric.verdict is Verdict.UNKNOWN and metric.reason is not None
    ]
    return f"unknown: {'; '.join(dict.fromkeys(whys))}"


def sentence(metric: Metric, *, temperature: float | None = None) -> str:
    """A metric's verdict in words; ``temperature`` is what was sent to both sides."""
    found = metric.difference
    span = ""
    if found is not None:
        p_value = "" if metric.adjusted_p is None else f"; {_p(metric.adjusted_p)}"
        span = f" ({_points(found.mean)} [{_points(found.low)}, {_points(found.high)}]{p_value})"
    said = WORDS[metric.verdict] + span
    if metric.reason is not None:
        return f"{said}: {in_words(metric.reason, metric.reference)}: {way_out(metric.reason, temperature)}"
    count = needed(metric)
    if metric.verdict is not Verdict.NOT_ENOUGH or count is None:
        return said
    if count > MOST_QUESTIONS:
        return f"{said}: no practical number of items would tell"
    return f"{said}: about {metric.more_needed:,} more items would tell"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"  # noqa: PLR2004 -- the resamples tell no more


def _points(value: float) -> str:
    return f"{value * 100:+.1f} %"


def percent(value: float | None) -> str:
    """A share such as ``74.4 %``; ``unknown`` for None."""
    return "unknown" if value is None else f"{value * 100:.1f} %"


def draw(console: "Console", scores: Scores, candidate: Endpoint, reference: Endpoint) -> None:
    """Print the comparison."""
    from rich.padding import Padding  # noqa: PLC0415 -- kept out of JSON runs
    from rich.text import Text  # noqa: PLC0415 -- as above

    console.print(f"candidate  {candidate.model} at {candidate.url}", markup=False)
    console.print(f"reference  {reference.model} at {reference.url}", markup=False)
    console.print(f"suite      {scores.suite}, {scores.items} items, {scores.repeats} time(s)", markup=False)
    _draw_metrics(console, scores)
    rows = [(name, *cells) for name, cells in arm_rows(scores).items()]
    console.print(_table_of(("", *(arm.arm for arm in scores.arms)), rows))
    if (decisions := trigger_sentence(scores)) is not None:
        console.print(decisions, markup=False)
    console.print(f"prompt tokens, candidate against reference: {scores.parity.sentence}", markup=False)
    for place, line in enumerate(token_sentences(scores.tokens)):
        console.print(Padding(Text(line), (0, 0, 0, 2 if place else 0)))
    if scores.economics is not None and not nothing_priced(scores.economics):
        console.print(_table_of(("", "candidate", "reference"), cost_rows(scores.economics)))
        console.print(f"break-even with the reference: {scores.economics.meaning}", markup=False)
    if any(metric.difference for metric in scores.metrics):
        console.print(METHOD, markup=False)
    console.print(Text.assemble(("verdict: ", "bold"), (headline(scores), _COLOURS[scores.verdict])))
    if (what_to_do := advice(scores)) is not None:
        console.print(Text(what_to_do, style="yellow"))


def _draw_metrics(console: "Console", scores: Scores) -> None:
    """A line of numbers and a line of words a metric; of single categories, only those that say something."""
    from rich.padding import Padding  # noqa: PLC0415 -- kept out of JSON runs
    from rich.text import Text  # noqa: PLC0415 -- as above

    columns = ("candidate", "reference", "its own noise", "items")
    console.print(
        Text(f"\n {'':<30}" + "".join(f"{column:>14}" for column in columns[:3]) + f"{columns[3]:>7}", "bold")
    )
    said = {Verdict.WORSE, Verdict.BETTER}
    shown = [metric for metric in scores.metrics if metric.category is None or metric.verdict in said]
    for metric in shown:
        cells = (percent(metric.candidate), percent(metric.reference), percent(metric.noise))
        console.print(
            Text(f" {metric.name:<30}" + "".join(f"{cell:>14}" for cell in cells) + f"{metric.items:>7}"),
            overflow="fold",
        )
        console.print(
            Padding(
                Text(sentence(metric, temperature=scores.temperature), style=_COLOURS[metric.verdict]), (0, 0, 0, 3)
            )
        )
    quiet = len(scores.metrics) - len(shown)
    if quiet:
        console.print(f" {quiet} categories looked at by themselves tell nothing for certain", markup=False)


def _table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    from rich import box  # noqa: PLC0415 -- kept out of JSON runs
    from rich.table import Table  # noqa: PLC0415 -- as above

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    return table


def arm_rows(scores: Scores) -> Mapping[str, list[str]]:
    """What each arm did, as rows of words: one cell for each arm."""
    arms = scores.arms

    def number(value: float | None, form: str) -> str:
        return "unknown" if value is None else form.format(value)

    return {
        "calls": [str(arm.calls) for arm in arms],
        "right": [f"{arm.right} of {arm.checked}" for arm in arms],
        "empty": [str(arm.shapes.get(Shape.EMPTY, 0)) for arm in arms],
        "cut off while thinking": [str(arm.shapes.get(Shape.CUT_OFF_THINKING, 0)) for arm in arms],
        "cut off in the answer": [str(arm.shapes.get(Shape.CUT_OFF, 0)) for arm in arms],
        "transport errors": [_counts(arm.faults) for arm in arms],
        "finish reasons": [_counts(arm.finish_reasons) for arm in arms],
        "valid tool calls": [f"{arm.calls_valid} of {arm.calls_made}" for arm in arms],
        "with thinking": [str(arm.with_thinking) for arm in arms],
        "tokens sent": [number(arm.prompt_tokens, "{:,}") for arm in arms],
        "tokens received": [number(arm.completion_tokens, "{:,}") for arm in arms],
        "tokens thinking": [_thinking(arm) for arm in arms],
        "first token": [number(arm.first_token_seconds, "{:.2f} s") for arm in arms],
        "whole answer": [number(arm.seconds, "{:.2f} s") for arm in arms],
        "tokens/s": [number(arm.tokens_per_second, "{:.1f}") for arm in arms],
    }


def _thinking(arm: ArmSummary) -> str:
    if arm.thinking_tokens is None:
        return "unknown"
    return f"{'about ' if arm.thinking_is_estimated else ''}{arm.thinking_tokens:,}"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "0"
