"""What a server's process holds in main memory, and what has made it grow since it was ready.

Context checkpoints and the prompt cache grow while a server runs, and no memory report shows them; llama.cpp's log
does (log level 4, builds 11434 and 11549).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.hardware.host import Host
from kimigguf.memory.ledger import Component, Ledger
from kimigguf.units import KIB, MIB

_WINDOW_BYTES: Final = 64 << 20
"""Of the log's end, which tells what is held now: some ten thousand requests."""
_CHUNK_BYTES: Final = 1 << 20
_LAUNCHED: Final = b"| processing task, is_child = 0"
_RELEASED: Final = b"| stop processing: n_tokens = "
_SLOT_EVENT: Final = re.compile(
    rb"id +(\d{1,4}) \| task -?\d+ \| (?:(created) context checkpoint (\d{1,6}) of \d+|"
    rb"(erased|erasing)[a-z ]* context checkpoint|(clearing) prompt)([^\n]*)"
)
_SIZE: Final = re.compile(rb"size = ([\d.]{1,12}) MiB")
_CACHE_STATE: Final = re.compile(rb"cache state: \d+ prompts, ([\d.]{1,12}) MiB")
_CHECKPOINTS_ON: Final = re.compile(rb"context checkpoints (?:enabled|disabled)")
_CACHE_ON: Final = re.compile(rb"prompt cache is (?:enabled|disabled)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes and counts that the log tells; None where it does not.

    ``requests`` were begun, ``finished`` have ended, the self-test's among them.
    """

    checkpoint_bytes: int | None = None
    prompt_cache_bytes: int | None = None
    requests: int | None = None
    finished: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A process's main memory in bytes: ``anonymous`` is its own, ``file`` is mapped files, which can be dropped."""

    anonymous_bytes: int
    file_bytes: int
    swapped_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """What it has taken for itself, wherever that lies now."""
        return self.anonymous_bytes + self.swapped_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How it stood when the server was ready, its self-test done: what came later is growth."""

    resident: Resident | None
    held: Held
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What has been added since the baseline, in bytes; each None where it is not known.

    ``unexplained`` is what is left of the total: buffers touched for the first time, the allocator's leftovers, leaks.
    """

    total_bytes: int | None
    checkpoint_bytes: int | None
    prompt_cache_bytes: int | None
    unexplained_bytes: int | None


def growth(before: Baseline | None, resident: Resident | None, held: Held) -> Growth:
    """The growth since ``before`` by its causes. Unknown stays unknown: no cause is guessed from the others."""
    was = before or Baseline(resident=None, held=Held())
    own = None if resident is None else resident.own_bytes
    total = _less(own, None if was.resident is None else was.resident.own_bytes)
    checkpoints = _less(held.checkpoint_bytes, was.held.checkpoint_bytes)
    cache = _less(held.prompt_cache_bytes, was.held.prompt_cache_bytes)
    unexplained = None
    if total is not None and checkpoints is not None and cache is not None:
        unexplained = total - checkpoints - cache
    return Growth(
        total_bytes=total, checkpoint_bytes=checkpoints, prompt_cache_bytes=cache, unexplained_bytes=unexplained
    )


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def planned(ledger: Ledger, component: Component) -> int | None:
    """What the plan allows for a component on the host, in bytes; 0 if it plans none, None for no limit."""
    rows = [row.size_bytes for row in ledger.rows if row.component is component and row.device is None]
    known = [size for size in rows if size is not None]
    return sum(known) if len(known) == len(rows) else None


def parse_resident(text: str | None) -> Resident | None:
    """The parts of a process's memory in its /proc/PID/status; None where the kernel does not tell them apart.

    Not smaps_rollup: that walks every page, which takes seconds where half a terabyte is mapped, and holds the
    process up meanwhile.
    """
    sizes = {m[1]: int(m[2]) * KIB for m in re.finditer(r"^(\w+):\s+(\d{1,18}) kB$", text or "", re.MULTILINE)}
    if "RssAnon" not in sizes or "RssFile" not in sizes:
        return None
    return Resident(
        anonymous_bytes=sizes["RssAnon"] + sizes.get("RssShmem", 0),
        file_bytes=sizes["RssFile"],
        swapped_bytes=sizes.get("VmSwap", 0),
    )


def read_resident(pid: int, host: Host | None = None) -> Resident | None:
    """What process ``pid`` holds now; None where it is gone or this system does not tell."""
    return parse_resident((host or Host()).text(f"proc/{pid}/status"))


def parse_held(log: bytes, *, whole: bool = True) -> Held:
    """What the engine's log says that it holds. ``whole``: ``log`` begins where the engine did.

    Nothing said is nothing held only where the log shows that the engine would have said it.
    """
    states = _CACHE_STATE.findall(log)
    cache = round(float(states[-1]) * MIB) if states else None
    if cache is None and whole and _CACHE_ON.search(log):
        cache = 0
    tells = _LAUNCHED in log or _CACHE_ON.search(log)
    slots = _slots(log)
    checkpoints = round(sum(slots.values()) * MIB) if slots else None
    if checkpoints is None and whole and _CHECKPOINTS_ON.search(log):
        checkpoints = 0
    return Held(
        checkpoint_bytes=checkpoints,
        prompt_cache_bytes=cache,
        requests=log.count(_LAUNCHED) if whole and tells else None,
        finished=log.count(_RELEASED) if whole and tells else None,
    )


def _slots(log: bytes) -> dict[int, float]:
    """MiB of checkpoints by slot. All of a slot's are of one size: K3's state is as large whatever the context."""
    held: dict[int, float] = {}
    for event in _SLOT_EVENT.finditer(log):
        slot, size = int(event[1]), _SIZE.search(event[6])
        mebibytes = float(size[1]) if size else 0.0
        if event[2]:
            held[slot] = int(event[3]) * mebibytes
        elif event[4]:
            held[slot] = max(0.0, held.get(slot, 0.0) - mebibytes)
        else:
            held[slot] = 0.0
    return held


def read_held(log: Path) -> Held:
    """What the log file says: its end for what is held, all of it for the counts; unknown where it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _WINDOW_BYTES))
            held = parse_held(file.read(), whole=size <= _WINDOW_BYTES)
            if size <= _WINDOW_BYTES:
                return held
            file.seek(0)
            begun, ended = _counts(iter(lambda: file.read(_CHUNK_BYTES), b""))
    except OSError:
        return Held()
    return Held(
        checkpoint_bytes=held.checkpoint_bytes,
        prompt_cache_bytes=held.prompt_cache_bytes,
        requests=begun,
        finished=ended,
    )


def _counts(chunks: Iterator[bytes]) -> tuple[int, int]:
    """How often both words stand in a log that comes in pieces."""
    begun = ended = 0
    rest = b""
    for chunk in chunks:
        lines, _, rest = (rest + chunk).rpartition(b"\n")
        begun += lines.count(_LAUNCHED)
        ended += lines.count(_RELEASED)
    return begun, ended
