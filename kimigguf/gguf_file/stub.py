"""A model without its weights: true headers, true sizes, and holes for everything else.

llama.cpp's memory report reads headers only, so it answers for such files as for the model itself.
"""

import os
from pathlib import Path

from kimigguf.errors import IntegrityError, MachineError
from kimigguf.gguf_file.shards import ShardFile, ShardSet


def write_stubs(shard_set: ShardSet, folder: Path) -> Path:
    """Write every file of the set into ``folder`` (made if need be) as header and hole; return the first file.

    The files have their true sizes and names, and take the bytes of their headers on a file system that knows holes.

    Raises:
        MachineError: ``cannot-write``, where the folder or its file system does not take them.
        IntegrityError: ``no-header-bytes`` for a set whose headers were not read from files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in shard_set.files:
            _write(file, folder / file.name)
    except OSError as error:
        raise MachineError(
            f"the stubs of {shard_set.files[0].name} cannot be written to {folder}",
            code="cannot-write",
            cause=error.strerror,
            hint="set TMPDIR to a folder on a file system with sparse files (ext4, xfs, btrfs, tmpfs)",
        ) from error
    return folder / shard_set.files[0].name


def _write(file: ShardFile, path: Path) -> None:
    if not file.header_bytes:
        raise IntegrityError(f"the header of {file.name} is not at hand", code="no-header-bytes")
    with path.open("wb") as stream:
        stream.write(file.header_bytes)
        stream.flush()
        os.truncate(stream.fileno(), file.size_bytes)  # all that follows the header is a hole
