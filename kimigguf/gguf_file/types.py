"""The tensor types of ggml: how many values make a block, and how many bytes it takes.

Numbers, names and sizes are those of ``enum ggml_type`` and ``type_traits`` in llama.cpp's ``ggml.h`` and ``ggml.c``
(build 11434). Numbers that were withdrawn (4, 5, 31-33, 36-38) or exist only in forks are unknown here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """``block`` values are stored together in ``block_bytes`` bytes; a row holds whole blocks only."""

    name: str
    block: int
    block_bytes: int


def _type(name: str, block: int, block_bytes: int) -> TensorType:
    return TensorType(name=name, block=block, block_bytes=block_bytes)


TENSOR_TYPES: Final[Mapping[int, TensorType]] = MappingProxyType(
    {
        0: _type("F32", 1, 4),
        1: _type("F16", 1, 2),
        2: _type("Q4_0", 32, 18),
        3: _type("Q4_1", 32, 20),
        6: _type("Q5_0", 32, 22),
        7: _type("Q5_1", 32, 24),
        8: _type("Q8_0", 32, 34),
        9: _type("Q8_1", 32, 36),
        10: _type("Q2_K", 256, 84),
        11: _type("Q3_K", 256, 110),
        12: _type("Q4_K", 256, 144),
        13: _type("Q5_K", 256, 176),
        14: _type("Q6_K", 256, 210),
        15: _type("Q8_K", 256, 292),
        16: _type("IQ2_XXS", 256, 66),
        17: _type("IQ2_XS", 256, 74),
        18: _type("IQ3_XXS", 256, 98),
        19: _type("IQ1_S", 256, 50),
        20: _type("IQ4_NL", 32, 18),
        21: _type("IQ3_S", 256, 110),
        22: _type("IQ2_S", 256, 82),
        23: _type("IQ4_XS", 256, 136),
        24: _type("I8", 1, 1),
        25: _type("I16", 1, 2),
        26: _type("I32", 1, 4),
        27: _type("I64", 1, 8),
        28: _type("F64", 1, 8),
        29: _type("IQ1_M", 256, 56),
        30: _type("BF16", 1, 2),
        34: _type("TQ1_0", 256, 54),
        35: _type("TQ2_0", 256, 66),
        39: _type("MXFP4", 32, 17),
        40: _type("NVFP4", 64, 36),
        41: _type("Q1_0", 128, 18),
        42: _type("Q2_0", 64, 18),
    }
)
"""Every type that mainline llama.cpp reads, by its number in the file."""


def type_name(ggml_type: int) -> str:
    """The type's name, or its number in words where this version does not know it."""
    known = TENSOR_TYPES.get(ggml_type)
    return known.name if known else f"type {ggml_type}"


def tensor_bytes(ggml_type: int, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor whose rows (``shape[0]`` values each) hold whole blocks; None for an unknown type."""
    known = TENSOR_TYPES.get(ggml_type)
    return None if known is None else math.prod(shape) // known.block * known.block_bytes
