"""What was looked at before a registration, and what it showed: unknown is an answer."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The outcome of one look."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Blame(StrEnum):
    """Whose a failed check is; it decides the exit code."""

    REQUEST = "request"
    MACHINE = "machine"
    NETWORK = "network"
    FILES = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One look: ``what`` in two or three words, the ``evidence`` in one sentence.

    ``code``, ``hint``, ``blame`` and ``cause`` matter where ``blocks`` is true: nothing is written then.
    """

    what: str
    state: State
    evidence: str
    blocks: bool = False
    code: str = ""
    hint: str | None = None
    blame: Blame = Blame.MACHINE
    cause: str | None = None


def passed(what: str, evidence: str) -> Check:
    return Check(what=what, state=State.PASSED, evidence=evidence)


def unknown(what: str, evidence: str, hint: str | None = None) -> Check:
    """Something that could not be told and stops nothing."""
    return Check(what=what, state=State.UNKNOWN, evidence=evidence, hint=hint)


def blocked(
    what: str, evidence: str, *, code: str, hint: str, blame: Blame = Blame.MACHINE, state: State = State.FAILED
) -> Check:
    """Something that stops the registration before anything is written."""
    return Check(what=what, state=state, evidence=evidence, blocks=True, code=code, hint=hint, blame=blame)
