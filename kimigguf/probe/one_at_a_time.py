"""Keeps parties that share a machine from working at the same time; the threads of one party still do."""

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class OneAtATime:
    """Turns in the order of asking: threads of one party work side by side until another one's turn has come.

    Two engines that answer at once on the same cores are not half as fast each: their threads wait for each other by
    spinning, and both all but stand still (0.5 tokens/s in place of 146, for SmolLM2 on two cores). Nor would the
    times of either say anything about it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._party: Hashable = None
        self._working = 0

    @property
    def waiting(self) -> int:
        """How many have asked and not been let in."""
        return len(self._queue)

    @contextmanager
    def turn(self, party: Hashable) -> Iterator[None]:
        """Wait until no other party works, and none that asked before is waiting; then work."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(lambda: self._queue[0] is ticket and (not self._working or self._party == party))
            self._queue.popleft()
            self._party = party
            self._working += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()
