"""Reads headers from files, or from wherever bytes come from, and holds them against the file's size."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.header import Header, HeaderReader, NeedMore


def check_size(header: Header, size_bytes: int, *, name: str) -> None:
    """Hold a header against the size of its file.

    Raises:
        IntegrityError: ``file-cut`` where a tensor reaches beyond the end, ``trailing-data`` where more follows the
            last tensor than padding: two files were joined.
    """
    end = header.data_offset
    for tensor in header.tensors:
        tensor_end = header.data_offset + tensor.offset + (1 if tensor.size_bytes is None else tensor.size_bytes)
        if tensor_end > size_bytes:
            raise IntegrityError(
                f"{name} is cut: the tensor {tensor.name} lies outside of it",
                code="file-cut",
                cause=f"it ends at byte {tensor_end:,}, and the file has {size_bytes:,}",
                hint="fetch the file again",
            )
        end = max(end, tensor_end)
    is_known = all(tensor.size_bytes is not None for tensor in header.tensors)
    if is_known and size_bytes > -(-end // header.alignment) * header.alignment:
        raise IntegrityError(
            f"{name} goes on after its last tensor, as files do that were joined",
            code="trailing-data",
            cause=f"its tensors end at byte {end:,}, and the file has {size_bytes:,}",
            hint="fetch the file again; shards are never joined, llama.cpp finds them by their names",
        )


_READ_BYTES: Final = 128 << 10
"""Read at a time: a shard of weights has a header of some 16 KiB."""


def read_header(path: Path) -> Header:
    """The header of a file, held against the file's size. Reads no further than one small step beyond it.

    Raises:
        IntegrityError: As ``HeaderReader.feed`` and ``check_size``; ``empty-file``, ``missing-file``, ``unreadable``.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            # Pieces are asked for in order, so the position of the stream is always the right one.
            return read_from(lambda _start, count: stream.read(count) or b"", size_bytes=size, name=str(path))
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing", code="missing-file") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read", code="unreadable", cause=error.strerror) from error


def read_from(
    fetch: Callable[[int, int], bytes], *, size_bytes: int, name: str, step_bytes: int = _READ_BYTES
) -> Header:
    """A header from wherever ``fetch(start, count)`` gets bytes; it is asked for one piece after the other.

    Raises:
        IntegrityError: As ``read_header``, but for the file system's own.
    """
    if size_bytes == 0:
        raise IntegrityError(f"{name} is empty", code="empty-file", hint="fetch the file again")
    reader = HeaderReader(name, size_bytes=size_bytes)
    answer = reader.feed(b"")
    while isinstance(answer, NeedMore):
        have = len(reader.data)
        piece = fetch(have, min(max(answer.size_bytes, have + step_bytes), size_bytes) - have)
        if not piece:
            raise IntegrityError(f"{name} ended at byte {have} while it was read", code="header-cut")
        answer = reader.feed(piece)
    check_size(answer, size_bytes, name=name)
    return answer
