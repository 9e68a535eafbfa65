"""One file on its way: the ``.part``, its journal, what is missing of it, and the hash that follows the bytes."""

import contextlib
import hashlib
import os
import threading
from collections import deque
from enum import Enum, auto
from pathlib import Path
from typing import Final

from kimigguf.download.journal import Journal
from kimigguf.download.manifest import sync_folder, write_whole
from kimigguf.download.parts import Source, Tag
from kimigguf.download.policy import Policy
from kimigguf.download.ranges import Ranges
from kimigguf.download.store import INNER, PART

HASH_CHUNK_BYTES: Final = 64 << 20
_READ_BYTES: Final = 1 << 20


class Verdict(Enum):
    """How the hashing of a shard ended."""

    RIGHT = auto()
    WRONG = auto()
    STOPPED = auto()


class Shard:
    """Opened once its turn has come, closed by ``close``. Workers write, one hasher reads, one thread syncs."""

    def __init__(self, source: Source, folder: Path, policy: Policy) -> None:
        self.source = source
        self.path = folder / source.name
        self.part_path = folder / (source.name + PART)
        self._inner = folder / INNER
        self._policy = policy
        self.tag = Tag()
        self.changed = threading.Condition()
        """Guards ranges, parts and counters; told when bytes arrive."""
        self._syncing = threading.Lock()
        """Held while the disk is waited for, so that the file is not closed or begun anew meanwhile."""
        self.parts: deque[tuple[int, int]] = deque()
        self.in_flight = 0
        self.hashed_bytes = 0
        self.done = False
        self.ranges = Ranges()
        self._unsynced = Ranges()
        self._file = -1
        self._journal: Journal | None = None

    @property
    def journal_path(self) -> Path:
        return self._inner / f"{self.source.name}.journal"

    def open(self) -> None:
        """Open the part and its journal, and work out what is missing.

        Raises:
            OSError: The disk refuses.
        """
        size = self.source.size_bytes
        self._inner.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.part_path, flags, 0o644)
        self._journal = Journal(self.journal_path, size_bytes=size, sha256=self.source.sha256)
        # A part that is shorter than its journal says has been tampered with: what lies behind its end is not there.
        self.ranges = self._journal.ranges.clipped(os.fstat(self._file).st_size)
        if os.fstat(self._file).st_size > size:
            os.ftruncate(self._file, size)
        self._plan()

    def _plan(self) -> None:
        self.parts = deque(self.ranges.gaps(self.source.size_bytes, self._policy.part_bytes))

    @property
    def done_bytes(self) -> int:
        return self.source.size_bytes if self.done else self.ranges.total_bytes

    def write(self, piece: bytes, at: int) -> None:
        """Write all of ``piece``.

        Raises:
            OSError: The disk refuses.
        """
        view = memoryview(piece)
        while view:
            count = os.pwrite(self._file, view, at)
            view, at = view[count:], at + count

    def mark(self, start: int, end: int) -> None:
        """Record that these bytes are written.

        Raises:
            OSError: The disk refuses.
        """
        if start == end or self._journal is None:
            return
        with self.changed:
            self._journal.written(start, end)
            self.ranges.add(start, end)
            self._unsynced.add(start, end)
            self.changed.notify_all()

    def sync(self, *, at_least_bytes: int = 1) -> None:
        """Sync what is written to the disk, then record that it is.

        Raises:
            OSError: The disk refuses.
        """
        with self._syncing:
            with self.changed:
                journal = self._journal
                if journal is None or self._unsynced.total_bytes < at_least_bytes:
                    return
                ranges, self._unsynced = self._unsynced, Ranges()
            os.fsync(self._file)
            with self.changed:
                journal.synced(ranges)

    def follow(self, stopped: threading.Event) -> Verdict:
        """Hash the file from its start as its bytes come in, until it is whole.

        Raises:
            OSError: The disk refuses to give back what was written.
        """
        digest, at = hashlib.sha256(), 0
        buffer = memoryview(bytearray(_READ_BYTES))
        marks = bytearray()
        while at < self.source.size_bytes:
            with self.changed:
                while (ready := self.ranges.prefix_bytes) <= at and not stopped.is_set():
                    self.changed.wait(0.5)
            if stopped.is_set():
                return Verdict.STOPPED
            while at < ready and not stopped.is_set():
                # Up to the next mark at most: the digest so far at every 64 MiB costs nothing, and tells `verify`
                # later which 64 MiB of a damaged file to fetch again.
                until = min(ready, at - at % HASH_CHUNK_BYTES + HASH_CHUNK_BYTES, at + _READ_BYTES)
                count = os.preadv(self._file, [buffer[: until - at]], at)
                if count == 0:
                    return Verdict.WRONG  # the file has been cut from outside
                digest.update(buffer[:count])
                at += count
                self.hashed_bytes = at
                if at % HASH_CHUNK_BYTES == 0:
                    marks += digest.digest()
        if digest.hexdigest() != self.source.sha256:
            return Verdict.WRONG
        with contextlib.suppress(OSError):  # without them a damaged file is fetched whole, no more
            write_whole(marks_path(self.path), bytes(marks))
        return Verdict.RIGHT

    def accept(self) -> os.stat_result:
        """The hash is right: sync, and only then give the file its name. Returns how it looks.

        Raises:
            OSError: The disk refuses.
        """
        os.fsync(self._file)
        self.part_path.replace(self.path)
        sync_folder(self.path.parent)
        stat = os.fstat(self._file)
        self.done = True
        self.close()
        self.journal_path.unlink(missing_ok=True)
        return stat

    def discard(self) -> None:
        """The hash is wrong and nobody knows where: begin again.

        Raises:
            OSError: The disk refuses.
        """
        with self._syncing, self.changed:
            self._close_journal()
            # The journal goes first: a part without one is nothing, a journal without its part would be a lie.
            self.journal_path.unlink(missing_ok=True)
            os.ftruncate(self._file, 0)
            self._journal = Journal(self.journal_path, size_bytes=self.source.size_bytes, sha256=self.source.sha256)
            self.ranges, self._unsynced, self.hashed_bytes = Ranges(), Ranges(), 0
            self.tag = Tag()
            self._plan()

    def remove_part(self) -> None:
        """Leave nothing of it."""
        self.close()
        self.journal_path.unlink(missing_ok=True)
        self.part_path.unlink(missing_ok=True)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self) -> None:
        with self._syncing, self.changed:
            self._close_journal()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def marks_path(path: Path) -> Path:
    """Where the digests of a file's first 64, 128, 192 ... MiB lie, 32 bytes each, once its hash was right."""
    return path.parent / INNER / f"{path.name}.marks"
