"""A layout said in llama.cpp's words comes out of llama.cpp's own arithmetic as the same layout."""

import re
import struct
from dataclasses import replace

import pytest
from fakes.plans import make_layout
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.engines.offload import Offload, offload
from kimigguf.errors import UsageError
from kimigguf.memory.layout import HOST, Layout


def f32(value: float) -> float:
    """Round to single precision, in which llama.cpp does this arithmetic."""
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def engine_layer_device(words: Offload, layer: int, layer_count: int, device_count: int) -> int | None:
    """Where llama.cpp puts a layer (``layer_count`` is the output head): its rule, restated for the test."""
    if device_count == 0:
        return None
    first = max(layer_count + 1 - words.gpu_layers, 0)
    active = min(words.gpu_layers, layer_count + 1)
    if layer < first or layer - first >= active:
        return None
    split = words.split or (1,) * device_count
    total, ends = 0.0, []
    for part in split:
        total = f32(total + part)
        ends.append(total)
    ends = [f32(end / total) for end in ends]
    wanted = f32(f32(float(layer - first)) / f32(float(active)))
    return next(index for index, end in enumerate(ends) if end > wanted)


def engine_tensor_device(words: Offload, name: str, layer_device: int | None) -> int | None:
    for rule in words.overrides:
        if re.search(rule.pattern, name):
            return rule.device
    return layer_device


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    devices = draw(st.integers(0, 8))
    count = draw(st.integers(1, 93))
    place = st.integers(0, devices - 1) if devices else st.nothing()
    anywhere = st.none() | place if devices else st.none()
    trunk = sorted(draw(st.lists(anywhere, min_size=count, max_size=count)), key=lambda p: -1 if p is None else p)
    experts = draw(st.lists(anywhere, min_size=count, max_size=count))
    return make_layout(trunk, experts=experts, head=draw(anywhere), devices=devices)


@given(layouts())
def test_every_tensor_lands_where_the_layout_has_it(layout: Layout) -> None:
    words = offload(layout)
    count = len(layout.layers)
    for index, place in enumerate(layout.layers):
        device = engine_layer_device(words, index, count, len(layout.devices))
        assert device == place.trunk
        assert engine_tensor_device(words, f"blk.{index}.attn_q_a.weight", device) == place.trunk
        assert engine_tensor_device(words, f"blk.{index}.ffn_down_shexp.weight", device) == place.trunk
        assert engine_tensor_device(words, f"blk.{index}.ffn_routed_up.weight", device) == place.trunk
        for kind in ("up", "down", "gate"):
            assert engine_tensor_device(words, f"blk.{index}.ffn_{kind}_exps.weight", device) == place.experts
    head = engine_layer_device(words, count, count, len(layout.devices))
    assert engine_tensor_device(words, "output.weight", head) == layout.head
    assert engine_tensor_device(words, "output_norm.weight", head) == layout.head


def test_experts_on_the_host_are_one_readable_rule() -> None:
    words = offload(make_layout([0] * 93, experts=[HOST] * 93, head=0, devices=1))
    assert words.gpu_layers == 94
    assert words.split == ()
    assert [rule.pattern for rule in words.overrides] == [r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"]


def test_a_single_tensor_moved_by_name_wins_over_the_rule_for_its_kind() -> None:
    layout = Layout(
        devices=("gpu0",),
        layers=make_layout([0, 0], experts=[None, None]).layers,
        head=0,
        moved=(("blk.1.ffn_up_exps.weight", 0),),
    )
    words = offload(layout)
    assert engine_tensor_device(words, "blk.1.ffn_up_exps.weight", 0) == 0
    assert engine_tensor_device(words, "blk.1.ffn_down_exps.weight", 0) is HOST
    assert engine_tensor_device(words, "blk.11.ffn_up_exps.weight", 0) is HOST


def test_no_rule_holds_a_character_that_splits_the_option() -> None:
    words = offload(make_layout([None, 0, 1], experts=[1, None, 0], head=None, devices=2))
    assert words.overrides
    assert not any(set(",=") & set(rule.pattern) for rule in words.overrides)


@pytest.mark.parametrize("trunk", [[0, None], [1, 0], [0, 1, 0]])
def test_a_trunk_that_llama_cpp_cannot_place_is_refused(trunk: list[int | None]) -> None:
    with pytest.raises(UsageError, match="trunk"):
        offload(make_layout(trunk, head=None, devices=2))


def test_a_layout_that_names_a_device_it_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="does not list"):
        offload(make_layout([0, 3], head=0, devices=2))


def test_pipelining_is_switched_off_by_a_rule_that_names_no_tensor() -> None:
    """Not by one for the embedding: where the head is tied to it, llama.cpp would take the head along."""
    trunk: list[int | None] = [0, 0, 0, 1, 1, 1]
    whole = make_layout(trunk, head=1, devices=2)
    assert offload(whole).overrides == ()
    (rule,) = offload(replace(whole, overridden=True)).overrides
    names = [
        "token_embd.weight",
        "output.weight",
        "output_norm.weight",
        "blk.0.attn_q.weight",
        "blk.5.ffn_up_exps.weight",
    ]
    assert not any(re.search(rule.pattern, name) for name in names)
    apart = make_layout([0] * 6, experts=[HOST] * 6, head=0, devices=1)
    assert offload(replace(apart, overridden=True)) == offload(apart)  # it has rules of its own
