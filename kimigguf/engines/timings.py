"""What a server's log shows of its requests' times: a slow first one, and answers that a limit cut short. Pure."""

import re
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Final

from kimigguf.units import GIB, MIB

_GENERATED: Final = re.compile(r"(?<!prompt )eval time =\s*([\d.]{1,15}) ms /\s*(\d{1,9}) (?:tokens|runs)")
"""llama.cpp's line after each request (b10434 to b11549); the line of the prompt has another word before it."""
_TIMES_SLOWER: Final = 5.0
"""Weights that come from the disk make such a difference, as RAM reads 10 to 50 times faster; so do other programs."""
_SLOW_SECONDS: Final = 5.0
_FEW: Final = 3
_LEAST_TOKENS: Final = 16
_SLOWEST_DISK_BYTES_PER_SECOND: Final = 25e6
"""What a hard disk or a network mount gives at worst, pages being read ahead."""
_FILE_SIZE: Final = re.compile(r"print_info: file size += ([\d.]{1,12}) ([MG])iB\b")
"""llama.cpp's line about the model's weights (b10434 to b11549)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's generated tokens and the seconds that they took."""

    tokens: int
    seconds: float


def generations(log: str) -> tuple[Generation, ...]:
    """Every request whose times the log tells, in the order in which they ended."""
    return tuple(Generation(tokens=int(tokens), seconds=float(ms) / 1000) for ms, tokens in _GENERATED.findall(log))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """Seconds that a token of the first request took and ``usual`` ones take, and seconds that were lost in all."""

    first_seconds: float
    usual_seconds: float
    lost_seconds: float

    def __str__(self) -> str:
        return f"{self.first_seconds:.2f} s a token at first, {self.usual_seconds:.2f} s later"

    def may_be_disk(self, weight_bytes: int | None) -> bool:
        """Whether reading weights of that size once can take as long; None: their size is unknown."""
        return weight_bytes is None or weight_bytes >= self.lost_seconds * _SLOWEST_DISK_BYTES_PER_SECOND


def weight_bytes(log: str) -> int | None:
    """The size of the model's weights, by its log; None where that does not say."""
    found = _FILE_SIZE.search(log)
    return None if found is None else int(float(found[1]) * (MIB if found[2] == "M" else GIB))


def slow_start(found: tuple[Generation, ...]) -> SlowStart | None:
    """How much slower the first request was than the later ones; None if it was not, or nobody can tell."""
    # The time of one token alone is the prompt's; the self-test begins with such a request.
    several = [one for one in found if one.tokens > 1]
    if len(several) <= _FEW:
        return None
    each, usual = several[0].seconds / several[0].tokens, median(one.seconds / one.tokens for one in several[1:])
    if several[0].seconds < _SLOW_SECONDS or each < _TIMES_SLOWER * usual:
        return None
    lost = several[0].seconds - several[0].tokens * usual
    return SlowStart(first_seconds=each, usual_seconds=usual, lost_seconds=lost)


def cut_off(found: tuple[Generation, ...]) -> str | None:
    """The length at which most answers end, in words; None if they end where the model ends them.

    No model ends answer after answer at the same token: a limit does, and that of a thinking model can be used up
    before the answer begins.
    """
    counts = Counter(one.tokens for one in found if one.tokens >= _LEAST_TOKENS)
    if not counts:
        return None
    longest = max(counts)
    if counts[longest] < _FEW or 2 * counts[longest] < len(found):
        return None
    return f"{counts[longest]} of {len(found)} answers end after exactly {longest:,} tokens, and none is longer"
