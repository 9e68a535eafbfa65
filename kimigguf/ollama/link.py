"""Puts files into Ollama's blobs without copying them: as clones where the file system can, else as hard links.

Ollama takes a blob for present when a file of its name lies there (`HeadBlobHandler` in
https://github.com/ollama/ollama/blob/main/server/routes.go). It checks no digest then, so the hash must be sure before.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from kimigguf.errors import MachineError
from kimigguf.ollama.source import Source, SourceFile
from kimigguf.ollama.storage import ModelsFolder

_FICLONE: Final = 0x40049409
"""Linux's request for a clone that shares its blocks until one side is written to (btrfs, XFS, bcachefs)."""


def why_not(source: Source, folder: ModelsFolder | None) -> str | None:
    """Why the set cannot be linked into Ollama's folder; None where it can."""
    if folder is None or folder.device is None:
        return "Ollama's folder is not known"
    if not folder.writable:
        return f"this user may not write to {folder.path / 'blobs'}"
    try:
        owner = (folder.path / "blobs").stat().st_uid
        looks = [(file, file.path.stat()) for file in source.files]
    except OSError as error:
        return f"{error.filename} cannot be looked at"
    for file, found in looks:
        if found.st_dev != folder.device:
            return f"{folder.path} is on another file system than the shards"
        if found.st_uid != owner and not found.st_mode & stat.S_IROTH:
            return f"the user that owns Ollama's folder may not read {file.name}"
    return None


def place(file: SourceFile, digest: str, folder: ModelsFolder) -> bool:
    """Make the file a blob of that digest; true if it became a hard link, false for a clone.

    Raises:
        MachineError: ``cannot-link``.
    """
    target = folder.path / "blobs" / digest.replace(":", "-", 1)
    try:
        if _clone(file.path, target):
            return False
        os.link(file.path, target)
    except OSError as error:
        raise MachineError(
            f"{file.name} cannot be linked into {target.parent}",
            code="cannot-link",
            cause=error.strerror,
            hint="send copies instead: add --copy",
        ) from error
    return True


def take_back(digest: str, folder: ModelsFolder) -> None:
    """Remove a blob that was placed in vain."""
    with contextlib.suppress(OSError):
        (folder.path / "blobs" / digest.replace(":", "-", 1)).unlink()


def _clone(source: Path, target: Path) -> bool:
    """Clone a file; false where the system or the file system cannot."""
    try:
        from fcntl import ioctl  # noqa: PLC0415 -- there is none on Windows
    except ImportError:
        return False
    # A name as Ollama's own temporary files have: what a kill leaves behind is cleared away by Ollama's next start.
    unfinished = target.with_name(f"{target.name[:18]}{os.getpid()}")
    try:
        with source.open("rb") as original, unfinished.open("xb") as copy:
            ioctl(copy.fileno(), _FICLONE, original.fileno())
        unfinished.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return False
    return True
