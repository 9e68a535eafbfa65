"""The planted faults are what they say: a server must not be able to tell the damaged file from the sound one."""

from pathlib import Path

import numpy as np
import pytest
from damaged_models import SWAPPED, coarser, swapped
from fakes.served import small_model
from gguf import GGUFReader, dequantize


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def test_swapped_layers_hold_each_others_tensors_and_nothing_else_moves(tmp_path: Path) -> None:
    source, target = small_model()[0], tmp_path / "swapped.gguf"
    swapped(source, target)
    assert source.stat().st_size == target.stat().st_size
    before, after = tensors(source), tensors(target)
    one, other = (f"blk.{layer}.ffn_up.weight" for layer in SWAPPED)
    assert (after[one] == before[other]).all()
    assert (after[other] == before[one]).all()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {int(name.split(".")[1]) for name in changed} == set(SWAPPED)


@pytest.mark.parametrize("levels", [12, 8])
def test_a_coarser_model_has_so_many_levels_and_the_same_range(tmp_path: Path, levels: int) -> None:
    source, target = small_model()[0], tmp_path / "coarse.gguf"
    coarser(levels)(source, target)
    assert source.stat().st_size == target.stat().st_size
    name = "blk.3.ffn_up.weight"
    pair = [next(t for t in GGUFReader(path).tensors if t.name == name) for path in (source, target)]
    fine, rough = (dequantize(tensor.data, tensor.tensor_type).reshape(-1, 32)[:500] for tensor in pair)
    assert max(len(np.unique(block)) for block in rough) <= levels < max(len(np.unique(block)) for block in fine)
    span = float(fine.max() - fine.min())
    assert np.abs(fine - rough).max() < span / 8
    assert float(rough.max()) == pytest.approx(float(fine.max()), abs=span / 20)
