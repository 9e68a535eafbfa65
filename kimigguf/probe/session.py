"""One comparison from request to finding: what it would cost is agreed on before anything is asked."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kimigguf import __version__
from kimigguf.engines.endpoint import Limits
from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice, Step
from kimigguf.probe import token_level
from kimigguf.probe.calls import Arm, Call
from kimigguf.probe.client import KEY_VARIABLES, Asker, Endpoint, Settings
from kimigguf.probe.cost import Costs, economics, load_costs
from kimigguf.probe.judge import Judged, Opinion, sentence
from kimigguf.probe.judging import Judging, judge_calls, prepare
from kimigguf.probe.logprobs import TokenLevel
from kimigguf.probe.page import page
from kimigguf.probe.references import (
    FREE,
    SPENT,
    SPENT_ON_JUDGE,
    Agree,
    Purse,
    Reference,
    agree_to_unknown,
    check_key,
    check_temperature,
    find_reference,
    most_usd,
    prices_within,
    spent_before,
)
from kimigguf.probe.report import record
from kimigguf.probe.run import Side, jobs, kept_calls, open_store, reference_calls, run, write_reports
from kimigguf.probe.sandbox import closed
from kimigguf.probe.score import Scores, score, solved
from kimigguf.probe.suites import PythonTest, Suite, load_suite, sizes
from kimigguf.probe.teacher_forced import read as read_exact

_ANSWER_TOKENS: Final = 256
"""Room that a long question's answer needs beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. ``reference`` is the name of a known endpoint or an address."""

    candidate: str
    reference: str
    candidate_model: str | None = None
    reference_model: str | None = None
    suite: str = "quick"
    seed: int | None = None
    repeats: int = 1
    tolerance: float = 0.05
    max_tokens: int | None = None
    temperature: float | None = None
    parallel: int = 1
    timeout_seconds: float = 600.0
    out: Path | None = None
    reference_run: Path | None = None
    budget_usd: float | None = None
    costs: Path | None = None
    judge: str | None = None
    judge_model: str | None = None
    token_level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The comparison, as scores and as the JSON answer."""

    scores: Scores
    candidate: Endpoint
    reference: Endpoint
    answer: Mapping[str, Any]
    opinion: Judged | None = None


def probe(request: Request, environ: Mapping[str, str], *, agree: Agree, listen: Listener) -> Finding:
    """Ask both sides and compare. ``agree`` is asked before anything is that costs.

    Raises:
        UsageError: The request cannot be meant, or the cost was not agreed to.
        NetworkError: A side does not answer, or refuses the key.
        MachineError: The folder cannot be written.
    """
    suite = load_suite(request.suite, environ, seed=request.seed)
    known = find_reference(request.reference, environ)
    check_temperature(known, request.temperature)
    purse = _purse(request, known, suite, environ)
    costs = Costs() if request.costs is None else load_costs(request.costs)
    judging = _judging(request, suite, environ, listen)
    asked = {KEY_VARIABLES["reference"]: known, KEY_VARIABLES["judge"]: None if judging is None else judging.known}
    _check_keys(request, asked, environ)
    agree_to_unknown(asked, environ, agree)
    settings = Settings(timeout_seconds=request.timeout_seconds, temperature=request.temperature)
    with (
        closing(Asker("candidate", request.candidate, environ, settings)) as judged,
        closing(
            Asker("reference", known.url, environ, settings, key_variable=known.key_variable, purse=purse)
        ) as standard,
    ):
        for warning in filter(None, (judged.warning, standard.warning)):
            listen(Notice(text=warning))
        left = Side(asker=judged, endpoint=judged.endpoint(request.candidate_model))
        right = Side(asker=standard, endpoint=standard.endpoint(request.reference_model or known.model))
        server = judged.limits()
        suite, left_out = served(suite, server.context_tokens)
        _tell(suite, left_out, listen)
        judge_usd = 0.0 if judging is None else judging.most_usd or 0.0
        described = _described(request, suite, left.endpoint, right.endpoint, server)
        paid = known.name + (f" and the judge {judging.known.name}" if judging is not None and judge_usd else "")
        check = partial(check_key, known, KEY_VARIABLES["reference"], environ)
        may = partial(_may_spend, agree, paid)
        with _told_what_is_kept(request, suite, listen):
            calls = _ask(
                request, suite, left, right, described, check=check, may=may, listen=listen, judge_usd=judge_usd
            )
            tokens = _tokens(request, suite, left, right, pinned=known.temperature is not None, listen=listen)
    right_by_item = solved(suite, calls)
    prices = economics(calls, right_by_item, costs, known.prices, parallel=request.parallel)
    scores = replace(
        score(suite, calls, tolerance=request.tolerance),
        economics=prices,
        tokens=tokens,
        temperature=request.temperature,
        suites=sizes(environ),
    )
    spent = None if purse is None else purse.spent_usd
    opinion, opinions = None, tuple[Opinion, ...]()
    if judging is not None:
        opinion, opinions = _opinion(request, judging, suite, calls, environ, spent_usd=spent or 0.0, listen=listen)
    return _finding(
        request,
        suite,
        calls,
        scores,
        candidate=left.endpoint,
        reference=right.endpoint,
        spent_usd=spent,
        opinion=opinion,
        opinions=opinions,
        left_out=left_out,
        made_by=described | _circumstances(request, server),
    )


@contextmanager
def _told_what_is_kept(request: Request, suite: Suite, listen: Listener) -> Iterator[None]:
    """Whoever stops a run is told whether it was for nothing."""
    try:
        yield
    except KeyboardInterrupt:
        if request.out is None:
            listen(Notice(text="nothing is kept: give --out DIR, and a run that was stopped goes on"))
        else:
            total = len(jobs(suite, request.repeats))
            kept = min(total, kept_calls(request.out))
            listen(Notice(text=f"{kept} of {total} calls are kept in {request.out}; the same command goes on"))
        raise


def _whom(request: Request, suite: Suite, left: Endpoint, right: Endpoint) -> str:
    """What is asked of whom, before it is."""
    rounds = "" if request.repeats == 1 else f" in {request.repeats} rounds"
    return (
        f"{suite.name}, {len(suite.items)} questions{rounds}, to the candidate {left.model} at {left.url} once and to "
        f"the reference {right.model} at {right.url} twice: {len(jobs(suite, request.repeats))} calls"
    )


def _check_keys(request: Request, asked: Mapping[str, Reference | None], environ: Mapping[str, str]) -> None:
    """Before anything is asked; what an earlier run has answered may need no key at all."""
    if request.reference_run is not None or (request.out is not None and request.out.exists()):
        return
    for variable, known in asked.items():
        if known is not None:
            check_key(known, variable, environ)


def _judging(request: Request, suite: Suite, environ: Mapping[str, str], listen: Listener) -> Judging | None:
    return prepare(
        request.judge,
        request.judge_model,
        suite,
        environ,
        max_tokens=request.max_tokens or suite.max_tokens,
        repeats=request.repeats,
        budget_usd=request.budget_usd,
        listen=listen,
    )


def _opinion(
    request: Request,
    judging: Judging,
    suite: Suite,
    calls: Sequence[Call],
    environ: Mapping[str, str],
    *,
    spent_usd: float,
    listen: Listener,
) -> tuple[Judged, tuple[Opinion, ...]]:
    """What the judge says, within what is left of the budget, or else of what was agreed to."""
    budget = request.budget_usd
    with _told_what_is_kept(request, suite, listen):
        return judge_calls(
            judging,
            suite,
            calls,
            environ,
            tolerance=request.tolerance,
            budget_usd=None if budget is None else max(0.0, budget - spent_usd),
            folder=request.out,
            parallel=request.parallel,
            timeout_seconds=request.timeout_seconds,
            listen=listen,
        )


def _tokens(
    request: Request, suite: Suite, left: Side, right: Side, *, pinned: bool, listen: Listener
) -> TokenLevel | None:
    if not request.token_level:
        return None
    return token_level.compare_tokens(
        suite,
        request.token_level,
        left,
        right,
        pinned=pinned,
        folder=request.out,
        reference_run=request.reference_run,
        listen=listen,
    )


def served(suite: Suite, context_tokens: int | None) -> tuple[Suite, int]:
    """The suite without the long questions that the candidate's context does not hold, and how many those are.

    The suite keeps its hash: it names the questions that were drawn, so that one reference serves several contexts.
    """
    if context_tokens is None:
        return suite, 0
    room = context_tokens - _ANSWER_TOKENS
    items = tuple(item for item in suite.items if item.tokens is None or item.tokens <= room)
    if not items:
        raise UsageError(
            f"the candidate serves {context_tokens} tokens, and every question of {suite.name} is longer",
            code="context-too-small",
            hint="kimigguf quality-probe --suite standard ...",
        )
    return replace(suite, items=items), len(suite.items) - len(items)


def _tell(suite: Suite, left_out: int, listen: Listener) -> None:
    """What will not be asked or not be judged, before anything is."""
    if left_out:
        listen(Notice(text=f"{left_out} questions are left out: the candidate's context does not hold them"))
    programs = sum(isinstance(item.check, PythonTest) for item in suite.items)
    if programs and (why := closed()) is not None:
        listen(Notice(text=f"UNKNOWN: {why}; the programs of {programs} questions are not run and not counted"))


def _purse(request: Request, known: Reference, suite: Suite, environ: Mapping[str, str]) -> Purse | None:
    prices = prices_within(known, known.name, request.budget_usd, environ)
    if prices is None:
        return None
    if prices is not FREE and (request.max_tokens or suite.max_tokens) is None:
        raise UsageError(
            f"{known.name} charges by the token, and neither the suite nor the request bounds an answer",
            code="no-token-bound",
            hint="--max-tokens 4096",
        )
    if request.out is None:
        return Purse(prices, request.budget_usd)
    budget = request.budget_usd
    if budget is not None:  # one budget for both: the judge of an earlier run has had its part
        budget = max(0.0, budget - spent_before(request.out / SPENT_ON_JUDGE))
    return Purse(prices, budget, record=request.out / SPENT)


def _described(request: Request, suite: Suite, left: Endpoint, right: Endpoint, server: Limits) -> dict[str, Any]:
    """What a run must have in common with one that it continues: another quant at the same address is another run."""
    return {
        "suite_sha256": suite.sha256,
        "candidate": [left.url, left.model],
        "candidate_file": server.model_file,
        "reference": [right.url, right.model],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
    }


def _circumstances(request: Request, server: Limits) -> dict[str, Any]:
    """What else it takes to make the run again."""
    return {
        "suite": request.suite,
        "seed": request.seed,
        "parallel": request.parallel,
        "candidate_build": server.build,
        "candidate_context_tokens": server.context_tokens,
        "asked_from": f"{platform.platform()}, {os.cpu_count()} processors",
        "kimigguf": __version__,
    }


def _may_spend(agree: Agree, paid: str, usd: float) -> None:
    if not agree(usd, paid):
        raise UsageError(
            f"{paid} may charge up to ${usd:.2f}, and that was not agreed to",
            code="cost-not-agreed",
            hint="add --yes, or --budget-usd 5",
        )


def _ask(
    request: Request,
    suite: Suite,
    left: Side,
    right: Side,
    described: Mapping[str, Any],
    *,
    check: Callable[[], None],
    may: Callable[[float], None],
    listen: Listener,
    judge_usd: float,
) -> tuple[Call, ...]:
    """``check`` refuses to ask the reference without its key, ``may`` to spend so many US dollars without leave."""
    listen(Step(text=_whom(request, suite, left.endpoint, right.endpoint)))
    stored = reference_calls(request.reference_run, suite, right.endpoint) if request.reference_run else ()
    with open_store(request.out, described, suite) as store:
        store.take_over(call for call in stored if call.repeat < request.repeats)
        done = {(call.arm, call.item, call.repeat) for call in store.calls}
        left_over = sum(job.key not in done and job.arm is not Arm.CANDIDATE for job in jobs(suite, request.repeats))
        if left_over:
            check()
        max_tokens = request.max_tokens or suite.max_tokens
        most = judge_usd
        if left_over and right.asker.purse is not None and max_tokens is not None:
            prices = right.asker.purse.prices
            most += most_usd(prices, suite, max_tokens, left_over)
        if right.asker.purse is not None:
            kept_in = (request.out, request.reference_run)
            most += token_level.most_usd(right.asker.purse.prices, suite, request.token_level, kept_in=kept_in)
        if most and request.budget_usd is None:
            may(most)
            if right.asker.purse is not None:
                right.asker.purse.hold_to(most - judge_usd)
        return run(
            suite,
            left,
            right,
            repeats=request.repeats,
            parallel=request.parallel,
            max_tokens=request.max_tokens,
            store=store,
            listen=listen,
        )


def _finding(
    request: Request,
    suite: Suite,
    calls: tuple[Call, ...],
    scores: Scores,
    *,
    candidate: Endpoint,
    reference: Endpoint,
    spent_usd: float | None,
    opinion: Judged | None,
    opinions: Sequence[Opinion],
    left_out: int,
    made_by: Mapping[str, Any],
) -> Finding:
    exact = None if request.out is None else read_exact(request.out)
    answer = {**record(scores, candidate, reference, spent_usd=spent_usd), "exact": exact}
    answer["judged"] = None if opinion is None else asdict(opinion)
    answer["left_out"] = left_out
    answer["made_by"] = dict(made_by)
    if request.out is not None:
        settings = dict(made_by)
        settings |= {"left out": f"{left_out} questions that the candidate's context does not hold"} if left_out else {}
        html = page(
            scores,
            suite,
            calls,
            candidate=candidate,
            reference=reference,
            settings=settings,
            exact=exact,
            judged=None if opinion is None else sentence(opinion),
            opinions=opinions,
        )
        write_reports(request.out, answer, html)
    return Finding(scores=scores, candidate=candidate, reference=reference, answer=answer, opinion=opinion)
