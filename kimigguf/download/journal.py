"""What of a ``.part`` file is on the disk: an append-only file of finished ranges beside it.

Each line is ``<kind> <fields> <crc32 of what stands before it>``:

* ``shard <size> <sha256>``: the first line; the journal is about this content and no other.
* ``boot <id>``: the lines that follow were written under this run of the system.
* ``w <start> <end>``: these bytes have been handed to the system. They outlive the process, killed or not, because the
  page cache does; they don't outlive a loss of power. So they count only under the same boot id.
* ``s <start> <end>``: these bytes have been synced to the disk, and only then was this line written: they count always.
* ``x <start> <end>``: these bytes are known to be wrong, and count no more until they are written anew.

A torn last line (power loss, full disk) fails its checksum; it and anything after it is cut off on opening.
"""

import contextlib
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kimigguf.download.ranges import Ranges

_LIMIT_BYTES: Final = 64 << 20  # a journal of a 50 GB shard has 12,500 lines of 40 bytes; this is no journal of ours


def boot_id() -> str:
    """A name for this run of the system: another one means that what was not synced may be lost."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    import psutil  # noqa: PLC0415 -- only where there is no /proc

    return f"up-since-{int(psutil.boot_time())}"


def parse(text: bytes, *, size_bytes: int, sha256: str, boot: str) -> tuple[Ranges, int]:
    """The ranges that can be relied on, and how many bytes of the journal are sound.

    Empty ranges and 0 for a journal about other content, or none.
    """
    ranges, sound, same_boot = Ranges(), 0, False
    for number, line in enumerate(text.splitlines(keepends=True)):
        fields = _checked(line)
        if fields is None:
            break
        if number == 0 and fields != ["shard", str(size_bytes), sha256]:
            return Ranges(), 0
        match fields:
            case ["boot", run]:
                same_boot = run == boot
            case ["s" | "w" as kind, start, end] if kind == "s" or same_boot:
                ranges.add(int(start), int(end))
            case ["x", start, end]:
                ranges.remove(int(start), int(end))
            case _:
                pass
        sound += len(line)
    return ranges.clipped(size_bytes), sound


def _checked(line: bytes) -> list[str] | None:
    body, _, checksum = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    return body.decode("ascii", errors="replace").split(" ")


def read(path: Path, *, size_bytes: int, sha256: str) -> Ranges:
    """The ranges that ``path`` vouches for now; empty where there is no such journal."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= _LIMIT_BYTES:
            return parse(path.read_bytes(), size_bytes=size_bytes, sha256=sha256, boot=boot_id())[0]
    return Ranges()


class Journal:
    """An open journal. Written by one process (the set's lock sees to that); each line is one ``write``.

    Raises:
        OSError: From any method; the caller knows what to say about a full or broken disk.
    """

    def __init__(self, path: Path, *, size_bytes: int, sha256: str) -> None:
        boot = boot_id()
        text = b""
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size <= _LIMIT_BYTES:
                text = path.read_bytes()
        self.ranges, sound = parse(text, size_bytes=size_bytes, sha256=sha256, boot=boot)
        """What can be relied on from earlier runs."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._file, sound)
            if sound == 0:
                self._line(f"shard {size_bytes} {sha256}")
            self._line(f"boot {boot}")
        except OSError:
            os.close(self._file)
            raise

    def written(self, start: int, end: int) -> None:
        """Record bytes that have been handed to the system."""
        self._line(f"w {start} {end}")

    def synced(self, ranges: Ranges) -> None:
        """Record bytes that the caller has synced to the disk, and sync the record."""
        for start, end in ranges:
            self._line(f"s {start} {end}")
        os.fsync(self._file)

    def wrong(self, start: int, end: int) -> None:
        """Record bytes that have turned out to be wrong."""
        self._line(f"x {start} {end}")

    def _line(self, body: str) -> None:
        data = body.encode("ascii")
        line = data + b" %08x\n" % zlib.crc32(data)
        done = os.write(self._file, line)
        if done != len(line):  # the disk took half a line: what follows would be lost behind it
            os.ftruncate(self._file, os.fstat(self._file).st_size - done)
            os.write(self._file, line)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
