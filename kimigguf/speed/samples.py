"""What one request measured, whether it counts, and what several together say. Pure: values in, values out.

A rate is taken from the server's own ``timings`` wherever it sends them (llama.cpp: tools/server, result_timings). The
client's clock has the network and the queue in it, so its figures carry its name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_low
from typing import Any, Final

_ENOUGH_TOKENS: Final = 2
"""llama.cpp divides by one token less than it made: one token alone gives 0, infinity or a million per second."""


class Warmth(StrEnum):
    """``cold``: a prompt that was never sent, nothing of it cached. ``warm``: the next turn on top of it."""

    COLD = "cold"
    WARM = "warm"


class Clock(StrEnum):
    """Whose clock a figure is from."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. ``prompt_tokens`` were processed, ``cached_tokens`` reused, ``made_tokens`` generated.

    ``others`` is what the server did for other clients meanwhile, in words, and ``is_disturbed`` whether that took of
    its speed; ``is_watched`` says whether others would have shown at all. ``waited_seconds`` went by before it began,
    as far as both clocks tell. None is unknown or nothing.
    """

    depth_tokens: int
    warmth: Warmth
    clock: Clock
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    made_tokens: int | None = None
    first_token_seconds: float | None = None
    prompt_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    others: str | None = None
    is_disturbed: bool = False
    is_watched: bool = False
    waited_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that says nothing of the speed, and why."""

    depth_tokens: int
    warmth: Warmth
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median and the ends of ``count`` values; the ends and the count are None where only a figure was told."""

    median: float
    lowest: float | None = None
    highest: float | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What the requests of one depth and kind say together. None: not told, or not known."""

    depth_tokens: int | None = None
    warmth: Warmth | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_seconds: Spread | None = None
    prompt_tokens_per_second: Spread | None = None
    decode_tokens_per_second: Spread | None = None


def by_the_server(
    timings: Mapping[str, Any], *, depth_tokens: int, warmth: Warmth, client_seconds: float | None
) -> Sample:
    """A sample from llama.cpp's ``timings``; ``client_seconds`` is when the first token arrived by the client's clock.

    ``prompt_ms`` runs from the moment the server takes the request up to its first token.
    """
    milliseconds = _number(timings.get("prompt_ms"))
    first = None if milliseconds is None else milliseconds / 1000
    waited = None if first is None or client_seconds is None else max(0.0, client_seconds - first)
    return Sample(
        depth_tokens=depth_tokens,
        warmth=warmth,
        clock=Clock.SERVER,
        prompt_tokens=_count(timings.get("prompt_n")),
        cached_tokens=_count(timings.get("cache_n")),
        made_tokens=_count(timings.get("predicted_n")),
        first_token_seconds=first,
        prompt_tokens_per_second=_number(timings.get("prompt_per_second")),
        decode_tokens_per_second=_number(timings.get("predicted_per_second")),
        waited_seconds=waited,
    )


def by_the_client(
    usage: Mapping[str, Any] | None,
    *,
    depth_tokens: int,
    warmth: Warmth,
    first_seconds: float | None,
    last_seconds: float | None,
) -> Sample:
    """A sample from the client's clock and the server's counts; rates are None where it does not count tokens.

    Args:
        usage: OpenAI's ``usage``, None where the server sends none.
        depth_tokens: What was asked for.
        warmth: What was asked for.
        first_seconds: From the request to the first piece of the answer.
        last_seconds: To the last piece.
    """
    told = usage or {}
    whole, made = _count(told.get("prompt_tokens")), _count(told.get("completion_tokens"))
    details = told.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    processed = None if whole is None else whole - (cached or 0)
    return Sample(
        depth_tokens=depth_tokens,
        warmth=warmth,
        clock=Clock.CLIENT,
        prompt_tokens=processed,
        cached_tokens=cached,
        made_tokens=made,
        first_token_seconds=first_seconds,
        prompt_tokens_per_second=_rate(processed, first_seconds),
        decode_tokens_per_second=(
            None
            if made is None or first_seconds is None or last_seconds is None
            else _rate(made - 1, last_seconds - first_seconds)
        ),
    )


def _rate(tokens: int | None, seconds: float | None) -> float | None:
    return tokens / seconds if tokens is not None and seconds else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    number = _number(value)
    return round(number) if number is not None and math.isfinite(number) else None


def judge(sample: Sample) -> Rejected | None:
    """Why a sample does not count; None if it does."""
    reason = _reason(sample)
    if reason is None:
        return None
    return Rejected(depth_tokens=sample.depth_tokens, warmth=sample.warmth, reason=reason)


def _reason(sample: Sample) -> str | None:
    if sample.made_tokens is not None and sample.made_tokens < _ENOUGH_TOKENS:
        return f"{sample.made_tokens} generated: a rate needs {_ENOUGH_TOKENS} tokens or more"
    for rate in (sample.prompt_tokens_per_second, sample.decode_tokens_per_second):
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            return f"the server reports {rate:g} tokens/s"
    if sample.is_disturbed:
        return f"it was not alone: {sample.others}"
    if sample.warmth is Warmth.COLD and sample.cached_tokens:
        return f"{sample.cached_tokens:,} tokens of its prompt came from a cache: it was not cold"
    if sample.warmth is Warmth.WARM and sample.cached_tokens == 0:
        return "the server reused nothing of the turn before: it was not warm"
    return None


def summarise(samples: Sequence[Sample]) -> tuple[Speed, ...]:
    """The samples that count, one row per depth and kind, by depth, cold first."""
    order = list(Warmth)
    kinds = sorted(
        {(one.depth_tokens, one.warmth) for one in samples}, key=lambda kind: (kind[0], order.index(kind[1]))
    )
    return tuple(_together(depth, warmth, samples) for depth, warmth in kinds)


def _together(depth: int, warmth: Warmth, samples: Sequence[Sample]) -> Speed:
    these = [one for one in samples if (one.depth_tokens, one.warmth) == (depth, warmth)]
    return Speed(
        depth_tokens=depth,
        warmth=warmth,
        prompt_tokens=_typical(one.prompt_tokens for one in these),
        cached_tokens=_typical(one.cached_tokens for one in these),
        first_token_seconds=spread(one.first_token_seconds for one in these),
        prompt_tokens_per_second=spread(one.prompt_tokens_per_second for one in these),
        decode_tokens_per_second=spread(one.decode_tokens_per_second for one in these),
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, ends and count of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(median=median(known), lowest=min(known), highest=max(known), count=len(known))


def _typical(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return median_low(known) if known else None
