"""Whether memory runs short under a running server, said before the kernel kills it or makes it crawl. Pure."""

from typing import Final

from kimigguf.engines.evidence import Check, State
from kimigguf.hardware.pressure import MemoryPressure, Room, Stall
from kimigguf.units import GIB, memory

STALLED_PER_MINUTE: Final = 10.0
"""Per cent of a minute: a tenth of the server's time is gone, which its user sees in tokens/s; a machine whose memory
suffices shows 0."""
STALLED_PER_TEN_SECONDS: Final = 30.0
"""Half of what systemd-oomd kills a group at (DefaultMemoryPressureLimit=60% for 30 s, oomd.conf(5)); it is the first
to show a sudden fall."""
LOW_BYTES: Final = 2 * GIB
"""What one long request of Kimi K3 may still add: a context checkpoint (443 MiB), the same state and its KV cache in
the prompt cache, and compute buffers touched for the first time."""
_LOW_SHARE: Final = 0.1
"""In small pools ``LOW_BYTES`` would be always: there it is a tenth."""
_AGAIN_SECONDS: Final = 600.0
_CALM_SECONDS: Final = 60.0
"""What comes and goes within a minute is told once."""


def check_pressure(reading: MemoryPressure, *, throttled_before: int | None = None, streamed_bytes: int = 0) -> Check:
    """FAILED where memory runs short, with the figures that show it.

    Args:
        reading: How it stands now.
        throttled_before: ``reading.throttled`` at an earlier moment; what was added since counts.
        streamed_bytes: Weights that the plan left to be read from disk again and again: then stalls are its price.
    """
    stalled, stall_words = _stall(reading.stall)
    low = [room for room in reading.rooms if room.left_bytes < min(LOW_BYTES, _LOW_SHARE * room.total_bytes)]
    added = (reading.throttled or 0) - throttled_before if throttled_before is not None else 0
    throttled = [f"the kernel held it back {added:,} times at its memory.high"] if added > 0 else []
    rooms = [f"{room.name} has {memory(room.left_bytes)} left" for room in _shown(reading.rooms, low)]
    evidence = ", ".join((stall_words, *rooms, *throttled))
    if reading.stall is None and not reading.rooms:
        return Check(what="memory", state=State.UNKNOWN, evidence="this system tells neither stalls nor what is left")
    if low or throttled or stalled:
        planned = stalled and not low and not throttled and streamed_bytes > 0
        hint = (
            f"{memory(streamed_bytes)} of the weights stream from disk, as planned: a smaller quant would not"
            if planned
            else "end what else uses memory, or serve with a smaller --context, fewer --slots or a smaller quant"
        )
        return Check(what="memory", state=State.FAILED, evidence=evidence, hint=hint)
    return Check(what="memory", state=State.PASSED, evidence=evidence)


def _stall(stall: Stall | None) -> tuple[bool, str]:
    """Whether too much time is lost, and the figure that shows most."""
    if stall is None:
        return False, "stalls unknown (this kernel keeps no /proc/pressure)"
    if stall.of_10_seconds >= STALLED_PER_TEN_SECONDS > stall.of_60_seconds:
        return True, f"{stall.of_10_seconds:.0f} % of the last 10 s stalled"
    return stall.of_60_seconds >= STALLED_PER_MINUTE, f"{stall.of_60_seconds:.0f} % of the last 60 s stalled"


def _shown(rooms: tuple[Room, ...], low: list[Room]) -> list[Room]:
    """Those that run low, else the one with the least left: it decides."""
    return low or sorted(rooms, key=lambda room: room.left_bytes)[:1]


class PressureWatch:
    """Says when memory begins to run short, again while it lasts, and when that is over. The clock is the caller's."""

    def __init__(self, *, streamed_bytes: int = 0) -> None:
        self._streamed_bytes = streamed_bytes
        self._throttled: int | None = None
        self._said: float | None = None

    def look(self, reading: MemoryPressure, now: float) -> str | None:
        """The sentence to say at second ``now``; None where there is nothing new."""
        check = check_pressure(reading, throttled_before=self._throttled, streamed_bytes=self._streamed_bytes)
        self._throttled = reading.throttled
        if check.state is State.FAILED:
            if self._said is not None and now - self._said < _AGAIN_SECONDS:
                return None
            self._said = now
            return f"memory pressure: {check.evidence}; {check.hint}"
        if check.state is State.PASSED and self._said is not None and now - self._said >= _CALM_SECONDS:
            self._said = None
            return f"memory pressure is over: {check.evidence}"
        return None
