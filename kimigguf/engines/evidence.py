"""A check and what it showed: unknown is an answer."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``what`` in two or three words, the ``evidence`` in one sentence; a ``hint`` where something can be done.

    ``blocks``: a failure of it stops the start.
    """

    what: str
    state: State
    evidence: str
    hint: str | None = None
    blocks: bool = False
