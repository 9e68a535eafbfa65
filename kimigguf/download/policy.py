"""How a fetch behaves: sizes, numbers and patience, in one place, so that tests can turn every one of them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """``connections``: requests in flight at once, over ``shards`` files.

    ``part_bytes`` is what one request asks for; ``mark_bytes`` after how many of them the journal is told, so that
    a kill costs at most ``mark_bytes`` per connection. ``sync_bytes``: how much of a file may be ahead of the disk.
    ``stall_seconds``: no byte for so long ends an attempt. ``patience_seconds``: no byte of a part for so long ends
    the download. ``hash_retries``: how often a whole file is fetched again when its hash is wrong.
    """

    connections: int = 8
    shards: int = 2
    part_bytes: int = 64 * MIB
    mark_bytes: int = 4 * MIB
    sync_bytes: int = 512 * MIB
    sync_seconds: float = 20.0
    stall_seconds: float = 30.0
    patience_seconds: float = 900.0
    backoff_seconds: float = 0.5
    backoff_max_seconds: float = 30.0
    hash_retries: int = 1
    bytes_per_second: int | None = None

    @property
    def mark(self) -> int:
        """``mark_bytes``, less where many connections share a file: 32 MiB per kill and file at most."""
        return max(1, min(self.mark_bytes, 32 * MIB // max(1, self.connections)))


class Pace:
    """Shared by all workers: a rate limit, and how many may ask at once after the hub has complained."""

    def __init__(self, policy: Policy, stopped: Callable[[], bool]) -> None:
        self._rate = policy.bytes_per_second
        self._most = self._allowed = policy.connections
        self._stopped = stopped
        self._running = 0
        self._paused_until = 0.0
        self._next = time.monotonic()
        self._turn = threading.Condition()

    def enter(self) -> bool:
        """Wait for a turn; False if the transfer has been stopped meanwhile."""
        with self._turn:
            while not self._stopped():
                wait = self._paused_until - time.monotonic()
                if wait <= 0 and self._running < self._allowed:
                    self._running += 1
                    return True
                self._turn.wait(min(max(wait, 0.01), 0.2))
            return False

    def leave(self, *, well: bool) -> None:
        """The turn is over; ``well`` lets one more in than before, up to the number of connections."""
        with self._turn:
            self._running -= 1
            if well:
                self._allowed = min(self._most, self._allowed + 1)
            self._turn.notify_all()

    def complain(self, wait_seconds: float) -> None:
        """The hub has too much to do: half as many from now on, and none before ``wait_seconds`` have passed."""
        with self._turn:
            self._allowed = max(1, self._allowed // 2)
            self._paused_until = max(self._paused_until, time.monotonic() + wait_seconds)

    def spend(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more are within the rate limit."""
        if self._rate is None:
            return
        with self._turn:
            now = time.monotonic()
            self._next = max(self._next, now - 0.1) + size_bytes / self._rate
            wait = self._next - now
        until = now + wait
        while not self._stopped() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
