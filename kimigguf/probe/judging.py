"""The judge's part of a comparison: what it may cost is agreed on with the rest, and paid from the same budget."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice
from kimigguf.probe.calls import Call
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.judge import Judged, Opinion, ask_judge, judged, most_usd, rubrics
from kimigguf.probe.references import FREE, SPENT_ON_JUDGE, Purse, Reference, find_reference, prices_within
from kimigguf.probe.suites import Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Who judges. ``most_usd`` is the most that it can cost, None where nobody knows."""

    known: Reference
    model: str | None
    most_usd: float | None


def prepare(
    name: str | None,
    model: str | None,
    suite: Suite,
    environ: Mapping[str, str],
    *,
    max_tokens: int | None,
    repeats: int,
    budget_usd: float | None,
    listen: Listener,
) -> Judging | None:
    """Find the judge; None where nobody is to judge or there is nothing to judge, and that is told.

    Raises:
        UsageError: ``no-price`` where a budget is to be held against what nobody has written down, ``no-token-bound``
            where answers without a bound would go in.
    """
    count = rubrics(suite)
    if name is None or count == 0:
        if count:
            listen(Notice(text=f"{count} questions have a rubric and nobody to judge by it: add --judge"))
        elif name is not None:
            listen(Notice(text=f"no question of {suite.name} has a rubric: the judge is not asked"))
        return None
    known = find_reference(name, environ)
    prices = prices_within(known, f"the judge {known.name}", budget_usd, environ)
    if prices is None:
        return Judging(known=known, model=model, most_usd=None)
    if prices is FREE:
        return Judging(known=known, model=model, most_usd=0.0)
    if max_tokens is None:
        raise UsageError(
            f"{known.name} charges by the token, and neither the suite nor the request bounds the answers it is shown",
            code="no-token-bound",
            hint="--max-tokens 4096",
        )
    return Judging(known=known, model=model, most_usd=most_usd(prices, suite, max_tokens, repeats))


def judge_calls(
    judging: Judging,
    suite: Suite,
    calls: Sequence[Call],
    environ: Mapping[str, str],
    *,
    tolerance: float,
    budget_usd: float | None,
    folder: Path | None,
    parallel: int,
    timeout_seconds: float,
    listen: Listener,
) -> tuple[Judged, tuple[Opinion, ...]]:
    """Ask the judge about the calls of a run.

    ``budget_usd`` is what all asking of the judge may cost, None: from here on, the most that was agreed to.

    Returns:
        What the opinions come to, and the opinions.

    Raises:
        UsageError: ``other-judge``, or the judge's model is not known.
        NetworkError: The judge does not answer, or refuses the key.
        MachineError: ``cannot-write``.
    """
    known = judging.known
    record = None if folder is None else folder / SPENT_ON_JUDGE
    purse = None if known.prices is None else Purse(known.prices, budget_usd, record=record)
    if purse is not None and judging.most_usd is not None:
        purse.hold_to(judging.most_usd)
    settings = Settings(timeout_seconds=timeout_seconds)
    with closing(Asker("judge", known.url, environ, settings, key_variable=known.key_variable, purse=purse)) as asker:
        if asker.warning:
            listen(Notice(text=asker.warning))
        endpoint = asker.endpoint(judging.model or known.model)
        opinions = ask_judge(suite, calls, asker, endpoint, folder=folder, parallel=parallel, listen=listen)
    spent = None if purse is None else purse.spent_usd
    return judged(opinions, endpoint, tolerance=tolerance, spent_usd=spent), opinions
