"""What two endpoints hold for likely, token by token, as far as their top candidates tell. Pure.

An endpoint shows only its own text's tokens and the likeliest few at each. Two texts can be compared while they are the
same: at each shared token, and at the first that differs, both saw the same text before. That bounds what can be said:

- a text that parts early counts few tokens, so the agreement is that of texts that still agree;
- what is not shown is lumped into one bucket, and lumping can only lower a divergence (the log sum inequality): what is
  given is a lower bound.

With both models on this machine ``quality-probe exact`` has neither limit.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kimigguf.engines.printable import sendable
from kimigguf.probe.calls import Sent
from kimigguf.probe.intervals import Interval, interval

_ROUNDING: Final = 1e-3
_LEAST: Final = 1e-9
"""A probability that is none, within what the endpoints' own rounding leaves of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One token of a text: which, and the likeliest ones there with the logarithms of their probabilities.

    Tokens are their bytes as Latin-1, because a token may be half a character.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @property
    def likeliest(self) -> str:
        return max(self.top, key=lambda one: one[1])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The beginning of an endpoint's answer. ``positions`` None: it gave no log-probabilities; ``why`` says how.

    ``requests`` are those that were sent for it, none in the record of an older version.
    """

    positions: tuple[Position, ...] | None
    why: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    requests: tuple[Sent, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """How sure an endpoint was of its own text: ``tokens`` of them, their mean log-probability in nats."""

    texts: int
    tokens: int
    mean_logprob: float
    likeliest: float
    """The share of tokens that were the likeliest ones: less than 1 where it did not write greedily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two endpoints on the prefixes that their texts share.

    ``agreement`` is the share of tokens where both hold the same one for the likeliest, with a 95 % interval that takes
    texts for independent and not tokens. ``divergence`` is a lower bound of the mean Kullback-Leibler divergence of the
    left one from the right one, in nats; ``top`` how many candidates each showed at most.
    """

    texts: int
    tokens: int
    agreement: float
    low: float | None
    high: float | None
    divergence: float
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLevel:
    """The comparison; ``unknown`` says why a part that is None could not be made."""

    questions: int
    candidate: OwnText | None
    reference: OwnText | None
    pair: Pair | None
    noise: Pair | None
    unknown: tuple[str, ...]


def read(logprobs: Any) -> tuple[tuple[Position, ...] | None, str | None]:  # noqa: ANN401 -- the library's type or None
    """The positions of a choice's ``logprobs``, or None and why they are none: missing numbers are never made up."""
    content = getattr(logprobs, "content", None)
    if not content:
        return None, "the endpoint gave no log-probabilities"
    positions = tuple(
        Position(
            token=_bytes(one), logprob=one.logprob, top=tuple((_bytes(top), top.logprob) for top in one.top_logprobs)
        )
        for one in content
    )
    problem = next((found for position in positions if (found := _problem(position))), None)
    if problem is None and all(position.logprob == 0.0 for position in positions):
        problem = "every token has the probability 1, as after sampling"
    return (None, f"the endpoint's numbers are no log-probabilities: {problem}") if problem else (positions, None)


def _bytes(one: Any) -> str:  # noqa: ANN401 -- as above
    return bytes(one.bytes).decode("latin-1") if one.bytes else sendable(str(one.token)).encode().decode("latin-1")


def _problem(position: Position) -> str | None:
    if not position.top:
        return "no likeliest tokens beside a token"
    if not math.isfinite(position.logprob) or position.logprob > _ROUNDING:
        return f"{position.logprob} for a token"
    total = sum(math.exp(logprob) for _, logprob in position.top if math.isfinite(logprob))
    if not total <= 1 + _ROUNDING:
        return f"probabilities that add up to {total:.3g}"
    return None


def token_level(
    candidate: Mapping[str, Continuation], reference: Mapping[str, Continuation], again: Mapping[str, Continuation]
) -> TokenLevel:
    """Compare the texts of both sides, and the reference's with its own second ones, by question."""
    unknown = [
        f"{name}: {why}"
        for name, texts in (("candidate", candidate), ("reference", reference), ("reference-again", again))
        if (why := _missing(texts))
    ]
    return TokenLevel(
        questions=max(len(candidate), len(reference), len(again)),
        candidate=_own(candidate.values()),
        reference=_own(reference.values()),
        pair=_pair(candidate, reference),
        noise=_pair(again, reference),
        unknown=tuple(unknown),
    )


def _missing(texts: Mapping[str, Continuation]) -> str | None:
    if any(text.positions for text in texts.values()):
        return None
    return next((text.why for text in texts.values() if text.why), "it gave no answer")


def _own(texts: Iterable[Continuation]) -> OwnText | None:
    known = [text.positions for text in texts if text.positions]
    positions = [position for text in known for position in text]
    if not positions:
        return None
    return OwnText(
        texts=len(known),
        tokens=len(positions),
        mean_logprob=statistics.fmean(position.logprob for position in positions),
        likeliest=statistics.fmean(position.token == position.likeliest for position in positions),
    )


def _pair(left: Mapping[str, Continuation], right: Mapping[str, Continuation]) -> Pair | None:
    shared = [
        list(_shared(one.positions, other.positions))
        for name, one in left.items()
        if (other := right.get(name)) is not None and one.positions and other.positions
    ]
    pairs = [pair for text in shared for pair in text]
    if not pairs:
        return None
    # Of the disagreements, which are few: the interval's own rules are for differences around nothing.
    found = interval([[float(a.likeliest == b.likeliest) - 1 for a, b in text] for text in shared])
    low, high = _ends(found)
    return Pair(
        texts=len(shared),
        tokens=len(pairs),
        agreement=statistics.fmean(a.likeliest == b.likeliest for a, b in pairs),
        low=low,
        high=high,
        divergence=statistics.fmean(bounded_divergence(dict(b.top), dict(a.top)) for a, b in pairs),
        top=max(len(position.top) for pair in pairs for position in pair),
    )


def _ends(found: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if found is None else (max(0.0, 1 + found.low), min(1.0, 1 + found.high))


def _shared(left: Sequence[Position], right: Sequence[Position]) -> Iterator[tuple[Position, Position]]:
    for one, other in zip(left, right, strict=False):
        yield one, other
        if one.token != other.token:
            return


def bounded_divergence(reference: Mapping[str, float], candidate: Mapping[str, float]) -> float:
    """A lower bound, in nats, of the candidate's divergence from the reference, from the likeliest tokens of each.

    Tokens that both show stand for themselves. One that only the reference shows is, to the candidate, at most as
    likely as the last one that it does show; all others together stand for one. Within that, the candidate's unknown
    probabilities are those that diverge least: in proportion to the reference's, as far as they may.
    """
    pairs = [(math.exp(reference[token]), math.exp(candidate[token])) for token in reference.keys() & candidate.keys()]
    rest_p, rest_q = 1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)
    most = math.exp(min(candidate.values()))
    for p in sorted((math.exp(reference[token]) for token in reference.keys() - candidate.keys()), reverse=True):
        if p * max(rest_q, 0.0) <= most * rest_p:
            break
        pairs.append((p, most))
        rest_p, rest_q = rest_p - p, rest_q - most
    total = sum(p * math.log(p / max(q, _LEAST)) for p, q in [*pairs, (rest_p, rest_q)] if p > _LEAST)
    return max(0.0, total)
