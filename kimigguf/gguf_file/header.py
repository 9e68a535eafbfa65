"""A bounded, sans-I/O parser of everything in a GGUF file before its weights.

``parse`` takes the bytes from the start of a file and answers with a ``Header`` or how many bytes it needs to go on;
``HeaderReader`` is the same for bytes that come in pieces. Nothing is ever allocated by a number from the file: memory
follows the bytes that were fed, and counts that no header could have are refused. The format is that of
``ggml/src/gguf.cpp`` in llama.cpp and its ``docs/gguf.md``, versions 2 and 3, little-endian.
"""

import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.types import TENSOR_TYPES, tensor_bytes, type_name


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
    metadata: Mapping[str, Value] = field(hash=False)
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int

    @property
    def architecture(self) -> str | None:
        """``general.architecture``, such as ``kimi-k3``."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMore:
    """The header is not whole yet: at least ``size_bytes`` from the start of the file are needed."""

    size_bytes: int


MAX_HEADER_BYTES: Final = 256 << 20
"""Real ones have 7 MB (K3's tokenizer); what claims more is damaged or hostile."""
_MAX_KEYS: Final = 1 << 14
_MAX_TENSORS: Final = 1 << 17
_MAX_KEY_BYTES: Final = (1 << 16) - 1
_MAX_NAME_BYTES: Final = 63
"""``GGML_MAX_NAME`` less the closing zero."""
_MAX_DIMENSIONS: Final = 4
_MAX_KEPT_NUMBERS: Final = 4096
"""Longer arrays are skipped. Per-layer arrays are shorter, and nothing else is wanted."""
_MAX_KEPT_STRINGS: Final = 64
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_INT64_MAX: Final = (1 << 63) - 1

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Value types by their number in the file; 8 is a string, 9 an array."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_TYPE_AND_OFFSET: Final = struct.Struct("<IQ")

_Steps: TypeAlias = Generator[int, None, Header]


class HeaderReader:
    """Reads a header from bytes that come in pieces, each looked at once.

    Args:
        name: What errors call the file.
        size_bytes: The file's size where it is known: a header that would reach beyond it is refused at once.
    """

    def __init__(self, name: str = "the file", *, size_bytes: int | None = None) -> None:
        self.data = bytearray()
        """All bytes that were fed."""
        self.keys: dict[str, tuple[int, int]] = {}
        """Where in the data the entry of each key lies: its name, type and value."""
        self._name = name
        self._size_bytes = size_bytes
        self._at = 0
        self._steps = self._header()
        self._answer: Header | NeedMore = self._advance()

    def feed(self, data: bytes | memoryview) -> Header | NeedMore:
        """Take the bytes that follow those fed before.

        Raises:
            IntegrityError: ``not-gguf``, ``big-endian``, ``gguf-version``, ``header-cut``, ``bad-header`` or
                ``bad-tensor``, with the name and the offset.
        """
        if isinstance(self._answer, NeedMore):
            self.data += data
            if len(self.data) >= self._answer.size_bytes:
                self._answer = self._advance()
        return self._answer

    def _advance(self) -> Header | NeedMore:
        try:
            wanted = next(self._steps)
        except StopIteration as stop:
            header: Header = stop.value
            return header
        if wanted > MAX_HEADER_BYTES:
            self._bad(f"its header would be larger than {MAX_HEADER_BYTES >> 20} MiB")
        if self._size_bytes is not None and wanted > self._size_bytes:
            raise IntegrityError(
                f"{self._name} ends inside its header",
                code="header-cut",
                cause=f"what starts at byte {self._at} reaches to byte {wanted}, and the file has {self._size_bytes}",
            )
        return NeedMore(size_bytes=wanted)

    # -- the format, as generators that yield how many bytes they need in all -----------------------------------------

    def _header(self) -> _Steps:
        yield from self._have(4)
        if self.data[:4] != b"GGUF":
            raise IntegrityError(
                f"{self._name} is no GGUF file",
                code="not-gguf",
                cause=f"it starts with {bytes(self.data[:4])!r} at byte 0 instead of b'GGUF'",
            )
        self._at = 4
        version = yield from self._number(_U32)
        self._check_version(version)
        tensor_count = yield from self._number(_U64)
        if tensor_count > _MAX_TENSORS:
            self._bad(f"{tensor_count} tensors are impossible", at=8)
        key_count = yield from self._number(_U64)
        if key_count > _MAX_KEYS:
            self._bad(f"{key_count} metadata keys are impossible", at=16)
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            start = self._at
            key = yield from self._text(_MAX_KEY_BYTES, "key", start)
            if key in metadata:
                self._bad(f"the key {key} is there twice", at=start)
            metadata[key] = yield from self._value(key)
            self.keys[key] = start, self._at
        alignment = self._alignment(metadata)
        table_at = self._at
        tensors: list[TensorInfo] = []
        names: set[str] = set()
        for _ in range(tensor_count):
            tensor = yield from self._tensor(alignment)
            if tensor.name in names:
                self._bad(f"the tensor {tensor.name} is there twice", code="bad-tensor")
            names.add(tensor.name)
            tensors.append(tensor)
        overlap = overlapping(tensors)
        if overlap is not None:
            self._bad(f"the tensors {overlap[0].name} and {overlap[1].name} overlap", at=table_at, code="bad-tensor")
        return Header(
            version=version,
            metadata=metadata,
            tensors=tuple(tensors),
            alignment=alignment,
            data_offset=-(-self._at // alignment) * alignment,
        )

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0 and version:  # a small number with its bytes the other way round
            raise IntegrityError(
                f"{self._name} is a big-endian GGUF file",
                code="big-endian",
                cause=f"its version at byte 4 reads {version:#010x}; llama.cpp on this kind of machine refuses it too",
                hint="fetch a little-endian file",
            )
        if version not in {2, 3}:
            raise IntegrityError(
                f"{self._name} is a GGUF file of version {version}, and only 2 and 3 can be read",
                code="gguf-version",
                cause="the version stands at byte 4",
            )

    def _value(self, key: str) -> Generator[int, None, Value]:
        start = self._at
        kind = yield from self._number(_U32)
        if kind == _STRING:
            return (yield from self._string())
        if kind == _ARRAY:
            return (yield from self._array(key, start))
        if kind not in _SCALARS:
            self._bad(f"the key {key} has the unknown value type {kind}", at=start)
        return (yield from self._scalar(_SCALARS[kind]))

    def _array(self, key: str, start: int) -> Generator[int, None, Value]:
        kind = yield from self._number(_U32)
        length = yield from self._number(_U64)
        if kind != _STRING and kind not in _SCALARS:
            self._bad(f"the array {key} has elements of the unknown type {kind}", at=start)
        element = _U64 if kind == _STRING else _SCALARS[kind]
        if length * element.size > MAX_HEADER_BYTES:
            self._bad(f"the array {key} cannot have {length} elements", at=start)
        yield from self._have(length * element.size)  # at least so much follows
        if kind == _STRING:
            if length <= _MAX_KEPT_STRINGS:
                texts: list[Scalar] = []
                for _ in range(length):
                    texts.append((yield from self._string()))  # noqa: PERF401 -- comprehensions cannot yield
                return tuple(texts)
            yield from self._skip_strings(length)
            return SkippedArray(element_type=kind, length=length)
        first, self._at = self._at, self._at + length * element.size
        if length > _MAX_KEPT_NUMBERS:
            return SkippedArray(element_type=kind, length=length)
        return struct.unpack_from(f"<{length}{element.format[-1]}", self.data, first)

    def _skip_strings(self, count: int) -> Generator[int, None, None]:
        """Step over strings. 163,840 tokens pass here, so the loop holds nothing but the step."""
        unpack, data = _U64.unpack_from, self.data
        left = count
        while left:
            at, last = self._at, len(data) - 8
            while left and at <= last:
                end = at + 8 + unpack(data, at)[0]
                if end > last + 8:
                    break
                at = end
                left -= 1
            self._at = at
            if left:
                yield from self._have(8)
                yield from self._have(8 + unpack(data, at)[0])

    def _tensor(self, alignment: int) -> Generator[int, None, TensorInfo]:
        start = self._at
        name = yield from self._text(_MAX_NAME_BYTES, "tensor name", start)
        count = yield from self._number(_U32)
        if count > _MAX_DIMENSIONS:
            self._bad(f"the tensor {name} has {count} dimensions", at=start, code="bad-tensor")
        shape_of = struct.Struct(f"<{count}Q")
        yield from self._have(shape_of.size + _TYPE_AND_OFFSET.size)
        shape: tuple[int, ...] = shape_of.unpack_from(self.data, self._at)
        kind, offset = _TYPE_AND_OFFSET.unpack_from(self.data, self._at + shape_of.size)
        self._at += shape_of.size + _TYPE_AND_OFFSET.size
        values = 1
        for dimension in shape:
            values *= dimension
            if dimension > _INT64_MAX or values > _INT64_MAX:
                self._bad(f"the tensor {name} has the impossible shape {shape}", at=start, code="bad-tensor")
        known = TENSOR_TYPES.get(kind)
        if known and (shape[0] if shape else 1) % known.block:
            rows = f"rows of {shape[0] if shape else 1} values"
            self._bad(
                f"the tensor {name} has {rows}, and {type_name(kind)} packs {known.block} to a block",
                at=start,
                code="bad-tensor",
            )
        size = tensor_bytes(kind, shape)
        if offset % alignment or offset + (size or 0) > _INT64_MAX:
            self._bad(f"the tensor {name} lies at the impossible offset {offset}", at=start, code="bad-tensor")
        return TensorInfo(name=name, shape=shape, ggml_type=kind, offset=offset, size_bytes=size)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
            self._bad(f"the alignment {value} is no power of two up to {_MAX_ALIGNMENT}")
        return value

    # -- atoms --------------------------------------------------------------------------------------------------------

    def _have(self, count: int) -> Generator[int, None, None]:
        while len(self.data) < self._at + count:
            yield self._at + count

    def _number(self, form: struct.Struct) -> Generator[int, None, int]:
        yield from self._have(form.size)
        number: int = form.unpack_from(self.data, self._at)[0]
        self._at += form.size
        return number

    def _scalar(self, form: struct.Struct) -> Generator[int, None, Scalar]:
        yield from self._have(form.size)
        value: Scalar = form.unpack_from(self.data, self._at)[0]
        self._at += form.size
        return value

    def _bytes(self, most: int, what: str, start: int) -> Generator[int, None, bytes]:
        length = yield from self._number(_U64)
        if length > most:
            self._bad(f"a {what} of {length} bytes is impossible", at=start)
        yield from self._have(length)
        data = bytes(self.data[self._at : self._at + length])
        self._at += length
        return data

    def _string(self) -> Generator[int, None, str]:
        """A value. Those that are no UTF-8 (a broken licence text, say) are no reason to refuse a model."""
        data = yield from self._bytes(MAX_HEADER_BYTES, "string", self._at)
        return data.decode(errors="replace")

    def _text(self, most: int, what: str, start: int) -> Generator[int, None, str]:
        """A name: it decides what is read, and is shown, so it must be printable."""
        data = yield from self._bytes(most, what, start)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self._bad(f"a {what} is no UTF-8", at=start)
        if not text or not text.isprintable():
            self._bad(f"the {what} {text!r} is empty or holds control characters", at=start)
        return text

    def _bad(self, problem: str, *, at: int | None = None, code: str = "bad-header") -> NoReturn:
        raise IntegrityError(
            f"{self._name} is damaged at byte {self._at if at is None else at} of its header",
            code=code,
            cause=problem,
            hint="fetch the file again, or ask whoever made it",
        )


def parse(data: bytes, *, name: str = "the file") -> Header | NeedMore:
    """The header at the start of ``data``, or how many bytes of the file are needed at least.

    Raises:
        IntegrityError: As ``HeaderReader.feed``.
    """
    return HeaderReader(name).feed(data)


def overlapping(tensors: list[TensorInfo]) -> tuple[TensorInfo, TensorInfo] | None:
    """Two tensors that claim the same bytes, if there are any. One of unknown size claims its first byte."""
    before: TensorInfo | None = None
    for tensor in sorted((t for t in tensors if t.size_bytes != 0), key=lambda t: t.offset):
        if before is not None and before.offset + (before.size_bytes or 1) > tensor.offset:
            return before, tensor
        before = tensor
    return None
