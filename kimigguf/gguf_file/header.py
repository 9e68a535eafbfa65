"""A bounded parser of GGUF headers that does no input or output: bytes in, a ``Header`` or "need more" out.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything a file says about itself is held against
what its bytes can back before it is believed, and nothing is allocated by a number from the file.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from kimigguf.errors import IntegrityError, UsageError
from kimigguf.gguf_file.types import TENSOR_TYPES
from kimigguf.units import KIB, MIB

MAGIC: Final = b"GGUF"
MAX_HEADER_BYTES: Final = 256 * MIB
"""Kimi K3's is 7 MB. A header above this is taken for damage or malice."""
MAX_KEPT_NUMBERS: Final = 4096
"""Longer arrays are stepped over: nothing that decides memory has more than one number per layer."""
_MAX_NAME_BYTES: Final = 1024
_MAX_TENSOR_NAME_BYTES: Final = 63  # GGML_MAX_NAME less its end
_MAX_STRING_BYTES: Final = 16 * MIB
_MAX_DIMENSIONS: Final = 4  # GGML_MAX_DIMS
_MAX_ALIGNMENT: Final = 64 * KIB
_FIRST_READ_BYTES: Final = 256 * KIB

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Value types of GGUF as struct codes."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedArray:
    """An array whose elements were stepped over, not materialised: token lists, scores, merges."""

    element_type: int
    length: int


Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One entry of the tensor table.

    ``shape`` has the fastest dimension first, as in the file (ggml's ``ne``). ``ggml_type`` is the file's number,
    which may be one this version does not know; ``size_bytes`` is then None. ``offset`` counts from the data section.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything in a GGUF file before its tensor data. ``data_offset`` is where that data starts, aligned."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int

    @property
    def architecture(self) -> str | None:
        """``general.architecture``, such as ``kimi-k3``."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def data_bytes(self) -> int | None:
        """Length of the tensor data without the last tensor's padding; None if its type is not known."""
        if not self.tensors:
            return 0
        last = max(self.tensors, key=lambda tensor: tensor.offset)
        return None if last.size_bytes is None else last.offset + last.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMore:
    """The header goes on: call again with at least the first ``size_bytes`` of the file."""

    size_bytes: int


class _OutOfBytesError(Exception):
    """More bytes are needed; never leaves this module."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class _Reader:
    """A position in the bytes at hand. Every step is checked against their end before it is taken."""

    __slots__ = ("at", "data", "name")

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.at = 0
        self.name = name

    def refuse(self, code: str, what: str, at: int | None = None) -> NoReturn:
        raise IntegrityError(
            f"{self.name}: {what} at byte {self.at if at is None else at:,}",
            code=code,
            cause="the file is damaged, or no GGUF that llama.cpp would load",
        )

    def skip(self, count: int) -> int:
        """Step over ``count`` bytes; returns where they start."""
        start, end = self.at, self.at + count
        if end > MAX_HEADER_BYTES:
            self.refuse("header-too-large", f"a header of more than {MAX_HEADER_BYTES // MIB} MiB")
        if end > len(self.data):
            raise _OutOfBytesError(end)
        self.at = end
        return start

    def number(self, code: str) -> int | float:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.data, self.skip(layout.size))
        return value  # type: ignore[no-any-return]  # one struct code, one number

    def integer(self, code: str) -> int:
        return int(self.number(code))

    def text(self, limit: int, what: str) -> bytes:
        """A length and so many bytes."""
        start = self.at
        length = self.integer("Q")
        if length > limit:
            self.refuse("bad-length", f"{what} of {length:,} bytes (at most {limit:,})", start)
        at = self.skip(length)
        return self.data[at : at + length]

    def label(self, limit: int, what: str) -> str:
        """A name: UTF-8 without control characters, not empty."""
        start = self.at
        raw = self.text(limit, what)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("bad-name", f"{what} that is no UTF-8", start)
        if not name or not name.isprintable():
            self.refuse("bad-name", f"{what} that is empty or has control characters ({name[:40]!r})", start)
        return name


def parse(data: bytes, *, name: str = "header") -> Header | NeedMore:
    """The header at the start of ``data``, or how many bytes from the start are needed at least.

    Args:
        data: The first bytes of a file, any number of them.
        name: What to call the file in errors.

    Raises:
        IntegrityError: ``not-gguf``, ``big-endian``, ``gguf-version``, ``bad-count``, ``bad-length``, ``bad-type``,
            ``bad-name``, ``bad-value``, ``bad-shape``, ``bad-offset``, ``duplicate-name``, ``header-too-large``:
            the file's name and the byte offset are in the message.
    """
    reader = _Reader(data, name)
    try:
        return _parse(reader)
    except _OutOfBytesError as more:
        return NeedMore(size_bytes=more.size_bytes)


def read_header(path: Path) -> Header:
    """The header of a file, reading little more than it.

    Raises:
        UsageError: ``no-such-file`` or ``unreadable-file``.
        IntegrityError: As ``parse``; ``truncated`` where the file ends inside its header.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_FIRST_READ_BYTES)
            while isinstance(answer := parse(data, name=path.name), NeedMore):
                more = stream.read(max(answer.size_bytes - len(data), 3 * len(data)))
                if not more:
                    raise IntegrityError(
                        f"{path.name} ends inside its header, at byte {len(data):,}",
                        code="truncated" if data else "empty-file",
                        hint="fetch it again, whole",
                    )
                data += more
            return answer
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}", code="no-such-file") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", code="unreadable-file", cause=error.strerror) from error


def _parse(reader: _Reader) -> Header:
    version = _preamble(reader)
    tensor_count = _count(reader, "tensors", smallest_bytes=8 + 1 + 4 + 8 + 4 + 8)
    key_count = _count(reader, "keys", smallest_bytes=8 + 1 + 4 + 1)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        start = reader.at
        key = reader.label(_MAX_NAME_BYTES, "a key")
        if key in metadata:
            reader.refuse("duplicate-name", f"a second key {key!r}", start)
        metadata[key] = _value(reader, key)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or not 1 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        reader.refuse("bad-value", f"an alignment of {alignment!r}")
    tensors = _tensors(reader, tensor_count, alignment)
    data_offset = -(-reader.at // alignment) * alignment
    return Header(version=version, metadata=metadata, tensors=tensors, alignment=alignment, data_offset=data_offset)


def _preamble(reader: _Reader) -> int:
    magic = reader.data[:4]
    if magic != MAGIC[: len(magic)]:
        reader.refuse("not-gguf", f"no GGUF file: it starts with {magic!r}", 0)
    reader.skip(4)
    version = reader.integer("I")
    if version in (2, 3):
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
        reader.refuse("big-endian", "a big-endian GGUF; llama.cpp on this machine reads little-endian ones only", 4)
    return reader.refuse("gguf-version", f"GGUF version {version}; 2 and 3 are known", 4)


def _count(reader: _Reader, what: str, *, smallest_bytes: int) -> int:
    start = reader.at
    count = reader.integer("Q")
    if count * smallest_bytes > MAX_HEADER_BYTES:
        reader.refuse("bad-count", f"a count of {count:,} {what}", start)
    return count


def _value(reader: _Reader, key: str) -> Value:
    start = reader.at
    kind = reader.integer("I")
    if kind == _STRING:
        return reader.text(_MAX_STRING_BYTES, f"a value of {key}").decode("utf-8", errors="replace")
    if kind == _ARRAY:
        return _array(reader, key)
    return _scalar(reader, kind, key, start)


def _scalar(reader: _Reader, kind: int, key: str, start: int) -> Scalar:
    code = _SCALARS.get(kind)
    if code is None:
        reader.refuse("bad-type", f"an unknown value type {kind} of {key}", start)
    value = reader.number(code)
    if kind != _BOOL:
        return value
    if value not in (0, 1):
        reader.refuse("bad-value", f"a truth value of {value} for {key}", start)
    return bool(value)


def _array(reader: _Reader, key: str) -> Value:
    start = reader.at
    kind, length = reader.integer("I"), reader.integer("Q")
    if kind == _STRING:
        if length * _U64.size > MAX_HEADER_BYTES:
            reader.refuse("bad-length", f"{length:,} strings in {key}", start)
        _skip_strings(reader, length, key)
        return SkippedArray(element_type=kind, length=length)
    code = _SCALARS.get(kind)
    if code is None:  # nested arrays among them: llama.cpp refuses those too
        reader.refuse("bad-type", f"an array of type {kind} for {key}", start)
    width = struct.calcsize("<" + code)
    if length * width > MAX_HEADER_BYTES:
        reader.refuse("bad-length", f"{length:,} numbers in {key}", start)
    at = reader.skip(length * width)
    if length > MAX_KEPT_NUMBERS:
        return SkippedArray(element_type=kind, length=length)
    numbers = struct.unpack_from(f"<{length}{code}", reader.data, at)
    return tuple(map(bool, numbers)) if kind == _BOOL else numbers


def _skip_strings(reader: _Reader, count: int, key: str) -> None:
    """Step over a list of strings; the one loop whose speed matters (K3 has 163,840 tokens)."""
    data, at, end, unpack = reader.data, reader.at, len(reader.data), _U64.unpack_from
    for done in range(count):
        after = at + 8
        if after > end:
            raise _OutOfBytesError(after + 8 * (count - done - 1))
        (length,) = unpack(data, at)
        if length > _MAX_STRING_BYTES:
            reader.refuse("bad-length", f"a string of {length:,} bytes in {key}", at)
        at = after + length
        if at > MAX_HEADER_BYTES:
            reader.refuse("header-too-large", f"a header of more than {MAX_HEADER_BYTES // MIB} MiB", at)
    if at > end:
        raise _OutOfBytesError(at)
    reader.at = at


def _tensors(reader: _Reader, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    for _ in range(count):
        start = reader.at
        tensor = _tensor(reader, alignment)
        if tensor.name in names:
            reader.refuse("duplicate-name", f"a second tensor {tensor.name!r}", start)
        names.add(tensor.name)
        tensors.append(tensor)
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            reader.refuse("bad-offset", f"the data of {tensor.name!r} overlaps that of {before!r}: the table ends")
        end, before = tensor.offset + (tensor.size_bytes or 1), tensor.name
    return tuple(tensors)


def _tensor(reader: _Reader, alignment: int) -> TensorInfo:
    start = reader.at
    name = reader.label(_MAX_TENSOR_NAME_BYTES, "a tensor name")
    dimensions = reader.integer("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        reader.refuse("bad-shape", f"{name!r} with {dimensions} dimensions", start)
    shape = struct.unpack_from(f"<{dimensions}Q", reader.data, reader.skip(8 * dimensions))
    kind, offset = reader.integer("I"), reader.integer("Q")
    numbers = math.prod(shape)
    if not 0 < numbers < 1 << 63:
        reader.refuse("bad-shape", f"{name!r} with the shape {shape}", start)
    block = TENSOR_TYPES.get(kind)
    if block is not None and shape[0] % block.block:
        reader.refuse("bad-shape", f"{name!r} has rows of {shape[0]:,}, no multiple of {block.block}", start)
    size = None if block is None else numbers // block.block * block.block_bytes
    if offset % alignment or offset + (size or 0) >= 1 << 63:
        reader.refuse("bad-offset", f"{name!r} at the offset {offset:,}", start)
    return TensorInfo(name=name, shape=shape, ggml_type=kind, offset=offset, size_bytes=size)
