"""What a loading engine's process has done so far: the only honest clock of a load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kimigguf.units import MIB

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
