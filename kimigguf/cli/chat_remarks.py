"""What a reader should know beside an answer: its speed, how full the context is, why it stopped; pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from kimigguf.engines.endpoint import Limits
from kimigguf.engines.printable import printable
from kimigguf.engines.turn import Turn
from kimigguf.units import duration

_NEARLY_FULL: Final = 0.8
_WORTH_SAYING_SECONDS: Final = 1.0
_MANY_LINES: Final = 40


def figures(turn: Turn, limits: Limits) -> str | None:
    """Tokens, tokens/s, the wait for the first one and the use of the context, as far as they are known."""
    parts = [part for part in (_speed(turn), _wait(turn), _context(turn, limits)) if part]
    return f"({'; '.join(parts)})" if parts else None


def _speed(turn: Turn) -> str | None:
    """By the server's own clock where it has one; else by this side's, which says so."""
    timings = turn.timings or {}
    tokens, speed = timings.get("predicted_n"), timings.get("predicted_per_second")
    if isinstance(tokens, int) and isinstance(speed, int | float) and tokens > 1:
        return f"{tokens:,} tokens, {speed:.1f} tokens/s"
    counted = _number(turn.usage, "completion_tokens")
    if counted is None and not turn.pieces:
        return None
    count = turn.pieces if counted is None else counted
    said = f"{'about ' if counted is None else ''}{count:,} token{'' if count == 1 else 's'}"
    first, last = turn.first_seconds, turn.last_seconds
    if first is None or last is None or last <= first or count < 2:  # noqa: PLR2004 -- one interval needs two tokens
        return said
    return f"{said}, {(count - 1) / (last - first):.1f} tokens/s by this side's clock"


def _wait(turn: Turn) -> str | None:
    if turn.first_seconds is None or turn.first_seconds < _WORTH_SAYING_SECONDS:
        return None
    return f"first after {duration(turn.first_seconds)}"


def used_tokens(turn: Turn) -> int | None:
    """Tokens of the context that the talk takes up after this answer, by the server's count."""
    prompt, said = _number(turn.usage, "prompt_tokens"), _number(turn.usage, "completion_tokens")
    if prompt is not None and said is not None:
        return prompt + said
    counts = [_number(turn.timings, key) for key in ("cache_n", "prompt_n", "predicted_n")]
    return None if None in counts else sum(count for count in counts if count is not None)


def _context(turn: Turn, limits: Limits) -> str | None:
    used = used_tokens(turn)
    if used is None or not limits.context_tokens:
        return None
    return f"context {used:,} of {limits.context_tokens:,}, {used / limits.context_tokens:.0%}"


def warnings(
    turn: Turn, limits: Limits, *, max_tokens: int | None, effort: str | None = None, talks: bool = False
) -> tuple[str, ...]:
    """What went short, each with what helps; ``talks``: there is a next turn, in which commands can be given."""
    used, room = used_tokens(turn), limits.context_tokens
    is_full = used is not None and room is not None and used >= room - 1
    found: list[str] = []
    if turn.finish_reason == "length":
        limit = "the context is full" if is_full else "the token limit is reached"
        cure = _more_room(max_tokens, is_full=is_full)
        if turn.used_up_by_thinking:
            less = "" if effort == "low" else f", or have it think less: {'/' if talks else '--'}effort low"
            found.append(f"thinking used up all tokens before an answer began ({limit}): {cure}{less}")
        elif turn.calls:
            found.append(f"a tool call stops half-way ({limit}): {cure}")
        else:
            found.append(f"the answer stops half-way ({limit}): {cure}")
    elif turn.finish_reason == "content_filter":
        found.append("the server's filter stopped the answer")
    elif not turn.cut and not turn.answer.strip() and not turn.calls:
        found.append("the answer is empty" + (": there is only thinking (/think)" if turn.thinking else ""))
    if used is not None and room and used >= _NEARLY_FULL * room and not (is_full and found):
        found.append(
            f"the context is {used / room:.0%} full, {max(0, room - used):,} tokens are left: "
            "/save and /new, or serve with a larger --context"
        )
    return tuple(found)


def _more_room(max_tokens: int | None, *, is_full: bool) -> str:
    if is_full:
        return "serve with a larger --context, or /new"
    return "raise the server's own limit" if max_tokens is None else f"raise --max-tokens (now {max_tokens})"


def call_lines(call: Mapping[str, Any]) -> tuple[str, ...]:
    """A tool call for people: its name, then its arguments as JSON that can be read."""
    function = call["function"]
    text = str(function.get("arguments") or "")
    try:
        arguments = json.dumps(json.loads(text), indent=2, ensure_ascii=False) if text else "{}"
    except ValueError:
        arguments = text
    lines = printable(arguments).splitlines()
    more = [f"... {len(lines) - _MANY_LINES} more lines"] if len(lines) > _MANY_LINES else []
    return (f"calls {printable(function['name'])}", *("  " + line for line in (*lines[:_MANY_LINES], *more)))


def _number(table: Mapping[str, Any] | None, key: str) -> int | None:
    value = (table or {}).get(key)
    return value if isinstance(value, int) else None
