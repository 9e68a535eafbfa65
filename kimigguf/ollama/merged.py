"""What the shards of a set are as one file: the same bytes that ``llama-gguf-split --merge`` writes.

The first shard's keys in their order, with ``split.count`` as 0 behind them; then the table and the data of all tensors
in the order of the shards, each padded to the alignment. Nothing of a tensor changes but its place.
Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/gguf-split.cpp (``gguf_merge``).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.header import Header, HeaderReader, NeedMore, TensorInfo
from kimigguf.gguf_file.read import read_header

_COUNT: Final = "split.count"
_U16: Final = 2
_VERSION: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The data of one tensor: ``size_bytes`` from ``offset`` in the shard ``path``, to ``at`` in the merged file."""

    name: str
    path: Path
    offset: int
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """``header`` is everything before the data, padded; the rest of the file is the stretches and zeros between."""

    header: bytes
    stretches: tuple[Stretch, ...]
    size_bytes: int


def merged(paths: Sequence[Path]) -> Merged:
    """The file that the shards ``paths``, in load order, make together. Reads headers only.

    Raises:
        IntegrityError: As ``read_header``; ``unknown-type`` for a tensor whose size nobody knows.
    """
    headers = [read_header(path) for path in paths]
    first = headers[0]
    entries, count = _keys(paths[0], first)
    stretches: list[Stretch] = []
    table = bytearray()
    at = 0
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.size_bytes is None:
                raise IntegrityError(f"{path.name} holds {tensor.name} in a type of unknown size", code="unknown-type")
            table += _entry(tensor, at)
            stretches.append(
                Stretch(
                    name=tensor.name,
                    path=path,
                    offset=header.data_offset + tensor.offset,
                    at=at,
                    size_bytes=tensor.size_bytes,
                )
            )
            at += _padded(tensor.size_bytes, first.alignment)
    start = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(stretches), count) + entries + table
    data_offset = _padded(len(start), first.alignment)
    return Merged(
        header=start.ljust(data_offset, b"\0"),
        stretches=tuple(
            Stretch(name=s.name, path=s.path, offset=s.offset, at=s.at + data_offset, size_bytes=s.size_bytes)
            for s in stretches
        ),
        size_bytes=data_offset + at,
    )


def same_header(data: bytes, made: Merged) -> bool:
    """Whether a file that starts with ``data`` has the keys and tensors of ``made``, each tensor in the same place.

    The order of the keys may differ: another build of the tool may write them otherwise.
    """
    ours, theirs = HeaderReader(), HeaderReader()
    expected, found = ours.feed(made.header), theirs.feed(data)
    if isinstance(found, NeedMore) or isinstance(expected, NeedMore):
        return False
    placed = (found.tensors, found.data_offset) == (expected.tensors, expected.data_offset)
    return placed and _raw(theirs) == _raw(ours)


def _raw(reader: HeaderReader) -> dict[str, bytes]:
    return {key: bytes(reader.data[start:end]) for key, (start, end) in reader.keys.items()}


def _keys(path: Path, header: Header) -> tuple[bytes, int]:
    """The entries of all keys, as they stand in the first shard, and their number."""
    with path.open("rb") as stream:
        reader = HeaderReader(path.name)
        reader.feed(stream.read(header.data_offset))
    raw = _raw(reader)
    raw.pop(_COUNT, None)
    raw[_COUNT] = struct.pack(f"<Q{len(_COUNT)}sIH", len(_COUNT), _COUNT.encode(), _U16, 0)
    return b"".join(raw.values()), len(raw)


def _entry(tensor: TensorInfo, at: int) -> bytes:
    name = tensor.name.encode()
    shape = tensor.shape or (1,)
    while len(shape) > 1 and shape[-1] == 1:  # as ggml counts dimensions
        shape = shape[:-1]
    return struct.pack(f"<Q{len(name)}sI{len(shape)}QIQ", len(name), name, len(shape), *shape, tensor.ggml_type, at)


def _padded(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment
