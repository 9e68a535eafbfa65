"""Progress as values: rooms that take long yield these to a callback; only ``cli`` draws them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is being done now, in words: ``listing unsloth/Kimi-K3-GGUF``, ``hashing``, ``loading``."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """How far one item has come. ``item`` is a shard's name or ``total``; ``activity`` a verb (``fetch``, ``hash``)."""

    activity: str
    item: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a user should know that is no failure."""

    text: str


Event: TypeAlias = Step | Advance | Notice
Listener: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """A listener for when nobody watches."""
