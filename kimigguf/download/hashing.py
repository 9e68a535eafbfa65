"""SHA-256 of large files, side by side on all cores, and where a file begins to differ.

The digest of a file's first 64, 128, 192 ... MiB falls off on the way for nothing. Kept once the whole was right
("marks"), these tell later in which 64 MiB a damaged file begins to differ, so that only those are fetched again.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.download.manifest import INNER
from kimigguf.errors import IntegrityError
from kimigguf.events import Advance, Listener, ignore
from kimigguf.whole_file import write_whole

CHUNK_BYTES: Final = 64 << 20
READ_BYTES: Final = 1 << 20
_TICK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A file's SHA-256 (hex), its marks, and the first chunk that does not fit the marks known from before."""

    sha256: str
    marks: bytes
    first_bad: tuple[int, int] | None = None


def marks_path(path: Path) -> Path:
    """Where the marks of a file lie: 32 bytes for each whole chunk."""
    return path.parent / INNER / f"{path.name}.marks"


def read_marks(path: Path, size_bytes: int) -> bytes | None:
    """The marks of a file, None where there are none that fit its size."""
    try:
        marks = marks_path(path).read_bytes()
    except OSError:
        return None
    return marks if len(marks) == 32 * (size_bytes // CHUNK_BYTES) else None


def write_marks(path: Path, marks: bytes) -> None:
    """Keep the marks of a file whose hash was right.

    Raises:
        OSError: The disk is full, or not writable.
    """
    target = marks_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, marks)


def look_at(files: Mapping[str, Path]) -> dict[str, os.stat_result]:
    """How files look before they are hashed.

    Raises:
        IntegrityError: ``unreadable``.
    """
    looks: dict[str, os.stat_result] = {}
    for name, path in files.items():
        try:
            looks[name] = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
    return looks


def _unreadable(path: Path, error: OSError) -> IntegrityError:
    return IntegrityError(
        f"{path.name} can't be read",
        code="unreadable",
        cause=error.strerror,
        hint=f"look at the disk's health (dmesg | tail), then: kimigguf repair {path.parent}",
    )


def hash_file(path: Path, *, sha256: str | None = None, listen: Listener = ignore) -> Digest:
    """Hash one file, with progress. See ``hash_files``."""
    return hash_files({path.name: path}, {path.name: sha256}, listen)[path.name]


def hash_files(
    files: Mapping[str, Path], expected: Mapping[str, str | None], listen: Listener = ignore
) -> dict[str, Digest]:
    """Hash files side by side, the largest first; the caller's thread tells how far they are.

    ``expected`` are the SHA-256 they should have, where somebody has said so.

    Raises:
        IntegrityError: ``unreadable``.
    """
    if not files:
        return {}
    sizes = {name: stat.st_size for name, stat in look_at(files).items()}
    done = dict.fromkeys(files, 0)
    stop = threading.Event()

    def job(name: str) -> Digest:
        def advance(at: int) -> bool:
            done[name] = at
            return not stop.is_set()

        return _hash(files[name], expected.get(name), advance)

    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1), thread_name_prefix="kimigguf-hash") as pool:
        try:
            jobs = {name: pool.submit(job, name) for name in sorted(files, key=lambda name: -sizes[name])}
            left = set(jobs.values())
            while left:
                left = wait(left, timeout=_TICK_SECONDS).not_done
                for name, size in sizes.items():
                    if 0 < done[name] < size:
                        listen(_hashing(name, done[name], size))
                listen(_hashing("total", sum(done.values()), sum(sizes.values())))
            for name, size in sizes.items():
                listen(_hashing(name, size, size))
            return {name: future.result() for name, future in jobs.items()}
        finally:
            stop.set()


def _hashing(item: str, done: int, total: int) -> Advance:
    return Advance(activity="hash", item=item, done_bytes=done, total_bytes=total)


def _hash(path: Path, expected: str | None, advance: Callable[[int], bool]) -> Digest:
    digest, at, new = hashlib.sha256(), 0, bytearray()
    view = memoryview(bytearray(READ_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            # Never over a chunk's end: a read that comes up short must not step over it.
            while count := stream.readinto(view[: min(READ_BYTES, CHUNK_BYTES - at % CHUNK_BYTES)]):
                digest.update(view[:count])
                at += count
                if at % CHUNK_BYTES == 0:
                    new += digest.digest()
                if not advance(at):
                    break
    except OSError as error:
        raise _unreadable(path, error) from error
    known = read_marks(path, size) if expected else None
    right = digest.hexdigest() == expected
    return Digest(
        sha256=digest.hexdigest(),
        marks=bytes(new),
        first_bad=_first_bad(bytes(new), known, size) if known is not None and not right else None,
    )


def _first_bad(new: bytes, known: bytes, size_bytes: int) -> tuple[int, int]:
    """The first chunk whose digest differs; where all whole chunks agree, it is what is left behind them."""
    for number in range(len(known) // 32):
        if new[32 * number : 32 * number + 32] != known[32 * number : 32 * number + 32]:
            return number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
    return len(known) // 32 * CHUNK_BYTES, size_bytes
