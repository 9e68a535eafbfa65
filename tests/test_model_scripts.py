"""The models the tests stand on are what they claim to be."""

import shlex
from collections.abc import Callable
from pathlib import Path

import gguf
import k3_skeleton
import pytest
import tiny_k3


def test_the_skeleton_has_the_true_size_and_takes_no_room(skeleton: Callable[[str], Path]) -> None:
    files = sorted(skeleton("UD-IQ1_S").iterdir())
    apparent = sum(path.stat().st_size for path in files)
    # The published quant is 594.04 GB; the skeleton has one expert type where the real one mixes in a little Q8_0.
    assert apparent == pytest.approx(594_040_923_616, rel=0.002)
    assert sum(path.stat().st_blocks * 512 for path in files) < 10_000_000
    assert len(files) == int(files[0].stem.rpartition("-")[2])


def test_the_skeleton_counts_what_the_model_counts() -> None:
    tensors = list(k3_skeleton.tensors("UD-IQ1_S"))
    experts = [t for t in tensors if "_exps" in t.name]
    assert len(experts) == 92 * 3
    parameters = sum(
        int(gguf.GGML_QUANT_SIZES[t.kind][0]) * t.size_bytes // gguf.GGML_QUANT_SIZES[t.kind][1] for t in tensors
    )
    assert parameters == pytest.approx(2_779.5e9, rel=0.001)


def test_the_tiny_model_is_reproducible_and_sharded_like_the_real_one(tmp_path: Path) -> None:
    first, again = tiny_k3.write(tmp_path / "a"), tiny_k3.write(tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert [path.name for path in first] == [path.name for path in again]
    reader = gguf.GGUFReader(first[0])
    assert len(reader.tensors) == 0  # metadata only
    assert reader.fields["split.count"].contents() == len(first)
    assert tiny_k3.write(tmp_path / "c", seed=8)[1].read_bytes() != first[1].read_bytes()


def test_the_demo_shows_the_words_that_random_weights_think() -> None:
    text = (Path(tiny_k3.__file__).parent / "demo").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if '"$kimigguf" chat' in line]
    words = shlex.split(line)
    assert "--plain" in words  # else a terminal shows thinking as one line only, and there is nothing else
    assert int(words[words.index("--max-tokens") + 1]) >= 32
