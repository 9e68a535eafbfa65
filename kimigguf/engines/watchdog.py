"""Whether and when a dead engine is started again. Pure: the clock comes from outside."""

from typing import Final

_FIRST_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 60.0


class Restarts:
    """Counts restarts. At most ``at_most`` within ``within_seconds``, each after twice the wait of the one before.

    A deterministic failure is never retried: a model that did not fit will not fit.
    """

    def __init__(self, *, at_most: int = 5, within_seconds: float = 600.0) -> None:
        self._at_most = at_most
        self._within = within_seconds
        self._times: list[float] = []

    def seconds_before_next(self, now: float, *, may_pass: bool) -> float | None:
        """How long to wait before the next start; None: do not start again. ``now`` is any steady clock's seconds."""
        self._times = [time for time in self._times if now - time < self._within]
        if not may_pass or len(self._times) >= self._at_most:
            return None
        seconds = min(_FIRST_SECONDS * 2 ** len(self._times), _LONGEST_SECONDS)
        self._times.append(now)
        return float(seconds)
