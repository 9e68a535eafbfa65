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
    IN_PLACE = "in place"


def bring(source: Path, target: Path, *, advance: Callable[[int], None] = lambda _done: None) -> How:
    """Make ``target`` the same content as ``source``, by the cheapest way there is.

    What lies under ``target`` is replaced in one step, once all of the new content is there. A source that *is* the
    target, by whatever name, is left alone.

    Raises:
        OSError: Nothing worked, the copy last; ``target`` is as it was.
    """
    if is_same(source, target):
        return How.IN_PLACE
    source = source.resolve()  # a cache of symlinks: the engine must find real files
    part = coming(target)
    try:
        how = _make(source, part, advance)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return how


def is_same(source: Path, target: Path) -> bool:
    """Whether both are one real file: the same name, a link to it, or one of several hard links.

    A ``target`` that is a symlink is no real file: engines are given real ones, and replacing a link loses nothing.
    """
    try:
        return not target.is_symlink() and source.samefile(target)
    except OSError:  # no target yet
        return False


def coming(target: Path) -> Path:
    """The name in the target's folder that a file has until all of it is there."""
    return target.with_name(target.name + ".copy")


def _make(source: Path, part: Path, advance: Callable[[int], None]) -> How:
    part.unlink(missing_ok=True)  # left over from a run that was killed
    if _reflink(source, part):
        return How.REFLINK
    with contextlib.suppress(OSError):
        os.link(source, part)
        return How.HARD_LINK
    _copy(source, part, advance)
    return How.COPY


def needs_room(source: Path, folder: Path) -> bool:
    """False where a link will do: the same file system."""
    return source.resolve().stat().st_dev != folder.stat().st_dev


def _reflink(source: Path, part: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        with source.open("rb") as old, part.open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            os.fsync(new.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True


def _copy(source: Path, part: Path, advance: Callable[[int], None]) -> None:
    done = 0
    with source.open("rb") as old, part.open("wb") as new:
        while piece := old.read(_COPY_BYTES):
            new.write(piece)
            done += len(piece)
            advance(done)
        new.flush()
        os.fsync(new.fileno())
