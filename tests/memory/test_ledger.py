"""The rows of the ledger: figures that were published or measured, and laws that hold for every placement."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.memory.compute import compute_bytes, is_pipelined
from kimigguf.memory.layout import HOST, LayerPlace, Layout
from kimigguf.memory.ledger import Column, Component, Ledger, ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import KvType, Settings
from kimigguf.units import GIB, MIB

PROFILE = load_model(environ={})
SPEC = ModelSpec.from_profile(PROFILE, find_quant(PROFILE, "UD-IQ1_S"))
MXFP4 = ModelSpec.from_profile(PROFILE, find_quant(PROFILE, "UD-Q4_K_XL"))
ON_HOST = Layout.on_host(93)


def size(counted: Ledger, component: Component) -> int:
    return sum(row.size_bytes or 0 for row in counted.rows if row.component is component)


def on_gpus(*layers: int, experts: int = 0) -> Layout:
    """So many layers per GPU, the head on the last; experts of the last ``experts`` layers with them."""
    trunk = [gpu for gpu, count in enumerate(layers) for _ in range(count)]
    places = tuple(
        LayerPlace(trunk=gpu, experts=gpu if index >= 93 - experts else HOST) for index, gpu in enumerate(trunk)
    )
    return Layout(devices=tuple(f"gpu{i}" for i in range(len(layers))), layers=places, head=len(layers) - 1)


def test_a_token_costs_27648_bytes_of_cache_and_a_slot_443_mib_of_state() -> None:
    counted = ledger(SPEC, Settings(context_tokens=131_072, slots=1), ON_HOST)
    assert size(counted, Component.KV_CACHE) == 131_072 * 27_648
    assert size(counted, Component.RECURRENT_STATE) == 464_633_856


@pytest.mark.parametrize(("kv_type", "factor"), [(KvType.Q8_0, 0.53125), (KvType.Q4_0, 0.28125), (KvType.F32, 2.0)])
def test_the_cache_shrinks_with_its_type_by_whole_blocks(kv_type: KvType, factor: float) -> None:
    counted = ledger(SPEC, Settings(context_tokens=65_536, kv_type=kv_type), ON_HOST)
    assert size(counted, Component.KV_CACHE) == 65_536 * 27_648 * factor


def test_slots_share_the_context_in_equal_parts_rounded_up_to_256_tokens() -> None:
    assert Settings(context_tokens=100_000, slots=3).stream_tokens == 33_536
    assert Settings(context_tokens=100_000, slots=3, unified_cache=True).stream_tokens == 100_096
    apart = ledger(SPEC, Settings(context_tokens=100_000, slots=3), ON_HOST)
    assert size(apart, Component.KV_CACHE) == 3 * 33_536 * 27_648


@pytest.mark.parametrize(
    ("asked", "mib"),
    [
        (Settings(context_tokens=4096), 518),
        (Settings(context_tokens=131_072), 642),
        (Settings(context_tokens=1_048_576, ubatch_tokens=2048), 6152),
        (Settings(context_tokens=131_072, slots=4), 592),
        (Settings(context_tokens=16_384, flash_attention=False), 3598),
    ],
)
def test_the_hosts_compute_buffer_is_what_was_measured(asked: Settings, mib: int) -> None:
    sizes = compute_bytes(SPEC, asked, ON_HOST)
    assert sizes is not None
    assert sizes[-1] // MIB == mib


def test_pipelining_multiplies_the_mask_on_every_device_and_overrides_stop_it() -> None:
    asked = Settings(context_tokens=524_288)
    plain = on_gpus(47, 46, experts=93)
    assert is_pipelined(asked, plain)
    assert not is_pipelined(asked, replace(plain, overridden=True))
    assert not is_pipelined(replace(asked, kv_offload=False), plain)
    piped, single = compute_bytes(SPEC, asked, plain), compute_bytes(SPEC, asked, replace(plain, overridden=True))
    assert piped is not None
    assert single is not None
    mask = 2 * 524_288 * 512
    assert all(more - less >= 3 * mask for more, less in zip(piped, single, strict=True))


def test_a_gpu_that_takes_over_work_needs_room_for_the_experts_it_is_lent() -> None:
    layout = on_gpus(50, 43)
    asked = Settings(context_tokens=32_768)
    plain, lent = (compute_bytes(SPEC, replace(asked, offload_operations=on), layout) for on in (False, True))
    assert plain is not None
    assert lent is not None
    expert = max(weight.size_bytes for weight in SPEC.weights if "_exps." in weight.name)
    assert lent[0] - plain[0] >= expert  # the first GPU holds a copy, the others none
    assert lent[1] <= plain[1]
    assert lent[2] <= plain[2]
    few = replace(asked, ubatch_tokens=16)  # small batches stay where their weights are
    assert compute_bytes(SPEC, replace(few, offload_operations=True), layout) == compute_bytes(SPEC, few, layout)


def test_the_defaults_of_a_server_hide_63_gib_of_host_memory() -> None:
    counted = ledger(SPEC, Settings(slots=4, checkpoints=32, prompt_cache_bytes=8 * GIB), ON_HOST)
    beside = counted.total_bytes(HOST, column=Column.BESIDE)
    assert beside == 4 * 32 * 464_633_856 + 8 * GIB


def test_a_prompt_cache_without_a_limit_is_unknown() -> None:
    counted = ledger(SPEC, Settings(prompt_cache_is_capped=False), ON_HOST)
    assert [row.component for row in counted.unknown] == [Component.PROMPT_CACHE]


def test_repacked_experts_are_counted_though_the_engine_leaves_them_out() -> None:
    kept = ledger(MXFP4, Settings(repack=False), ON_HOST)
    repacked = ledger(MXFP4, Settings(repack=True), ON_HOST)
    assert size(kept, Component.REPACKED) == 0
    assert size(repacked, Component.REPACKED) == size(kept, Component.EXPERTS)
    assert repacked.total_bytes(HOST) == kept.total_bytes(HOST)
    assert repacked.total_bytes(HOST, column=Column.MODEL) < 60 * GIB
    assert "--no-repack" in str([row.note for row in repacked.rows if row.component is Component.REPACKED])


def test_types_that_no_cpu_rearranges_stay_in_the_file_with_repacking_on() -> None:
    assert size(ledger(SPEC, Settings(repack=True), ON_HOST), Component.REPACKED) == 0


def test_a_model_whose_graph_is_not_known_says_unknown_for_the_buffer_and_not_zero() -> None:
    other = replace(SPEC, architecture="other")
    unknown = {row.component for row in ledger(other, Settings(), ON_HOST).unknown}
    assert unknown == {Component.COMPUTE}


def test_a_tied_head_on_a_device_is_a_second_copy() -> None:
    tied = replace(SPEC, weights=tuple(w for w in SPEC.weights if w.name != "output.weight"), head_bytes=28_672)
    apart = ledger(tied, Settings(), on_gpus(93))
    assert size(apart, Component.HEAD) == 28_672 + tied.embedding_bytes
    assert size(ledger(tied, Settings(), ON_HOST), Component.HEAD) == 28_672


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    devices = draw(st.integers(0, 4))
    places = st.sampled_from([HOST, *range(devices)])
    layers = [LayerPlace(trunk=draw(places), experts=draw(places)) for _ in range(93)]
    moved = draw(st.dictionaries(st.sampled_from([w.name for w in SPEC.weights]), places, max_size=5))
    names = tuple(f"gpu{index}" for index in range(devices))
    return Layout(devices=names, layers=tuple(layers), head=draw(places), moved=tuple(moved.items()))


@settings(max_examples=25, deadline=None)
@given(layouts(), st.sampled_from([1, 3, 4]))
def test_every_byte_lies_somewhere_whatever_the_placement(layout: Layout, slots: int) -> None:
    counted = ledger(SPEC, Settings(slots=slots, context_tokens=8192), layout)
    places = (*range(len(layout.devices)), HOST)
    assert sum(counted.total_bytes(place, column=Column.MODEL) for place in places) == SPEC.weight_bytes
    context = sum(counted.total_bytes(place, column=Column.CONTEXT) for place in places)
    here = ledger(SPEC, Settings(slots=slots, context_tokens=8192), ON_HOST)
    assert context == here.total_bytes(HOST, column=Column.CONTEXT)
    assert all(row.size_bytes is None or row.size_bytes >= 0 for row in counted.rows)


@settings(max_examples=12, deadline=None)
@given(st.integers(8, 2048), st.integers(1, 600), st.sampled_from([64, 256, 512]))
def test_a_longer_context_never_needs_less(hundreds: int, more: int, ubatch: int) -> None:
    layout = on_gpus(50, 43, experts=20)
    sizes = [
        ledger(SPEC, Settings(context_tokens=tokens * 256, ubatch_tokens=ubatch), layout)
        for tokens in (hundreds, hundreds + more)
    ]
    for place in (0, 1, HOST):
        assert sizes[1].total_bytes(place) >= sizes[0].total_bytes(place)
