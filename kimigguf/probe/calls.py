"""What became of one question to one endpoint: a reply, or a fault that is nobody's wrong answer. Types only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class Arm(StrEnum):
    """Who is asked. The reference is asked twice: what it differs from itself is the noise floor."""

    CANDIDATE = "candidate"
    REFERENCE = "reference"
    REFERENCE_AGAIN = "reference-again"


class Shape(StrEnum):
    """What a reply looks like, before anybody asks whether it is right."""

    ANSWERED = "answered"
    EMPTY = "empty"
    """It came to its end and holds no content."""
    CALLED_TOOL = "called-tool"
    """No content, but tool calls: nothing was wrong, but nothing can be checked."""
    CUT_OFF = "cut-off"
    """The token budget ended within the answer."""
    CUT_OFF_THINKING = "cut-off-thinking"
    """The token budget ended before the answer began: too small a budget, never a wrong answer."""
    FILTERED = "filtered"
    """The endpoint's own content filter stepped in."""


class FaultKind(StrEnum):
    """Why there is no reply."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    CUT_STREAM = "cut-stream"
    RATE_LIMIT = "rate-limit"
    SERVER = "server-error"
    KEY = "key-refused"
    REQUEST = "request-refused"
    NONSENSE = "not-the-protocol"
    BUDGET = "budget-spent"
    """It was not sent: it might have cost more than what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCall:
    """A tool call as the model made it; ``arguments`` is the text that should be JSON, ``id`` the endpoint's name."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of running a reply's code. ``passed`` None: it was not run; ``why`` says what happened instead."""

    passed: bool | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a try took whose answer was thrown away, such as one that was cut off while thinking."""

    seconds: float
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One HTTP request: when it began (UTC, ISO 8601) and its body, without headers and so without the key.

    The messages of a long body are replaced by the item's id and their SHA-256: see ``sent.brief``.
    """

    began: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply. Times are seconds from sending the request; token counts the endpoint's, None if it gives none.

    ``tested`` is for questions whose answer is code, written down with the reply so that a report never runs anything.
    ``turns`` is how often the model was asked: more than once where it called tools and was given their results; the
    calls and token counts are then those of all turns. ``thinking_tokens`` is the endpoint's own count; ``earlier``,
    what was spent before on answers that were thrown away. ``requests`` are all that were sent for it, in order, failed
    tries and earlier turns too; none in the record of an older version.
    """

    content: str
    thinking: str
    finish_reason: str | None
    tool_calls: int
    prompt_tokens: int | None
    completion_tokens: int | None
    first_token_seconds: float | None
    seconds: float
    max_tokens: int | None
    calls: tuple[MadeCall, ...] = ()
    tested: Trial | None = None
    turns: int = 1
    thinking_tokens: int | None = None
    earlier: tuple[Spent, ...] = ()
    requests: tuple[Sent, ...] = field(default=(), compare=False)

    @property
    def spent(self) -> tuple[Spent, ...]:
        """What this reply took, and what was thrown away before it."""
        own = Spent(
            seconds=self.seconds, prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens
        )  # fmt: skip
        return (*self.earlier, own)

    @property
    def shape(self) -> Shape:
        """Judged by content and finish reason together: each alone misleads."""
        if self.finish_reason == "content_filter":
            return Shape.FILTERED
        if self.finish_reason == "length":
            return Shape.CUT_OFF if self.content.strip() else Shape.CUT_OFF_THINKING
        if self.content.strip():
            return Shape.ANSWERED
        return Shape.CALLED_TOOL if self.tool_calls else Shape.EMPTY

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding rate after the first token; None where it cannot be told."""
        if self.completion_tokens is None or self.first_token_seconds is None or self.completion_tokens < 2:  # noqa: PLR2004 -- one token has no rate
            return None
        span = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / span if span > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """No reply, after ``tries`` tries. ``status`` is the HTTP status, None where there was none."""

    kind: FaultKind
    status: int | None
    text: str
    tries: int


Outcome: TypeAlias = Reply | Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One question asked of one arm. ``repeat`` counts from 0."""

    arm: Arm
    item: str
    repeat: int
    outcome: Outcome
