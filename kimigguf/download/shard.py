"""One file on its way: the ``.part``, its journal, what is missing of it, and the hash that follows the bytes."""

import contextlib
import hashlib
import os
import threading
from collections import deque
from enum import Enum, auto
from pathlib import Path

from kimigguf.download.hashing import CHUNK_BYTES, READ_BYTES, read_marks, write_marks
from kimigguf.download.journal import Journal
from kimigguf.download.manifest import INNER
from kimigguf.download.parts import Source, Tag
from kimigguf.download.policy import Policy
from kimigguf.download.ranges import Ranges
from kimigguf.download.store import PART
from kimigguf.whole_file import sync_folder


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
        self._buffer = memoryview(bytearray(READ_BYTES))
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

    def demote(self) -> int:
        """Make a part of a file that is known to be damaged: it loses its name, and keeps what its marks can save.

        Returns how many bytes on the disk will be written over, rather than added.

        Raises:
            OSError: The disk refuses.
        """
        stat = self.path.stat()
        if stat.st_nlink > 1 or self.path.is_symlink():  # what is not ours must not be written to
            self.path.unlink()
            return 0
        self._inner.mkdir(parents=True, exist_ok=True)
        self.journal_path.unlink(missing_ok=True)
        self.path.replace(self.part_path)
        sync_folder(self.path.parent)
        size = self.source.size_bytes
        if read_marks(self.path, size) is not None:
            with Journal(self.journal_path, size_bytes=size, sha256=self.source.sha256) as journal:
                journal.synced(Ranges([(0, min(size, stat.st_size))]))
        return stat.st_size

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

        Where marks from an earlier, right file of this content are known, a chunk that does not fit them is dropped and
        fetched again; the rest stays.

        Raises:
            OSError: The disk refuses to give back what was written.
        """
        known = read_marks(self.path, self.source.size_bytes)
        digest, at, tries = hashlib.sha256(), 0, 0
        new = bytearray()
        while at < self.source.size_bytes:
            end = min(at + CHUNK_BYTES, self.source.size_bytes)
            ahead = digest.copy()
            match self._hash_chunk(ahead, at, end, stopped):
                case Verdict.RIGHT:
                    pass
                case other:
                    return other
            if known is None or self._fits(ahead, known, at, end):
                digest, at, tries = ahead, end, 0
                if at % CHUNK_BYTES == 0:
                    new += digest.digest()
            elif tries < self._policy.hash_retries:
                tries += 1
                self._drop(at, end)
            else:
                return Verdict.WRONG
        if digest.hexdigest() != self.source.sha256:
            return Verdict.WRONG
        with contextlib.suppress(OSError):  # without them a damaged file is fetched whole, no more
            write_marks(self.path, bytes(new))
        return Verdict.RIGHT

    def _fits(self, digest: "hashlib._Hash", known: bytes, start: int, end: int) -> bool:
        """Is the file right up to ``end``, by the marks or, at its end, by its own hash?"""
        if end == self.source.size_bytes:
            return digest.hexdigest() == self.source.sha256
        number = start // CHUNK_BYTES
        return digest.digest() == known[32 * number : 32 * number + 32]

    def _hash_chunk(self, digest: "hashlib._Hash", at: int, end: int, stopped: threading.Event) -> Verdict:
        """Feed ``[at, end)`` to ``digest`` as it comes in; RIGHT when all of it has been read."""
        while at < end:
            with self.changed:
                while (ready := self.ranges.prefix_bytes) <= at and not stopped.is_set():
                    self.changed.wait(0.5)
            while at < min(ready, end) and not stopped.is_set():
                count = os.preadv(self._file, [self._buffer[: min(ready, end) - at]], at)
                if count == 0:
                    return Verdict.WRONG  # the file has been cut from outside
                digest.update(self._buffer[:count])
                at += count
                self.hashed_bytes = at
            if stopped.is_set():
                return Verdict.STOPPED
        return Verdict.RIGHT

    def _drop(self, start: int, end: int) -> None:
        """These bytes are wrong: have them fetched again."""
        with self._syncing, self.changed:
            if self._journal is not None:
                self._journal.wrong(start, end)
            self.ranges.remove(start, end)
            self._unsynced.remove(start, end)
            # Only these: other parts may be on their way at this moment.
            gaps = self.ranges.gaps(end, self._policy.part_bytes)
            self.parts.extendleft((max(start, a), b) for a, b in gaps if b > start)

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
