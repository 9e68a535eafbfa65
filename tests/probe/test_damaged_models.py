"""The planted faults are what they say: a server must not be able to tell the damaged file from the sound one."""

from pathlib import Path

import numpy as np
import pytest
from damaged_models import SWAPPED, coarser, swapped
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

ROWS, COLUMNS = 4, 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Thirty layers of random weights in Q4_1 as SmolLM2 has them, with a norm that stays as it is."""
    path = tmp_path / "source.gguf"
    writer = GGUFWriter(path, "llama")
    weights = np.random.default_rng(7)
    for layer in range(30):
        for name in ("ffn_up", "attn_q"):
            made = quantize(weights.normal(size=(ROWS, COLUMNS)).astype("f4"), GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", made, raw_dtype=GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", weights.normal(size=COLUMNS).astype("f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def test_swapped_layers_hold_each_others_tensors_and_nothing_else_moves(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "swapped.gguf"
    swapped(source, target)
    assert source.stat().st_size == target.stat().st_size
    before, after = tensors(source), tensors(target)
    for kind in ("ffn_up", "attn_q"):
        one, other = (f"blk.{layer}.{kind}.weight" for layer in SWAPPED)
        assert (after[one] == before[other]).all()
        assert (after[other] == before[one]).all()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {int(name.split(".")[1]) for name in changed} == set(SWAPPED)


@pytest.mark.parametrize("levels", [12, 8])
def test_a_coarser_model_has_so_many_levels_and_the_same_range(source: Path, tmp_path: Path, levels: int) -> None:
    target = tmp_path / "coarse.gguf"
    coarser(levels)(source, target)
    assert source.stat().st_size == target.stat().st_size
    read = [{tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (source, target)]
    for name, fine_tensor in read[0].items():
        if fine_tensor.tensor_type.name != "Q4_1":
            assert (fine_tensor.data == read[1][name].data).all()
            continue
        fine, rough = (dequantize(one[name].data, one[name].tensor_type).reshape(-1, 32) for one in read)
        assert max(len(np.unique(block)) for block in rough) <= levels < max(len(np.unique(block)) for block in fine)
        span = float(fine.max() - fine.min())
        assert np.abs(fine - rough).max() < span / 8
        assert float(rough.max()) == pytest.approx(float(fine.max()), abs=span / 20)
