"""Asks one endpoint, or two, the requests of ``probe.protocol``; what a priced one may cost is agreed on first."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice
from kimigguf.events import Step as Told
from kimigguf.probe.calls import Fault, FaultKind, Outcome
from kimigguf.probe.client import KEY_VARIABLES, Asker, Endpoint, Settings, stopped
from kimigguf.probe.protocol import STEPS, Check, Step, checks, parity, worse
from kimigguf.probe.references import (
    Agree,
    Prices,
    Purse,
    Reference,
    agree_to_unknown,
    check_key,
    find_reference,
    prices_within,
)

_FATAL: Final = {FaultKind.KEY, FaultKind.CONNECTION}
_MOST_TURNS_COUNTED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``max_tokens`` bounds each reply with its thinking; without ``reference`` the candidate is looked at alone."""

    candidate: str
    reference: str | None = None
    candidate_model: str | None = None
    reference_model: str | None = None
    max_tokens: int = 2048
    timeout_seconds: float = 600.0
    budget_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What both sides do; ``worse`` are the checks that the candidate fails and the reference does not."""

    candidate: Endpoint
    reference: Endpoint | None
    here: tuple[Check, ...]
    there: tuple[Check, ...] | None
    parity: str | None
    worse: tuple[str, ...]
    spent_usd: float | None

    @property
    def record(self) -> dict[str, Any]:
        return {"schema": "kimigguf.probe-protocol/1", **asdict(self)}


def look(
    request: Request,
    environ: Mapping[str, str],
    *,
    arguments: Callable[[str], Mapping[str, str]],
    agree: Agree,
    listen: Listener,
) -> Found:
    """Ask both. ``arguments`` gives the template arguments of a thinking effort.

    Raises:
        UsageError: The request cannot be meant, or the cost was not agreed to.
        NetworkError: A side does not answer, or refuses the key.
    """
    settings = Settings(timeout_seconds=request.timeout_seconds, tries=2)
    known = None if request.reference is None else find_reference(request.reference, environ)
    if known is not None:
        check_key(known, KEY_VARIABLES["reference"], environ)
    agree_to_unknown({KEY_VARIABLES["reference"]: known}, environ, agree)
    purse = None if known is None else _purse(known, request, environ, agree)
    there = endpoint = None
    if known is not None:
        with closing(
            Asker("reference", known.url, environ, settings, key_variable=known.key_variable, purse=purse)
        ) as asker:
            _warn(asker, listen)
            endpoint = asker.endpoint(request.reference_model or known.model)
            there = _ask(asker, endpoint, request.max_tokens, arguments, listen, template_arguments=False)
    with closing(Asker("candidate", request.candidate, environ, settings)) as asker:
        _warn(asker, listen)
        candidate = asker.endpoint(request.candidate_model)
        here = _ask(asker, candidate, request.max_tokens, arguments, listen, template_arguments=True)
    seen, wanted = checks(here), None if there is None else checks(there)
    return Found(
        candidate=candidate,
        reference=endpoint,
        here=seen,
        there=wanted,
        parity=None if there is None else parity(here, there),
        worse=worse(seen, wanted),
        spent_usd=None if purse is None else round(purse.spent_usd, 6),
    )


def _purse(known: Reference, request: Request, environ: Mapping[str, str], agree: Agree) -> Purse | None:
    prices = prices_within(known, known.name, request.budget_usd, environ)
    if prices is None:
        return None
    most = most_usd(prices, request.max_tokens)
    if request.budget_usd is None and not agree(most, known.name):
        raise UsageError(
            f"the reference may cost up to ${most:.2f}, and that was not agreed to",
            code="cost-not-agreed",
            hint="add --yes, or --budget-usd 1",
        )
    return Purse(prices, most if request.budget_usd is None else request.budget_usd)


def most_usd(prices: Prices, max_tokens: int) -> float:
    """The most that one side's requests can cost."""
    return sum(
        prices.most(step.item, step.bound or max_tokens) * (_MOST_TURNS_COUNTED if step.loop else 1)
        for step in STEPS.values()
    )


def _warn(asker: Asker, listen: Listener) -> None:
    if asker.warning:
        listen(Notice(text=asker.warning))


def _ask(
    asker: Asker,
    endpoint: Endpoint,
    max_tokens: int,
    arguments: Callable[[str], Mapping[str, str]],
    listen: Listener,
    *,
    template_arguments: bool,
) -> dict[str, Outcome]:
    """All steps, one after the other: a server of one slot must not be asked twice at once."""
    found: dict[str, Outcome] = {}
    for number, (name, step) in enumerate(STEPS.items(), 1):
        listen(Told(text=f"{asker.role}: {name} ({number} of {len(STEPS)})"))
        extra = {**step.extra, **_effort(step, arguments if template_arguments else None)}
        bound = step.bound or max_tokens
        if step.loop:
            found[name] = asker.ask(endpoint, step.item, bound)
        else:
            found[name] = asker.send(endpoint, step.item, bound, stream=step.stream, extra=extra)
        outcome = found[name]
        if isinstance(outcome, Fault) and outcome.kind in _FATAL:
            raise stopped(asker.role, asker.url, outcome)
    return found


def _effort(step: Step, arguments: Callable[[str], Mapping[str, str]] | None) -> dict[str, Any]:
    """The effort as APIs take it, and for a local server as its chat template does too."""
    if step.effort is None:
        return {}
    local = {} if arguments is None else {"chat_template_kwargs": dict(arguments(step.effort))}
    return {"reasoning_effort": step.effort, **local}
