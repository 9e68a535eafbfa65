"""Whether and when a dead engine is started again. Pure: the clock is read by whoever asks."""

from typing import Final

STEADY_SECONDS: Final = 600.0
"""How long a server must have been ready for its death to be a first one again."""
_FIRST_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 60.0


class Restarts:
    """Counts the deaths in a row. At most ``at_most`` are forgiven, each after twice the wait of the one before.

    A row ends when a server was ready for ``steady_seconds``. No clock besides ends it: a load alone can take longer
    than any window of time, and what dies at the end of each would be started again for ever. A deterministic failure
    is never retried: a model that did not fit will not fit.
    """

    def __init__(self, *, at_most: int = 5, steady_seconds: float = STEADY_SECONDS) -> None:
        self._at_most = at_most
        self._steady_seconds = steady_seconds
        self._in_a_row = 0

    def seconds_before_next(self, *, ready_seconds: float, may_pass: bool) -> float | None:
        """How long to wait before the next start; None: do not start again.

        Args:
            ready_seconds: For how long the server that died had been ready; 0 if it never was.
            may_pass: Whether another try could succeed.
        """
        if ready_seconds >= self._steady_seconds:
            self._in_a_row = 0
        if not may_pass or self._in_a_row >= self._at_most:
            return None
        seconds = min(_FIRST_SECONDS * 2**self._in_a_row, _LONGEST_SECONDS)
        self._in_a_row += 1
        return float(seconds)
