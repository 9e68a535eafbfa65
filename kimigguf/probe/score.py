"""From calls to a report. Pure: the same calls always make the same report.

Three things are compared, each per item and averaged over its repeats: whether the answer is right, whether it is what
the reference answers, and whether there is an answer at all. Each is set against what the reference shows against
itself. Variants of one template are one cluster: what is alike is no independent sample.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kimigguf.probe.barren import ANSWERED, RIGHT, SAME_ANSWER, Reason, barren
from kimigguf.probe.calls import Arm, Call, Fault, FaultKind, Reply, Shape
from kimigguf.probe.checkers import call_valid, passed, said
from kimigguf.probe.cost import Economics
from kimigguf.probe.intervals import Interval, Verdict, holm, interval, judge
from kimigguf.probe.logprobs import TokenLevel
from kimigguf.probe.parity import Parity, prompt_parity
from kimigguf.probe.suites import Item, Rubric, Suite
from kimigguf.probe.triggers import Triggers, triggers

COUNTED: Final = {Shape.ANSWERED, Shape.EMPTY, Shape.CUT_OFF}
"""Replies that can be right or wrong. A cut-off thought, a tool call and a filter's veto are no answers to judge."""

_LEAST_ITEMS: Final = 5
"""Fewer questions of a category bear no verdict worth the correction for looking at one more number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One repeat of one item: the three arms' replies, None for one that has none."""

    item: Item
    candidate: Reply | None
    reference: Reply | None
    again: Reply | None
    refused: bool = False
    """The candidate would not take the question (too long for it, or a parameter): no wrong answer, but none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """What one arm did. Rates and times are medians over its replies, None where nothing was measured."""

    arm: Arm
    calls: int
    shapes: Mapping[Shape, int]
    faults: Mapping[FaultKind, int]
    finish_reasons: Mapping[str, int]
    right: int
    checked: int
    with_thinking: int
    calls_made: int
    calls_valid: int
    prompt_tokens: int | None
    completion_tokens: int | None
    thinking_tokens: int | None
    thinking_is_estimated: bool
    """Where the endpoint does not count them: the share of its words that were thoughts, of its tokens."""
    first_token_seconds: float | None
    seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One comparison. ``noise`` is the reference's own difference from itself, on the same items.

    ``difference`` is candidate less reference, ``adjusted_p`` its p-value corrected over all metrics of the report,
    ``more_needed`` how many more items would settle an open verdict. ``category`` is set where only its questions are
    looked at: what is broken in one category would drown among the others. It can say "worse"; it is too small to be
    shown to be the same, so it never holds back the verdict of the whole. ``reason`` is why more items would not settle
    an open verdict.
    """

    name: str
    candidate: float | None
    reference: float | None
    noise: float | None
    items: int
    difference: Interval | None
    adjusted_p: float | None
    verdict: Verdict
    more_needed: int | None
    category: str | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """One item in one repeat, for a reader: was it right, and did it say the same as the reference the first time."""

    item: str
    category: str
    repeat: int
    candidate_right: bool | None
    reference_right: bool | None
    again_right: bool | None
    same: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The whole comparison. ``tolerance`` is the difference that a user still calls the same.

    ``triggers`` holds the candidate's decisions to call a tool against the reference's, ``triggers_noise`` the
    reference's second ones against its first. ``temperature`` was sent to both; ``suites`` are those that could be
    asked, with their numbers of questions.
    """

    suite: str
    suite_sha256: str
    items: int
    repeats: int
    tolerance: float
    arms: tuple[ArmSummary, ...]
    metrics: tuple[Metric, ...]
    parity: Parity
    triggers: Triggers
    triggers_noise: Triggers
    results: tuple[ItemResult, ...]
    economics: Economics | None = None
    tokens: TokenLevel | None = None
    temperature: float | None = None
    suites: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst that a metric says."""
        verdicts = {m.verdict for m in self.metrics if m.category is None or m.verdict is Verdict.WORSE}
        for verdict in (Verdict.WORSE, Verdict.UNKNOWN, Verdict.NOT_ENOUGH):
            if verdict in verdicts:
                return verdict
        return Verdict.SAME


def score(suite: Suite, calls: Iterable[Call], *, tolerance: float) -> Scores:
    """Compare the candidate with the reference."""
    calls = tuple(calls)
    rounds = _rounds(suite, calls)
    measures = {SAME_ANSWER: _same_pair, ANSWERED: _any_pair}
    if any(map(_checked, suite.items)):
        measures = {RIGHT: _right_pair, **measures}
    return Scores(
        suite=suite.name,
        suite_sha256=suite.sha256,
        items=len(suite.items),
        repeats=max((call.repeat for call in calls), default=-1) + 1,
        tolerance=tolerance,
        arms=tuple(_summary(arm, suite, [call for call in calls if call.arm is arm]) for arm in Arm),
        metrics=_judged(
            {(name, None): _compared(measure, rounds) for name, measure in measures.items()}
            | {(RIGHT, category): _compared(_right_pair, own) for category, own in _by_category(rounds).items()},
            tolerance,
        ),
        parity=prompt_parity(calls),
        triggers=triggers(suite, calls, Arm.CANDIDATE),
        triggers_noise=triggers(suite, calls, Arm.REFERENCE_AGAIN),
        results=tuple(_result(one, repeat) for repeat, one in rounds),
    )


def _by_category(rounds: Sequence[tuple[int, Round]]) -> dict[str, list[tuple[int, Round]]]:
    """The rounds of each category of checked questions that is large enough, where there is more than one."""
    found: dict[str, list[tuple[int, Round]]] = defaultdict(list)
    for repeat, one in rounds:
        if _checked(one.item):
            found[one.item.category].append((repeat, one))
    sizes = {category: len({one.item.id for _, one in own}) for category, own in found.items()}
    return {category: own for category, own in found.items() if sizes[category] >= _LEAST_ITEMS and len(found) > 1}


def _rounds(suite: Suite, calls: Sequence[Call]) -> list[tuple[int, Round]]:
    replies = {(call.item, call.repeat, call.arm): call.outcome for call in calls if isinstance(call.outcome, Reply)}
    refused = {
        (call.item, call.repeat)
        for call in calls
        if call.arm is Arm.CANDIDATE and isinstance(call.outcome, Fault) and call.outcome.kind is FaultKind.REQUEST
    }
    repeats = sorted({call.repeat for call in calls})

    def reply(item: Item, repeat: int, arm: Arm) -> Reply | None:
        found = replies.get((item.id, repeat, arm))
        return found if isinstance(found, Reply) and _counts(item, found) else None

    return [
        (
            repeat,
            Round(
                item=item,
                candidate=reply(item, repeat, Arm.CANDIDATE),
                reference=reply(item, repeat, Arm.REFERENCE),
                again=reply(item, repeat, Arm.REFERENCE_AGAIN),
                refused=(item.id, repeat) in refused,
            ),
        )
        for item in suite.items
        for repeat in repeats
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One round's values: the candidate's, the reference's, and the reference's second answer's."""

    candidate: float
    reference: float
    noise: float


def _right_pair(one: Round) -> _Pair | None:
    if one.candidate is None or one.reference is None or one.again is None:
        return None
    found = [passed(one.item, reply) for reply in (one.candidate, one.reference, one.again)]
    if None in found:
        return None
    candidate, reference, again = (float(bool(each)) for each in found)
    return _Pair(candidate=candidate, reference=(reference + again) / 2, noise=again - reference)


def _counts(item: Item, reply: Reply) -> bool:
    return reply.shape in COUNTED or (bool(item.tools) and reply.shape is Shape.CALLED_TOOL)


def _checked(item: Item) -> bool:
    """Whether a program can say what is right; what a judge thinks is never counted with it."""
    return item.check is not None and not isinstance(item.check, Rubric)


def _same_pair(one: Round) -> _Pair | None:
    if one.candidate is None or one.reference is None or one.again is None:
        return None
    replies = (one.candidate, one.reference, one.again)
    candidate, reference, again = (said(one.item, reply) for reply in replies)
    itself = float(reference == again)
    return _Pair(
        candidate=(float(candidate == reference) + float(candidate == again)) / 2, reference=itself, noise=1 - itself
    )


def _any_pair(one: Round) -> _Pair | None:
    if (one.candidate is None and not one.refused) or one.reference is None or one.again is None:
        return None
    replies = (one.candidate, one.reference, one.again)
    candidate, reference, again = (
        float(reply is not None and bool(reply.content.strip() or reply.calls)) for reply in replies
    )
    return _Pair(candidate=candidate, reference=(reference + again) / 2, noise=again - reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """One measure over all rounds: its means over items, and the candidate's difference from the reference."""

    candidate: float | None
    reference: float | None
    noise: float | None
    items: int
    difference: Interval | None


def _compared(measure: Callable[[Round], _Pair | None], rounds: Sequence[tuple[int, Round]]) -> _Compared:
    pairs: dict[str, list[_Pair]] = defaultdict(list)
    clusters: dict[str, dict[str, None]] = defaultdict(dict)
    for _, one in rounds:
        pair = measure(one)
        if pair is not None:
            pairs[one.item.id].append(pair)
            clusters[one.item.template or one.item.id][one.item.id] = None

    def per_item(value: Callable[[_Pair], float]) -> dict[str, float]:
        return {item: statistics.fmean(map(value, found)) for item, found in pairs.items()}

    differences = per_item(lambda pair: pair.candidate - pair.reference)
    return _Compared(
        candidate=_mean(per_item(lambda pair: pair.candidate).values()),
        reference=_mean(per_item(lambda pair: pair.reference).values()),
        noise=_mean([abs(value) for value in per_item(lambda pair: pair.noise).values()]),
        items=len(pairs),
        difference=interval([[differences[item] for item in items] for items in clusters.values()]),
    )


def _judged(compared: Mapping[tuple[str, str | None], _Compared], tolerance: float) -> tuple[Metric, ...]:
    tested = {name: one.difference.p_value for name, one in compared.items() if one.difference is not None}
    adjusted = dict(zip(tested, holm(tuple(tested.values())), strict=True))
    metrics = []
    for (name, category), one in compared.items():
        adjusted_p = adjusted.get((name, category))
        verdict, more = judge(one.difference, adjusted_p, tolerance)
        reason = barren(name, items=one.items, reference=one.reference, tolerance=tolerance)
        if reason is not None and (one.items == 0 or verdict is Verdict.SAME):
            verdict = Verdict.UNKNOWN
        is_open = verdict in {Verdict.UNKNOWN, Verdict.NOT_ENOUGH}
        metrics.append(
            Metric(
                name=name if category is None else f"{name}: {category}",
                category=category,
                candidate=one.candidate,
                reference=one.reference,
                noise=one.noise,
                items=one.items,
                difference=one.difference,
                adjusted_p=adjusted_p,
                verdict=verdict,
                more_needed=more if reason is None else None,
                reason=reason if is_open else None,
            )
        )
    return tuple(metrics)


def _mean(values: Collection[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _result(one: Round, repeat: int) -> ItemResult:
    def judged(reply: Reply | None) -> bool | None:
        return None if reply is None else passed(one.item, reply)

    same = None
    if one.candidate is not None and one.reference is not None:
        same = said(one.item, one.candidate) == said(one.item, one.reference)
    return ItemResult(
        item=one.item.id,
        category=one.item.category,
        repeat=repeat,
        candidate_right=judged(one.candidate),
        reference_right=judged(one.reference),
        again_right=judged(one.again),
        same=same,
    )


def _summary(arm: Arm, suite: Suite, calls: Sequence[Call]) -> ArmSummary:
    items = {item.id: item for item in suite.items}
    replies = [(items[call.item], call.outcome) for call in calls if isinstance(call.outcome, Reply)]
    faults = Counter(call.outcome.kind for call in calls if isinstance(call.outcome, Fault))
    checked = [right for item, reply in replies if _counts(item, reply) and (right := passed(item, reply)) is not None]
    only = [reply for _, reply in replies]
    return ArmSummary(
        arm=arm,
        calls=len(calls),
        shapes=dict(Counter(reply.shape for reply in only)),
        faults=dict(faults),
        finish_reasons=dict(Counter(reply.finish_reason or "none" for reply in only)),
        right=sum(checked),
        checked=len(checked),
        calls_made=sum(len(reply.calls) for reply in only),
        calls_valid=sum(call_valid(call, item.tools) for item, reply in replies for call in reply.calls),
        with_thinking=sum(bool(reply.thinking.strip()) for reply in only),
        prompt_tokens=_sum(reply.prompt_tokens for reply in only),
        completion_tokens=_sum(reply.completion_tokens for reply in only),
        thinking_tokens=_sum(_thinking(reply)[0] for reply in only),
        thinking_is_estimated=any(_thinking(reply)[1] for reply in only),
        first_token_seconds=_median(reply.first_token_seconds for reply in only),
        seconds=_median(reply.seconds for reply in only),
        tokens_per_second=_median(reply.tokens_per_second for reply in only),
    )


def _thinking(reply: Reply) -> tuple[int | None, bool]:
    """The tokens of a reply's thoughts, and whether that is an estimate by the length of the texts."""
    if reply.thinking_tokens is not None or not reply.thinking:
        return (reply.thinking_tokens or 0) if reply.completion_tokens is not None else None, False
    if reply.completion_tokens is None:
        return None, False
    rest = len(reply.content) + sum(len(call.name) + len(call.arguments) for call in reply.calls)
    return round(reply.completion_tokens * len(reply.thinking) / (len(reply.thinking) + rest)), True


def solved(suite: Suite, calls: Iterable[Call]) -> dict[tuple[Arm, str], bool]:
    """Whether each arm solved each item that can be checked, in one of its tries; unanswered ones are left out."""
    items = {item.id: item for item in suite.items if _checked(item)}
    found: dict[tuple[Arm, str], bool] = {}
    for call in calls:
        item, reply = items.get(call.item), call.outcome
        if item is None or not isinstance(reply, Reply) or not _counts(item, reply):
            continue
        judged, key = passed(item, reply), (call.arm, call.item)
        if judged is not None:
            found[key] = found.get(key, False) or judged
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
