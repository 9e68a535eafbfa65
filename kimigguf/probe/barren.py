"""Why a metric has nothing to lose: the reference itself shows nothing that a candidate could fall short of. Pure."""

from enum import StrEnum
from typing import Final

RIGHT: Final = "right answers"
SAME_ANSWER: Final = "same answer as the reference"
ANSWERED: Final = "answered at all"


class Reason(StrEnum):
    """What is wrong with the reference, or with what came back. "Never" is: not more often than the tolerance."""

    NOTHING_COMPARED = "nothing-compared"
    NEVER_RIGHT = "never-right"
    NEVER_THE_SAME_TWICE = "never-the-same-twice"
    NEVER_ANSWERED = "never-answered"


_OF: Final = {
    RIGHT: Reason.NEVER_RIGHT,
    SAME_ANSWER: Reason.NEVER_THE_SAME_TWICE,
    ANSWERED: Reason.NEVER_ANSWERED,
}


def barren(metric: str, *, items: int, reference: float | None, tolerance: float) -> Reason | None:
    """Why no candidate could fail at ``metric``, whose reference shows ``reference``; None where one could.

    A candidate that says anything at all would be "the same" as a reference that is hardly ever right.
    """
    if items == 0:
        return Reason.NOTHING_COMPARED
    return _OF[metric] if (reference or 0.0) <= tolerance else None


def in_words(reason: Reason, reference: float | None) -> str:
    """What it is, for a reader."""
    never = "hardly ever" if reference else "never"
    match reason:
        case Reason.NOTHING_COMPARED:
            return "there is no question that both gave an answer to, the reference twice"
        case Reason.NEVER_RIGHT:
            return f"the reference is {never} right here"
        case Reason.NEVER_THE_SAME_TWICE:
            return f"the reference {never} says the same twice"
        case Reason.NEVER_ANSWERED:
            return f"the reference {never} answers"


def way_out(reason: Reason, temperature: float | None) -> str:
    """What to do about it; ``temperature`` is what was sent, None where each side had its own."""
    match reason:
        case Reason.NOTHING_COMPARED | Reason.NEVER_ANSWERED:
            return "the finish reasons and transport errors say why"
        case Reason.NEVER_RIGHT:
            return "these questions are too hard for it, or --max-tokens is too small"
        case Reason.NEVER_THE_SAME_TWICE if temperature == 0:
            return "at temperature 0 too, so only questions with a check can tell"
        case Reason.NEVER_THE_SAME_TWICE:
            return "--temperature 0, where it takes one"
