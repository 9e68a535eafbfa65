"""What a loading engine's process has done so far: the only honest clock of a load."""

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A reading. Two equal ones mean that nothing advanced between them. None where the system does not tell.

    ``loaded_bytes`` is the larger of what the process read from disk and what of its files is resident: a memory map
    shows in the second, reads into buffers in the first.
    """

    loaded_bytes: int | None
    processor_seconds: float | None
    log_bytes: int | None


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
        read = process.io_counters().read_chars if hasattr(process, "io_counters") else 0
    except psutil.Error:
        return Activity(loaded_bytes=None, processor_seconds=None, log_bytes=log_bytes)
    return Activity(
        loaded_bytes=max(read, resident),
        processor_seconds=round(times.user + times.system, 1),
        log_bytes=log_bytes,
    )
