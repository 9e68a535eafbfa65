"""How far a long row of calls has come, in lines: with every tenth of them, and while nothing comes in."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final, TypeVar

from kimigguf.events import Listener, Step
from kimigguf.units import duration

T = TypeVar("T")
SILENCE_SECONDS: Final = 20.0
"""The longest that nothing is said: a local answer may take ten minutes, and looks like a hanging program till then."""
_LINES: Final = 10


class Pace:
    """Tells ``listen`` how many of ``total`` calls are done and how long that took."""

    def __init__(
        self, total: int, listen: Listener, *, what: str = "calls", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._listen = listen
        self._what = what
        self._clock = clock
        self._began = self._told = clock()
        self._done = 0

    @property
    def patience_seconds(self) -> float:
        """How long to wait for the next call before ``look``."""
        return max(0.0, self._told + SILENCE_SECONDS - self._clock())

    def done(self) -> None:
        """One more call has come back."""
        self._done += 1
        if self._done % max(1, self._total // _LINES) == 0 or self._done == self._total:
            self._tell()
        else:
            self.look()

    def look(self) -> None:
        """Say how it stands if nothing was said for long."""
        if self.patience_seconds == 0:
            self._tell()

    def _tell(self) -> None:
        self._told = self._clock()
        passed = duration(self._told - self._began)
        self._listen(Step(text=f"{self._done} of {self._total} {self._what}, {passed}"))


def as_completed(futures: Iterable[Future[T]], pace: Pace) -> Iterator[T]:
    """What they come to, as it comes in, told by ``pace``."""
    pending = set(futures)
    while pending:
        ready, pending = wait(pending, timeout=pace.patience_seconds, return_when=FIRST_COMPLETED)
        if not ready:
            pace.look()
        for future in ready:
            yield future.result()
            pace.done()
