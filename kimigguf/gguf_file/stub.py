"""Stubs: files with a model's true headers and its true size, and holes for weights.

llama.cpp's memory tools read headers only, so they answer for a stub of a few MB as for the half terabyte.
"""

import os
from pathlib import Path
from typing import Final

from kimigguf.errors import MachineError
from kimigguf.gguf_file.shards import ShardSet

_PIECE_BYTES: Final = 1 << 20


def write_stubs(shards: ShardSet, folder: Path) -> Path:
    """Write a stub of every file of the set into ``folder``; returns the first, the one to load.

    Raises:
        MachineError: ``cannot-write`` where the folder's file system has no room or no holes.
    """
    for file in shards.files:
        target = folder / file.name
        try:
            with file.header_path.open("rb") as source, target.open("xb") as stub:
                left = file.header.data_offset
                while left and (piece := source.read(min(left, _PIECE_BYTES))):
                    stub.write(piece)
                    left -= len(piece)
            os.truncate(target, file.size_bytes)
        except OSError as error:
            raise MachineError(
                f"cannot write the stub {target}",
                code="cannot-write",
                cause=error.strerror,
                hint="set TMPDIR to a folder on a file system with sparse files (ext4, xfs, btrfs, tmpfs)",
            ) from error
    return folder / shards.files[0].name
