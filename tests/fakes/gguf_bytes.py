"""GGUF headers byte by byte, also those that no writer would write."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}

Tensor: TypeAlias = tuple[str, Sequence[int], int, int]
"""Name, shape with the fastest dimension first, type, offset."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: object) -> bytes:
    body = text(value) if isinstance(value, (str, bytes)) else struct.pack("<" + _CODES[kind], value)
    return text(name) + struct.pack("<I", kind) + body


def array(name: str, kind: int, values: Sequence[str] | Sequence[float], *, length: int | None = None) -> bytes:
    """``length`` claims another number of elements than there are."""
    body = b"".join(text(v) if isinstance(v, str) else struct.pack("<" + _CODES[kind], v) for v in values)
    return text(name) + struct.pack("<IIQ", ARRAY, kind, len(values) if length is None else length) + body


def tensor(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A padded header; the counts can be made to lie."""
    data = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    data += b"".join(keys) + b"".join(tensors)
    return data + b"\0" * (-len(data) % alignment)


def write_shards(folder: Path, tensors: Sequence[Sequence[bytes]], *, sizes: Sequence[int], name: str = "m") -> None:
    """Shards of an architecture ``llama`` with these tensor tables and so many bytes of data each."""
    folder.mkdir(parents=True, exist_ok=True)
    count, total = len(tensors), sum(map(len, tensors))
    for number, (table, size) in enumerate(zip(tensors, sizes, strict=True)):
        keys = [
            key("general.architecture", STRING, "llama"),
            key("split.no", 2, number),
            key("split.count", 2, count),
            key("split.tensors.count", I32, total),
        ]
        path = folder / f"{name}-{number + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(header(keys, table) + bytes(size))
