"""Bring a file that exists into a set's folder, by reflink, hard link or copy: what is not ours stays as it is."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

_FICLONE: Final = 0x40049409
"""ioctl of Linux (include/uapi/linux/fs.h): share the other file's blocks, copied only when one of them is written."""
_COPY_BYTES: Final = 8 << 20


class How(StrEnum):
    """What it took. A hard link is one file under two names: a change through the other name is seen by its stamp."""

    REFLINK = "reflink"
    HARD_LINK = "hard link"
    COPY = "copy"


def bring(source: Path, target: Path, *, advance: Callable[[int], None] = lambda _done: None) -> How:
    """Make ``target`` (which must not exist) the same content as ``source``, by the cheapest way there is.

    Raises:
        OSError: Nothing worked, the copy last; nothing is left under ``target``.
    """
    source = source.resolve()  # a cache of symlinks: the engine must find real files
    if _reflink(source, target):
        return How.REFLINK
    with contextlib.suppress(OSError):
        os.link(source, target)
        return How.HARD_LINK
    _copy(source, target, advance)
    return How.COPY


def needs_room(source: Path, folder: Path) -> bool:
    """False where a link will do: the same file system."""
    return source.resolve().stat().st_dev != folder.stat().st_dev


def _reflink(source: Path, target: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    part = target.with_name(target.name + ".copy")
    try:
        with source.open("rb") as old, part.open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            os.fsync(new.fileno())
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    part = target.with_name(target.name + ".copy")
    done = 0
    try:
        with source.open("rb") as old, part.open("wb") as new:
            while piece := old.read(_COPY_BYTES):
                new.write(piece)
                done += len(piece)
                advance(done)
            new.flush()
            os.fsync(new.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
