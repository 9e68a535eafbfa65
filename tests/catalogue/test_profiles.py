"""The catalogue says what is published, and finds what a user means."""

import pytest

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.errors import UsageError

K3 = load_model("kimi-k3")


def test_nine_quants_with_their_exact_sizes() -> None:
    assert {quant.name: quant.size_bytes for quant in K3.quants} == {
        "UD-Q1_0": 466_369_456_320,
        "UD-TQ1_0": 508_912_281_952,
        "UD-TQ2_0": 551_455_107_488,
        "UD-IQ1_S": 594_040_923_616,
        "UD-IQ1_M": 648_872_012_448,
        "UD-IQ2_XXS": 711_067_773_664,
        "UD-Q2_K_XL": 861_277_858_912,
        "UD-Q4_K_XL": 1_508_668_683_104,
        "UD-Q8_K_XL": 1_561_157_884_384,
    }


def test_trunk_is_the_same_in_all_quants_but_the_bf16_one() -> None:
    # 57.9 GiB at Q8_0 and 106.8 GiB at BF16, to the rounding of the published expert sizes.
    for quant in K3.quants:
        expected = 106.8 if quant.trunk_type == "BF16" else 57.9
        assert quant.trunk_bytes is not None
        assert quant.trunk_bytes / 2**30 == pytest.approx(expected, abs=0.15)


def test_fork_only_quants_say_why_and_what_could_load_them() -> None:
    for name in ("UD-Q1_0", "UD-TQ1_0", "UD-TQ2_0"):
        need = find_quant(K3, name).engine
        assert need.min_build is None
        assert "fork" in (need.reason or "")
        assert need.alternative


def test_layers_are_69_kda_and_24_mla() -> None:
    kinds = K3.metadata["kimi-k3.attention.head_count_kv"]
    assert isinstance(kinds, tuple)
    assert (len(kinds), sum(1 for kind in kinds if kind == 0)) == (93, 69)


@pytest.mark.parametrize("text", ["UD-IQ1_M", "ud-iq1_m", "IQ1_M", " iq1-m "])
def test_a_quant_is_found_as_people_write_it(text: str) -> None:
    assert find_quant(K3, text).name == "UD-IQ1_M"


@pytest.mark.parametrize(
    ("text", "nearest"), [("UD-IQ1", "UD-IQ1_S"), ("Q2_K", "UD-Q2_K_XL"), ("Q4_K_M", "UD-Q4_K_XL")]
)
def test_unknown_quant_names_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_quant(K3, text)
    assert caught.value.code == "unknown-quant"
    assert nearest in (caught.value.hint or "")


def test_k31_pro_is_known_and_unsupported_with_its_reason() -> None:
    profile = load_model("kimi-k3.1-pro")
    assert profile.quants == ()
    assert "DSA" in (profile.unsupported_reason or "")
