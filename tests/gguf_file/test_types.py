"""Block sizes decide every byte of the ledger: they are held against llama.cpp's own package."""

import gguf
import pytest

from kimigguf.gguf_file.types import TENSOR_TYPES, tensor_bytes, type_name


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_every_block_is_as_large_as_the_engine_says(kind: gguf.GGMLQuantizationType) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind is gguf.GGMLQuantizationType.Q8_1:
        # The package still has the two 32-bit floats of old; ggml-common.h has had two halves since 2024.
        block_bytes = 2 + 2 + 32
    ours = TENSOR_TYPES[kind.value]
    assert (ours.name, ours.block, ours.block_bytes) == (kind.name, block, block_bytes)


def test_no_type_is_known_here_that_the_engine_does_not_know() -> None:
    newer = {42}  # Q2_0: in ggml.h of build 11434, not yet in the package
    assert set(TENSOR_TYPES) - newer == {kind.value for kind in gguf.GGMLQuantizationType}


def test_an_expert_tensor_of_kimi_k3_has_the_published_size() -> None:
    # 92 layers x 3 x 896 experts of 3584 x 3072 at 1.5625 bits are UD-IQ1_S's 495.3 GiB of experts.
    assert tensor_bytes(19, (3584, 3072, 896)) == 3584 * 3072 * 896 // 256 * 50
    size = tensor_bytes(19, (3584, 3072, 896))
    assert size is not None
    assert 92 * 3 * size / 2**30 == pytest.approx(495.3, rel=1e-3)


def test_a_type_of_a_fork_is_unknown_and_not_a_guess() -> None:
    assert tensor_bytes(66, (256, 4)) is None
    assert type_name(66) == "type 66"
    assert type_name(39) == "MXFP4"
