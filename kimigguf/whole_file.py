"""Files that are there whole or not at all, whoever is killed while they are written."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content so that a reader, or a loss of power, sees the old or the new, never a mix.

    Raises:
        OSError: The disk is full, or the folder is missing or not writable.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    with contextlib.suppress(OSError):  # the file is in its place; not every file system syncs folders
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
