"""What an assistant says in one turn, put together from the chunks of a stream; pure, and frozen at every step.

Servers differ: thinking comes as ``reasoning_content``, as ``reasoning``, or between ``<think>`` and ``</think>`` in
the text itself; usage, timings and progress may be missing.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from kimigguf.engines.printable import sendable

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
_ONLY_CLOSED: Final = re.compile(r"((?:(?!<think>).)*?)^</think>\s*", re.DOTALL | re.MULTILINE)
_FIELDS: Final = ("reasoning_content", "reasoning")
"""In this order: a server that sends both says the same in both."""


class Kind(StrEnum):
    """What a piece of a streamed answer is."""

    THINKING = "thinking"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of an answer as it arrives."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as far as it has come; ``arguments`` is the model's own JSON, which need not be any."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it has a name and arguments that a template can read."""
        try:
            json.loads(self.arguments or "{}")
        except ValueError:
            return False
        return bool(self.name)


class _Inside(StrEnum):
    """Where in the text the stream is, for servers that leave the thinking in it."""

    START = "start"
    THINKING = "thinking"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer as far as it has come.

    ``content`` is the server's text as it came, ``answer`` the part of it that is no thinking. ``usage``, ``timings``
    and ``progress`` (tokens of the prompt) are the server's own, None where it sends none. ``first_seconds`` and
    ``last_seconds`` are when text came first and last, by this side's clock, from the moment of asking; ``pieces``
    counts the deltas that held text, which with most servers is the number of tokens.
    """

    thinking: str = ""
    content: str = ""
    answer: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None
    progress: tuple[int, int] | None = None
    field: str | None = None
    cut: bool = False
    pieces: int = 0
    thinking_pieces: int = 0
    first_seconds: float | None = None
    last_seconds: float | None = None
    answer_seconds: float | None = None
    inside: _Inside = _Inside.START
    held: str = ""
    """The end of the text, while it could be the beginning of a tag."""

    @property
    def is_empty(self) -> bool:
        return not (self.thinking or self.content or self.calls)

    @property
    def is_complete(self) -> bool:
        """Whether the server said that it is done; a connection that was cut looks like an end, but says nothing."""
        return self.finish_reason is not None or self.usage is not None

    @property
    def used_up_by_thinking(self) -> bool:
        """Whether the token limit was reached before the answer began: no fault of the server."""
        return self.finish_reason == "length" and not self.answer.strip() and bool(self.thinking)

    @property
    def message(self) -> dict[str, Any]:
        """What goes back to the server in later turns: all of it, under the names that the server uses.

        Of an answer that was cut, a tool call without its end is left out: a template could not read it.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.field is not None and self.thinking:
            message[self.field] = self.thinking
        calls = [call for call in self.calls if call.is_whole] if self.cut else self.calls
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


def take(turn: Turn, chunk: Mapping[str, Any], *, seconds: float = 0.0) -> tuple[Turn, tuple[Piece, ...]]:
    """The turn with one more chunk, ``seconds`` after it was asked for, and what there is to show of it.

    What has another shape than the API's is passed over: servers add things of their own.
    """
    turn = replace(turn, usage=_table(chunk, "usage") or turn.usage, timings=_table(chunk, "timings") or turn.timings)
    match chunk.get("prompt_progress"):
        case {"processed": int(done), "total": int(total)}:
            turn = replace(turn, progress=(done, total))
    shown: list[Piece] = []
    for choice in _tables(chunk, "choices"):
        turn = replace(turn, finish_reason=_text(choice, "finish_reason") or turn.finish_reason)
        turn, pieces = _take_delta(turn, _table(choice, "delta"), seconds)
        shown += pieces
    return turn, tuple(shown)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    return sendable(value) if isinstance(value, str) else ""


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key)
    return value if isinstance(value, Mapping) else {}


def _tables(table: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], ...]:
    value = table.get(key)
    return tuple(entry for entry in value if isinstance(entry, Mapping)) if isinstance(value, list) else ()


def end(turn: Turn, *, cut: bool = False) -> tuple[Turn, tuple[Piece, ...]]:
    """The turn when nothing more comes; text that was held back as a possible tag is none."""
    kind = Kind.THINKING if turn.inside is _Inside.THINKING else Kind.ANSWER
    pieces = (Piece(kind=kind, text=turn.held),) if turn.held else ()
    turn = replace(_shown(turn, pieces), held="", cut=cut)
    # Some templates open the thinking in the prompt, so that only its end comes: too late to show it as what it was.
    if not turn.thinking and (found := _ONLY_CLOSED.match(turn.answer)):
        turn = replace(turn, thinking=found[1], answer=turn.answer[found.end() :])
    return turn, pieces


def _take_delta(turn: Turn, delta: Mapping[str, Any], seconds: float) -> tuple[Turn, tuple[Piece, ...]]:
    pieces: tuple[Piece, ...] = ()
    field = next((name for name in _FIELDS if _text(delta, name)), None)
    if field is not None and turn.field in {None, field}:
        pieces = (Piece(kind=Kind.THINKING, text=_text(delta, field)),)
        turn = replace(turn, field=field)
    # A refusal takes the place of an answer where a server filters.
    text = _text(delta, "content") or _text(delta, "refusal")
    if text:
        turn = replace(turn, content=turn.content + text)
        turn, parts = _apart(turn, text)
        pieces += parts
    calls = turn.calls
    for part in _tables(delta, "tool_calls"):
        calls = _with_part(calls, part)
    if pieces or text or calls is not turn.calls:
        answers = turn.inside is not _Inside.THINKING and (text or calls is not turn.calls)
        turn = replace(
            turn,
            pieces=turn.pieces + 1,
            thinking_pieces=turn.thinking_pieces + (0 if answers else 1),
            first_seconds=seconds if turn.first_seconds is None else turn.first_seconds,
            last_seconds=seconds,
            answer_seconds=seconds if answers and turn.answer_seconds is None else turn.answer_seconds,
        )
    return replace(_shown(turn, pieces), calls=calls), pieces


def _shown(turn: Turn, pieces: tuple[Piece, ...]) -> Turn:
    thinking = "".join(piece.text for piece in pieces if piece.kind is Kind.THINKING)
    answer = "".join(piece.text for piece in pieces if piece.kind is Kind.ANSWER)
    return replace(turn, thinking=turn.thinking + thinking, answer=turn.answer + answer)


def _apart(turn: Turn, text: str) -> tuple[Turn, tuple[Piece, ...]]:
    """Part a server's text into thinking and answer; only at its very start can thinking begin."""
    if turn.inside is _Inside.ANSWER:
        # A server that sent no answer yet may still owe the blank lines after its thinking.
        lead = text.lstrip("\n") if turn.thinking and not turn.answer else text
        return turn, (Piece(kind=Kind.ANSWER, text=lead),) if lead else ()
    text = turn.held + text
    if turn.inside is _Inside.START:
        bare = text.lstrip()
        if len(bare) < len(_OPEN) and _OPEN.startswith(bare) and turn.field is None:
            return replace(turn, held=text), ()
        if not bare.startswith(_OPEN) or turn.field is not None:
            return _apart(replace(turn, inside=_Inside.ANSWER, held=""), text)
        text = bare.removeprefix(_OPEN)
        turn = replace(turn, inside=_Inside.THINKING)
    if not turn.thinking:
        text = text.lstrip("\n")
    thought, tag, rest = text.partition(_CLOSE)
    if not tag:
        kept = _kept(thought)
        thought, held = thought[: len(thought) - kept], thought[len(thought) - kept :]
        return replace(turn, held=held), (Piece(kind=Kind.THINKING, text=thought),) if thought else ()
    pieces = (Piece(kind=Kind.THINKING, text=thought),) if thought else ()
    turn = replace(turn, inside=_Inside.ANSWER, held="")
    rest = rest.lstrip("\n")
    return turn, (*pieces, Piece(kind=Kind.ANSWER, text=rest)) if rest else pieces


def _kept(text: str) -> int:
    """How many characters at the end of the text could begin the tag that closes the thinking."""
    return next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)


def _with_part(calls: tuple[Call, ...], part: Mapping[str, Any]) -> tuple[Call, ...]:
    """The calls with one more part; a server that gives no index means the last one, or with a new id the next one."""
    index, identity, function = part.get("index"), _text(part, "id"), _table(part, "function")
    if not isinstance(index, int):
        new = not calls or (identity and identity != calls[-1].id)
        index = len(calls) if new else calls[-1].index
    place = next((place for place, call in enumerate(calls) if call.index == index), len(calls))
    old = calls[place] if place < len(calls) else Call(index=index)
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):  # some servers send them parsed
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = replace(
        old,
        id=identity or old.id,
        name=old.name or _text(function, "name"),  # it comes whole; some servers repeat it in each part
        arguments=old.arguments + sendable(arguments),
    )
    return (*calls[:place], call, *calls[place + 1 :])
