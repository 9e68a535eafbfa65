"""Models as memory sees them, from the catalogue and from headers."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.errors import IntegrityError, UsageError
from kimigguf.gguf_file.header import Header, TensorInfo
from kimigguf.gguf_file.shards import ShardFile, ShardSet, find_set, read_set
from kimigguf.memory.model import LayerKind, ModelSpec, Source
from kimigguf.units import MB, MIB

PROFILE = load_model(environ={})


def shards(metadata: Mapping[str, object], tensors: dict[str, tuple[int, int | None]]) -> ShardSet:
    """A set of one file; tensors by name as (offset, size or None)."""
    infos = tuple(
        TensorInfo(name=name, shape=(32,), ggml_type=0, offset=offset, size_bytes=size)
        for name, (offset, size) in tensors.items()
    )
    header = Header(version=3, metadata=dict(metadata), tensors=infos, alignment=32, data_offset=64)  # type: ignore[arg-type]  # broken on purpose in places
    return ShardSet(files=(ShardFile(name="m.gguf", size_bytes=64 + 1024, header=header, header_path=Path("m.gguf")),))


@pytest.mark.parametrize("quant", PROFILE.quants, ids=lambda quant: quant.name)
def test_the_catalogues_model_weighs_what_is_downloaded(quant: object) -> None:
    found = find_quant(PROFILE, getattr(quant, "name", ""))
    spec = ModelSpec.from_profile(PROFILE, found)
    header = found.size_bytes - spec.weight_bytes
    assert 6 * MB < header < 9 * MB  # the tokenizer and the tensor tables are no weights
    assert len(spec.weights) == 2573
    assert spec.source is Source.PROFILE


def test_the_catalogues_trunk_is_what_was_measured_on_a_gpu() -> None:
    spec = ModelSpec.from_profile(PROFILE, find_quant(PROFILE, "UD-IQ1_S"))
    trunk = sum(layer.trunk_bytes for layer in spec.layers) + spec.head_bytes
    assert abs(trunk / MIB - 58_133.85) < 0.1


def test_headers_and_catalogue_agree_on_what_layers_keep(skeleton: Callable[[str], Path]) -> None:
    from_files = ModelSpec.from_shards(read_set(find_set(skeleton("UD-IQ1_S"))))
    from_catalogue = ModelSpec.from_profile(PROFILE, find_quant(PROFILE, "UD-IQ1_S"))
    assert [layer.kind for layer in from_files.layers] == [layer.kind for layer in from_catalogue.layers]
    assert [layer.state_bytes for layer in from_files.layers] == [layer.state_bytes for layer in from_catalogue.layers]
    assert sum(layer.kind is LayerKind.MLA for layer in from_files.layers) == 24
    assert from_files.source is Source.HEADER
    assert not from_files.is_tied


def test_a_model_that_nobody_described_is_refused_not_guessed() -> None:
    other = load_model("kimi-k3.1-pro", environ={})
    with pytest.raises(UsageError) as caught:
        ModelSpec.from_profile(other, PROFILE.quants[0])
    assert caught.value.code == "no-facts"


def test_a_tensor_of_an_unknown_type_is_measured_by_its_neighbour() -> None:
    spec = ModelSpec.from_shards(
        shards(
            {"general.architecture": "new", "new.block_count": 1},
            {"blk.0.a.weight": (0, None), "output.weight": (96, 128), "blk.0.b.weight": (256, None)},
        )
    )
    assert spec.layers[0].trunk_bytes == 96 + (1024 - 256)
    assert spec.head_bytes == 128


def test_tensors_beyond_the_stated_layers_are_an_error_not_an_index() -> None:
    with pytest.raises(IntegrityError) as caught:
        ModelSpec.from_shards(
            shards({"general.architecture": "llama", "llama.block_count": 1}, {"blk.1.a.weight": (0, 64)})
        )
    assert caught.value.code == "bad-layers"


def test_files_that_do_not_say_what_they_are_are_refused() -> None:
    with pytest.raises(IntegrityError) as caught:
        ModelSpec.from_shards(shards({}, {"a": (0, 64)}))
    assert caught.value.code == "no-architecture"


def attention(architecture: str, **keys: object) -> ModelSpec:
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 2,
        f"{architecture}.embedding_length": 4096,
        f"{architecture}.attention.head_count": 32,
    } | {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return ModelSpec.from_shards(shards(metadata, {"blk.0.a.weight": (0, 64)}))


def test_ordinary_attention_caches_keys_and_values_of_its_kv_heads() -> None:
    layer = attention("llama", attention__head_count_kv=8).layers[1]
    assert (layer.kind, layer.key_width, layer.value_width) == (LayerKind.ATTENTION, 1024, 1024)


def test_a_qwen_moe_takes_its_own_head_size() -> None:
    spec = attention("qwen3moe", attention__head_count_kv=4, attention__key_length=128, attention__value_length=128)
    assert (spec.layers[0].key_width, spec.layers[0].value_width) == (512, 512)


def test_deepseek2_caches_the_latent_only_when_its_file_is_made_for_it() -> None:
    new = attention(
        "deepseek2", attention__head_count_kv=1, attention__key_length=576, attention__value_length=512,
        attention__key_length_mla=192,
    )  # fmt: skip
    assert (new.layers[0].kind, new.layers[0].key_width, new.layers[0].value_width) == (LayerKind.MLA, 576, 0)
    old = attention("deepseek2", attention__head_count_kv=32, attention__key_length=192, attention__value_length=128)
    assert (old.layers[0].key_width, old.layers[0].value_width) == (32 * 192, 32 * 128)


def test_kimi_linear_has_a_state_where_it_has_no_heads() -> None:
    spec = attention(
        "kimi-linear", attention__head_count_kv=(0, 1), attention__key_length=576, attention__value_length=512,
        attention__key_length_mla=192, kda__head_dim=128, ssm__conv_kernel=4,
    )  # fmt: skip
    assert [layer.kind for layer in spec.layers] == [LayerKind.KDA, LayerKind.MLA]
    assert spec.layers[0].state_bytes == 4 * (3 * 3 * 32 * 128 + 32 * 128 * 128)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("mamba9", {}),
        ("llama", {"attention__sliding_window": 4096, "attention__head_count_kv": 8}),
        ("deepseek2", {"nextn_predict_layers": 1, "attention__head_count_kv": 1}),
        ("kimi-linear", {"attention__head_count_kv": (0, 1), "attention__key_length_mla": 192}),
    ],
)
def test_a_cache_whose_rule_is_not_known_is_unknown_not_zero(architecture: str, keys: dict[str, object]) -> None:
    layer = attention(architecture, **keys).layers[0]
    assert (layer.kind, layer.key_width, layer.state_bytes) == (None, None, None)
