"""A comparison as one HTML page that needs nothing else: no network, no files beside it. Pure."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from kimigguf.probe.advice import advice
from kimigguf.probe.calls import Arm, Call, Fault, Reply
from kimigguf.probe.client import Endpoint
from kimigguf.probe.cost import cost_rows, nothing_priced
from kimigguf.probe.intervals import proportion
from kimigguf.probe.judge import Better, Opinion, Pair
from kimigguf.probe.pictures import CLASSES, distributions, forest
from kimigguf.probe.report import METHOD, arm_rows, headline, percent, sentence, token_sentences, trigger_sentence
from kimigguf.probe.score import ItemResult, Scores
from kimigguf.probe.suites import Item, Suite

_LONGEST_QUESTION: Final = 20_000
"""Characters of a question that are shown: long contexts would make a page of a hundred megabytes."""
_LONGEST_DIFF: Final = 4000
"""Words in both answers together above which no word-by-word comparison is drawn: its cost grows with their product."""


def page(
    scores: Scores,
    suite: Suite,
    calls: Iterable[Call],
    *,
    candidate: Endpoint,
    reference: Endpoint,
    settings: Mapping[str, object],
    exact: Mapping[str, Any] | None = None,
    judged: str | None = None,
    opinions: Sequence[Opinion] = (),
) -> str:
    """The whole page. Everything that comes from an endpoint or a suite is escaped.

    ``judged`` is what the judge's ``opinions`` come to, in words; None where nobody judged.
    """
    calls, what_to_do = tuple(calls), advice(scores) or ""
    template = Template(files("kimigguf.probe").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"Is {candidate.model} still {reference.model}?"),
        about=escape(_about(scores, suite, calls, settings)),
        sides=escape(f"{candidate.model} at {candidate.url}, judged by {reference.model} at {reference.url}"),
        verdict=escape(f"Verdict: {headline(scores)}"),
        advice=escape(what_to_do[:1].upper() + what_to_do[1:]),
        verdict_class=CLASSES[scores.verdict],
        metrics=_metrics(scores),
        forest=forest(scores),
        method=escape(METHOD[0].upper() + METHOD[1:]),
        distributions=distributions(calls),
        tokens=_paragraphs("Token by token", [*token_sentences(scores.tokens), *_exact_lines(exact)]),
        judged=_paragraphs("As a judge sees it", [] if judged is None else [judged]),
        cost=_cost(scores),
        triggers=escape(trigger_sentence(scores) or ""),
        parity=escape(f"Prompt tokens, candidate against reference: {scores.parity.sentence}"),
        categories=_categories(scores.results),
        arms=_table(
            ["", *(arm.arm for arm in scores.arms)], [[name, *cells] for name, cells in arm_rows(scores).items()]
        ),
        items="\n".join(_items(scores, suite, calls, opinions)),
        settings=_table(
            ["", "value"],
            [[name.replace("_", " "), _setting(name, value, suite)] for name, value in settings.items()],
        ),
    )


def _about(scores: Scores, suite: Suite, calls: Iterable[Call], settings: Mapping[str, object]) -> str:
    """When it was asked, what, how, and of which file, in a line."""
    days = [sent.began[:10] for call in calls if isinstance(call.outcome, Reply) for sent in call.outcome.requests]
    file = settings.get("candidate_file")
    parts = (
        " to ".join(dict.fromkeys((min(days), max(days)))) if days else "",
        f"suite {suite.name}, {scores.items} question{'s'[: scores.items != 1]}",
        f"{scores.repeats} round{'s'[: scores.repeats != 1]}",
        f"temperature: {_setting('temperature', scores.temperature, suite)}",
        f"most tokens of an answer: {_setting('max_tokens', settings.get('max_tokens'), suite)}",
        f"candidate's file: {file}" if file else "",
    )
    return "; ".join(filter(None, parts))


def _setting(name: str, value: object, suite: Suite) -> str:
    """A setting for a reader; of a side, its model and address."""
    own = "each one's own"
    if value is None:
        bound = own if suite.max_tokens is None else f"{suite.max_tokens:,} (the suite's)"
        return {"max_tokens": bound, "temperature": own, "seed": "the suite's"}.get(name, "unknown")
    match value:
        case [str(url), str(model)] if name in {"candidate", "reference"}:
            return f"{model} at {url}"
        case int() if name != "seed":
            return f"{value:,}"
        case float():
            return f"{value:g}"
    return str(value)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _metrics(scores: Scores) -> str:
    rows = "".join(
        f"<tr><td>{escape(metric.name)}</td><td class=n>{percent(metric.candidate)}</td>"
        f"<td class=n>{percent(metric.reference)}</td><td class=n>{percent(metric.noise)}</td>"
        f'<td class=n>{metric.items}</td></tr><tr class="under"><td colspan=5 class="{CLASSES[metric.verdict]}">'
        f"{escape(sentence(metric, temperature=scores.temperature))}</td></tr>"
        for metric in scores.metrics
    )
    head = "<th></th><th class=n>candidate</th><th class=n>reference</th><th class=n>noise</th>"
    head += "<th class=n>items</th>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _paragraphs(heading: str, lines: Sequence[str]) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<h2>{heading}</h2>{text}" if lines else ""


def _exact_lines(exact: Mapping[str, Any] | None) -> list[str]:
    """The exact comparison that lies beside the run, if one does."""
    if exact is None:
        return []
    reference = exact["reference"]["name"] or "a reference's logits"
    return [f"exactly, {exact['candidate']['name']} against {reference}: {exact['meaning']}"]


def _cost(scores: Scores) -> str:
    found = scores.economics
    if found is None or nothing_priced(found):
        return ""
    table = _table(["", "candidate", "reference"], cost_rows(found))
    return f"<h2>What a solved task costs</h2>{table}<p>Break-even with the reference: {escape(found.meaning)}</p>"


def _categories(results: Sequence[ItemResult]) -> str:
    rows = []
    for category in sorted({result.category for result in results}):
        here = [result for result in results if result.category == category]
        rows.append(
            [
                category,
                _share([result.candidate_right for result in here]),
                _share([result.reference_right for result in here]),
                _share([result.again_right for result in here]),
                _share([result.same for result in here]),
            ]
        )
    return _table(["category", "candidate right", "reference right", "the second time", "same answer"], rows)


def _share(values: Iterable[bool | None]) -> str:
    known = [value for value in values if value is not None]
    span = proportion(sum(known), len(known))
    if span is None:
        return "nothing to compare"
    return f"{sum(known)} of {len(known)}, {span[0]:.0%} to {span[1]:.0%}"


def _items(scores: Scores, suite: Suite, calls: Iterable[Call], opinions: Sequence[Opinion]) -> Iterable[str]:
    outcomes = {(call.item, call.repeat, call.arm): call.outcome for call in calls}
    items = {item.id: item for item in suite.items}
    for result in scores.results:
        key = (result.item, result.repeat)
        said = [one for one in opinions if (one.item, one.repeat) == key]
        yield _item(items[result.item], result, {arm: outcomes.get((*key, arm)) for arm in Arm}, said)


def _item(
    item: Item, result: ItemResult, outcomes: Mapping[Arm, Reply | Fault | None], opinions: Sequence[Opinion]
) -> str:
    candidate, reference = outcomes[Arm.CANDIDATE], outcomes[Arm.REFERENCE]
    marks = f"candidate {_MARKS[result.candidate_right]}, reference {_MARKS[result.reference_right]}"
    if result.again_right != result.reference_right:
        marks += f", the second time {_MARKS[result.again_right]}"
    question = _excerpt("\n\n".join(f"{message.role}: {message.content}" for message in item.conversation))
    round_text = f" #{result.repeat + 1}" if result.repeat else ""
    left, right = _sides(candidate, reference)
    return (
        f'<details class="{" ".join(_tags(result))}"><summary>{escape(item.id)}{round_text} '
        f'<span class="soft">{escape(item.category)} · {marks}</span></summary><div class="inside">'
        f'<pre>{escape(question)}</pre><div class="pair"><div>{_caption("candidate", candidate)}<pre>{left}</pre></div>'
        f"<div>{_caption('reference, the first time', reference)}<pre>{right}</pre></div></div>"
        f"{''.join(map(_opinion, opinions))}</div></details>"
    )


def _opinion(opinion: Opinion) -> str:
    """One opinion, folded: which pair in which order, what it came to, and the words."""
    challenger = "the candidate" if opinion.pair is Pair.CANDIDATE else "the reference's second answer"
    pair = ["the reference", challenger] if opinion.reference_first else [challenger, "the reference"]
    came_to = {Better.CHALLENGER: challenger, Better.REFERENCE: "the reference"}.get(opinion.better, opinion.better)
    text = f"the judge on {pair[0]} (A) and {pair[1]} (B): {came_to}"
    return f'<details><summary class="soft">{escape(text)}</summary><pre>{escape(opinion.said)}</pre></details>'


_MARKS: Final[Mapping[bool | None, str]] = {
    None: '<span class="unknown">not judged</span>',
    True: '<span class="right">right</span>',
    False: '<span class="wrong">wrong</span>',
}


def _tags(result: ItemResult) -> list[str]:
    tags = []
    if result.candidate_right is False:
        tags.append("c-wrong")
        if result.reference_right:
            tags.append("lost")
    if result.same is False:
        tags.append("differs")
    if result.same is None:
        tags.append("none")
    return tags


def _excerpt(text: str) -> str:
    if len(text) <= _LONGEST_QUESTION:
        return text
    half = _LONGEST_QUESTION // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half:,} characters are not shown ...]\n\n{text[-half:]}"


def _caption(side: str, outcome: Reply | Fault | None) -> str:
    text = "not asked"
    if isinstance(outcome, Fault):
        text = f"{outcome.kind} after {outcome.tries} tries"
    elif outcome is not None:
        tokens = "" if outcome.completion_tokens is None else f", {outcome.completion_tokens:,} tokens"
        text = f"{outcome.shape}, finish reason {outcome.finish_reason}, {outcome.seconds:.1f} s{tokens}"
        text += f"; its program: {outcome.tested.why}" if outcome.tested is not None and outcome.tested.why else ""
    return f'<p class="soft">{side}: {escape(text)}</p>'


def _sides(candidate: Reply | Fault | None, reference: Reply | Fault | None) -> tuple[str, str]:
    """Both answers as HTML, what only one of them has marked."""
    left, right = _text(candidate), _text(reference)
    ours, theirs = re.findall(r"\s+|\S+", left), re.findall(r"\s+|\S+", right)
    if left == right or len(ours) + len(theirs) > _LONGEST_DIFF:
        return escape(left), escape(right)
    marked_left, marked_right = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        one, other = escape("".join(ours[a:b])), escape("".join(theirs[c:d]))
        marked_left.append(one if kind == "equal" or not one else f"<del>{one}</del>")
        marked_right.append(other if kind == "equal" or not other else f"<ins>{other}</ins>")
    return "".join(marked_left), "".join(marked_right)


def _text(outcome: Reply | Fault | None) -> str:
    match outcome:
        case None:
            return ""
        case Fault():
            return outcome.text
        case Reply():
            made = "".join(f"{call.name}({call.arguments})\n" for call in outcome.calls)
            thought = f"(no content; it was thinking)\n{outcome.thinking}" if outcome.thinking else ""
            return made + outcome.content if made or outcome.content else thought
