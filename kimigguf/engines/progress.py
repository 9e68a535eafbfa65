"""What a loading engine's process has done so far: the only honest clock of a load."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kimigguf.events import Advance, Listener, Notice
from kimigguf.units import MIB, duration

_BYTES_THAT_COUNT: Final = MIB
_SHARE_THAT_COUNTS: Final = 0.2
_SECONDS_THAT_COUNT: Final = 0.2
"""Processor time below a fifth of one core is what answering /health costs, which we ask for ourselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A reading, in totals since the process began. None where the system does not tell.

    A memory-mapped load shows in ``resident_bytes``, one that reads into buffers in ``read_bytes``.
    """

    read_bytes: int | None
    resident_bytes: int | None
    processor_seconds: float | None
    log_bytes: int | None

    @property
    def loaded_bytes(self) -> int:
        """The most that can be said to have been loaded."""
        return max(self.read_bytes or 0, self.resident_bytes or 0)


def advanced(before: Activity, after: Activity, seconds: float) -> bool:
    """Whether a load has come further between two readings that lie ``seconds`` apart.

    A log line, a MiB read, mapped or given back, or real work on a processor; not the little that our own questions
    cost.
    """
    if before.log_bytes != after.log_bytes:
        return True
    moved = (
        abs((after.read_bytes or 0) - (before.read_bytes or 0)),
        abs((after.resident_bytes or 0) - (before.resident_bytes or 0)),
    )
    if max(moved) >= _BYTES_THAT_COUNT:
        return True
    worked = (after.processor_seconds or 0.0) - (before.processor_seconds or 0.0)
    return worked >= max(_SHARE_THAT_COUNTS * seconds, _SECONDS_THAT_COUNT)


def read_activity(pid: int, log: Path) -> Activity:
    """What process ``pid`` has done so far; unknowns where it is gone or may not be asked."""
    try:
        log_bytes = log.stat().st_size
    except OSError:
        log_bytes = None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            resident = process.memory_info().rss
        read = process.io_counters().read_chars if hasattr(process, "io_counters") else None
    except psutil.Error:
        return Activity(read_bytes=None, resident_bytes=None, processor_seconds=None, log_bytes=log_bytes)
    return Activity(
        read_bytes=read,
        resident_bytes=resident,
        processor_seconds=times.user + times.system,
        log_bytes=log_bytes,
    )


class LoadWatch:
    """Turns what the engine's process does into progress, and names a stall once per ``stall_seconds``."""

    def __init__(self, *, total_bytes: int, stall_seconds: float, listen: Listener) -> None:
        self._total = total_bytes
        self._stall = stall_seconds
        self._listen = listen
        self._last: Activity | None = None
        self._changed = time.monotonic()
        self._shown = 0

    def look(self, activity: Activity, tail: Callable[[], str]) -> None:
        now = time.monotonic()
        if self._last is None or advanced(self._last, activity, now - self._changed):
            self._last, self._changed = activity, now
        elif now - self._changed >= self._stall:
            self._last, self._changed = activity, now
            lines = tail().splitlines()
            self._listen(
                Notice(
                    text=f"nothing has advanced for {duration(self._stall)}; "
                    f"the engine's last words: {lines[-1].strip() if lines else 'none'}"
                )
            )
        done = min(activity.loaded_bytes, self._total)
        if done > self._shown:
            self._shown = done
            self._listen(Advance(activity="load", item="model", done_bytes=done, total_bytes=self._total))

    def finish(self) -> None:
        if self._shown < self._total:
            self._listen(Advance(activity="load", item="model", done_bytes=self._total, total_bytes=self._total))
