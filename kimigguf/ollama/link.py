"""Puts files into Ollama's blobs without copying them: as clones where the file system can, else as hard links.

Ollama takes a blob for present when a file of its name lies there (`HeadBlobHandler` in
https://github.com/ollama/ollama/blob/main/server/routes.go). It checks no digest then, so the hash must be sure before.
A blob that it registers it also touches (`touchLayer` in manifest/layer.go), which the system allows to the file's
owner and to root only: a link to a file of another user would be found and then refused.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from kimigguf.errors import MachineError
from kimigguf.ollama.source import Source, SourceFile
from kimigguf.ollama.storage import ModelsFolder

_FICLONE: Final = 0x40049409
"""Linux's request for a clone that shares its blocks until one side is written to (btrfs, XFS, bcachefs)."""


def why_not(source: Source, folder: ModelsFolder | None) -> str | None:
    """Why the set cannot be linked into Ollama's folder; None where it can."""
    if folder is None or (closed := _closed(folder)) is not None:
        return closed if folder else "Ollama's folder is not known"
    for file in source.files:
        try:
            found = file.path.stat()
        except OSError:
            return f"{file.path} cannot be looked at"
        if (reason := _apart(file.name, found.st_dev, found.st_uid, folder)) is not None:
            return reason
    return None


def why_not_new(device: int, folder: ModelsFolder | None) -> str | None:
    """Why a file that this user would make on a file system could not be linked into Ollama's folder."""
    if folder is None or (closed := _closed(folder)) is not None:
        return closed if folder else "Ollama's folder is not known"
    user = _user()
    # Root gives it to whom Ollama runs as: see ``hand_over``.
    return _apart("the merged file", device, folder.owner if user == 0 else user, folder)


def _closed(folder: ModelsFolder) -> str | None:
    if folder.device is None or folder.owner is None:
        return f"{folder.path} cannot be looked at"
    return None if folder.writable else f"this user may not write to {folder.path / 'blobs'}"


def _apart(name: str, device: int, owner: int | None, folder: ModelsFolder) -> str | None:
    if device != folder.device:
        return f"{folder.path} is on another file system than {name}"
    if folder.owner not in {0, owner}:
        return f"{name} belongs to another user than Ollama's blobs, and Ollama must own what it registers"
    return None


def _user() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def hand_over(path: Path, folder: ModelsFolder) -> None:
    """Make a file that is ours one that Ollama may read and touch.

    Raises:
        MachineError: ``cannot-link``: it is not ours.
    """
    try:
        _open_to_ollama(path, folder)
    except OSError as error:
        raise _cannot_link(path.name, folder, error) from error


def _open_to_ollama(path: Path, folder: ModelsFolder) -> None:
    path.chmod(0o644)
    if _user() == 0 and folder.owner is not None:
        os.chown(path, folder.owner, -1)


def _cannot_link(name: str, folder: ModelsFolder, error: OSError) -> MachineError:
    return MachineError(
        f"{name} cannot be linked into {folder.path / 'blobs'}",
        code="cannot-link",
        cause=error.strerror,
        hint="send copies instead: add --copy",
    )


def place(file: SourceFile, digest: str, folder: ModelsFolder) -> bool:
    """Make the file a blob of that digest; true if it became a hard link, false for a clone.

    Raises:
        MachineError: ``cannot-link``.
    """
    target = folder.path / "blobs" / digest.replace(":", "-", 1)
    try:
        if _clone(file.path, target, folder):
            return False
        os.link(file.path, target)
    except OSError as error:
        raise _cannot_link(file.name, folder, error) from error
    return True


def take_back(digest: str, folder: ModelsFolder) -> None:
    """Remove a blob that was placed in vain."""
    with contextlib.suppress(OSError):
        (folder.path / "blobs" / digest.replace(":", "-", 1)).unlink()


def _clone(source: Path, target: Path, folder: ModelsFolder) -> bool:
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
        _open_to_ollama(unfinished, folder)
        unfinished.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return False
    return True
