"""Reads shards into the page cache before the engine maps them: big requests in file order, not page faults in any."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kimigguf.errors import IntegrityError
from kimigguf.events import Advance, Listener, Notice, ignore
from kimigguf.units import memory

_BLOCK_BYTES: Final = 16 << 20


def prefault(files: Sequence[Path], *, room_bytes: int | None, listen: Listener = ignore) -> int:
    """Read every file once, in order; returns the bytes read, 0 where the memory could not keep them.

    ``room_bytes`` is the memory that may be used: what does not fit would push out its own beginning. None: unknown,
    and then it is tried.

    Raises:
        IntegrityError: ``unreadable``, naming the file: its disk fails.
    """
    total = sum(file.stat().st_size for file in files)
    if room_bytes is not None and total > room_bytes:
        listen(Notice(text=f"not read ahead: {memory(total)} of files, {memory(room_bytes)} of memory to keep them"))
        return 0
    done = 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while count := file.readinto(buffer):
                    done += count
                    listen(Advance(activity="read ahead", item="total", done_bytes=done, total_bytes=total))
        except OSError as error:
            raise IntegrityError(
                f"{path.name} cannot be read", code="unreadable", cause=error.strerror, hint=f"kimigguf verify '{path}'"
            ) from error
    return done
