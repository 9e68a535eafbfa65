"""Types of a parsed GGUF header (the parser follows)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


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
