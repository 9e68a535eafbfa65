"""What a hub can do wrong, as values, and choosers that decide which request meets which fault."""

import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Kind(StrEnum):
    """One way to answer a file request wrongly."""

    CUT = "cut"  # the declared length, but the connection ends early
    RESET = "reset"  # the same, with a TCP reset
    STALL = "stall"  # some bytes, then silence on an open connection
    SHORT = "short"  # fewer bytes than asked for, with a length that says so
    LONG = "long"  # more bytes than asked for, with a length that says so
    WRONG_LENGTH = "wrong-length"  # Content-Length promises more than ever comes
    IGNORE_RANGE = "ignore-range"  # 200 and the whole file
    MOVED_RANGE = "moved-range"  # 206 with the bytes and Content-Range of another place
    GARBAGE = "garbage"  # the right number of wrong bytes
    TOO_MANY = "429"
    ERROR = "500"
    UNAVAILABLE = "503"
    EXPIRED = "expired"  # 403, as a signed address answers after its time
    HTML = "html"  # 200 with a web page, as a captive portal answers


REFUSALS = (Kind.TOO_MANY, Kind.ERROR, Kind.UNAVAILABLE, Kind.HTML)
"""Those that the hub itself can answer instead of a redirect."""

TRANSIENT = tuple(kind for kind in Kind if kind is not Kind.GARBAGE)
"""Everything a client can see is wrong without a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it reached the hub (``host`` "hub") or the store it redirects to (``host`` "cdn").

    ``body``: the answer would hold the bytes of ``file``, not a redirect to them.
    """

    host: str
    method: str
    path: str
    query: str = ""
    range: tuple[int, int | None] | None = None
    if_range: str | None = None
    authorization: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    file: str | None = None
    body: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``after_bytes`` of the body are sent before the fault; ``seconds``: length of a stall, or Retry-After."""

    kind: Kind
    after_bytes: int = 0
    seconds: float = 0.0


Faults: TypeAlias = Callable[[Request], Fault | None]


def none(_request: Request) -> Fault | None:
    """A hub that works."""
    return None


def by_seed(
    seed: int,
    *,
    rate: float = 0.3,
    kinds: Collection[Kind] = TRANSIENT,
    stall_seconds: float = 30.0,
    per_place: int = 3,
) -> Faults:
    """Faults drawn from ``seed`` and the request alone, so that threads can't reorder them.

    The n-th request for the same file and range start draws anew, and after ``per_place`` requests it is answered
    well: a client that keeps trying gets through.
    """
    seen: dict[tuple[str, str, int], int] = {}
    lock = threading.Lock()
    at_body = sorted(kinds)
    at_hub = sorted(set(kinds) & set(REFUSALS))

    def choose(request: Request) -> Fault | None:
        if request.file is None or request.method != "GET":
            return None
        start = request.range[0] if request.range else 0
        key = (request.host, request.file, start)
        with lock:
            nth = seen[key] = seen.get(key, 0) + 1
        # A string seed is hashed the same way in every process.
        draw = random.Random(f"{seed} {key} {nth}")
        if nth > per_place or draw.random() >= rate:
            return None
        if not (choices := at_body if request.body else at_hub):
            return None
        kind = draw.choice(choices)
        size = (request.range[1] or start) - start if request.range else 1 << 16
        seconds = stall_seconds if kind is Kind.STALL else 0.0
        return Fault(kind=kind, after_bytes=draw.randrange(max(1, size)), seconds=seconds)

    return choose


def first(*faults: Fault, file: str | None = None) -> Faults:
    """The first GETs of a file's bytes (of any file, or of names that end in ``file``) meet these faults in turn."""
    left: Sequence[Fault] = faults
    lock = threading.Lock()

    def choose(request: Request) -> Fault | None:
        nonlocal left
        if not _wanted(request, file):
            return None
        with lock:
            if not left:
                return None
            fault, left = left[0], left[1:]
            return fault

    return choose


def always(fault: Fault, *, file: str | None = None) -> Faults:
    """Every GET of a file's bytes meets this fault."""

    def choose(request: Request) -> Fault | None:
        return fault if _wanted(request, file) else None

    return choose


def _wanted(request: Request, file: str | None) -> bool:
    return request.body and request.method == "GET" and (request.file or "").endswith(file or "")
