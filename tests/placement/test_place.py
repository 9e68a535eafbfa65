"""Placement of K3 by tables and by property: every byte once, no budget broken, more memory never worse."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind, Ram
from kimigguf.memory.compute import is_pipelined
from kimigguf.memory.layout import HOST, Layout
from kimigguf.memory.ledger import Column, Component
from kimigguf.memory.model import ModelSpec, Part
from kimigguf.memory.settings import KvType, Settings
from kimigguf.placement.budget import Budget, budget
from kimigguf.placement.place import place
from kimigguf.placement.placed import Placed, Policy, Shortfall, device_need_bytes, resident_bytes
from kimigguf.units import GIB, MIB

PROFILE = load_model()
QUANTS = ("UD-IQ1_S", "UD-IQ1_M", "UD-IQ2_XXS", "UD-Q2_K_XL", "UD-Q4_K_XL", "UD-Q8_K_XL")
SPECS = {name: ModelSpec.from_profile(PROFILE, find_quant(PROFILE, name)) for name in QUANTS}
LAYER_EXPERTS = {name: max(layer.expert_bytes for layer in spec.layers) for name, spec in SPECS.items()}

some_settings = st.builds(
    Settings,
    context_tokens=st.sampled_from([4096, 32768, 131072, 262144, 1048576]),
    slots=st.sampled_from([1, 2, 4, 8]),
    ubatch_tokens=st.sampled_from([256, 512, 2048, 4096]),
    batch_tokens=st.just(4096),
    kv_type=st.sampled_from([KvType.F16, KvType.Q8_0, KvType.Q4_0]),
)
some_devices = st.lists(st.sampled_from([4, 8, 11, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180]), max_size=16)
quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def rough_buffers(_: ModelSpec, wanted: Settings, layout: Layout) -> tuple[int, ...]:
    """Stands in for the engine's allocator (40 ms a question) where a property is tried on many machines."""
    copies = 4 if len(layout.devices) > 1 and not layout.is_overridden else 1
    per_token = MIB + 2 * wanted.stream_tokens * copies
    runs = [[i for i, place in enumerate(layout.layers) if place.trunk == d] for d in range(len(layout.devices))]
    return (*(wanted.effective_ubatch_tokens * (per_token + run[-1] * 4096) if run else 0 for run in runs), 512 * MIB)


@pytest.fixture
def cheap_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.memory.ledger.compute_bytes", rough_buffers)


def budget_of(ram_gib: float, devices_gib: Sequence[float], kind: MemoryKind = MemoryKind.DISCRETE) -> Budget:
    accelerators = tuple(Accelerator(name="GPU", memory_kind=kind, total_bytes=int(size * GIB)) for size in devices_gib)
    machine = Machine(name="m", source="test", ram=Ram(total_bytes=int(ram_gib * GIB)), accelerators=accelerators)
    return budget(machine)


def check(spec: ModelSpec, have: Budget, placed: Placed) -> None:
    model_rows = [row for row in placed.ledger.rows if row.column is Column.MODEL]
    assert sum(row.size_bytes or 0 for row in model_rows) == spec.weight_bytes, "every tensor exactly once"
    for index, device in enumerate(have.devices[: len(placed.layout.devices)]):
        holds = any(index in (place.trunk, place.experts) for place in placed.layout.layers)
        moved = any(where == index for _, where in placed.layout.moved)
        if holds or moved or placed.layout.head == index:
            assert device_need_bytes(placed.ledger, index) <= (device.usable_bytes or 0), device.name
    names = {weight.name for weight in spec.weights}
    assert all(name in names for name, _ in placed.layout.moved)
    host = placed.ledger.total_bytes(HOST)
    shared = sum(device_need_bytes(placed.ledger, i) for i, device in enumerate(have.devices) if device.unified)
    assert have.ram_bytes is not None
    assert host + shared - placed.streamed_bytes <= have.ram_bytes


def host_trunks(placed: Placed) -> int:
    return sum(place.trunk is HOST for place in placed.layout.layers)


def host_expert_bytes(placed: Placed) -> int:
    return sum(r.size_bytes or 0 for r in placed.ledger.rows if r.device is HOST and r.component is Component.EXPERTS)


def check_filled(quant: str, have: Budget, answer: Placed) -> None:
    if host_trunks(answer) == 0 and host_expert_bytes(answer):
        for index, device in enumerate(have.devices):
            unused = (device.usable_bytes or 0) - device_need_bytes(answer.ledger, index)
            run = [i for i, place in enumerate(answer.layout.layers) if place.trunk == index]
            assert not run or unused <= LAYER_EXPERTS[quant], device.name


def largest_expert_tensor(quant: str) -> int:
    return max(weight.size_bytes for weight in SPECS[quant].weights if weight.part is Part.EXPERTS)


def layers_with_experts_on_another_device(placed: Placed, spec: ModelSpec) -> int:
    moved = dict(placed.layout.moved)
    away = set[int]()
    for weight in spec.weights:
        if weight.part is Part.EXPERTS and weight.layer is not None:
            layer = placed.layout.layers[weight.layer]
            if moved.get(weight.name, layer.experts) not in {HOST, layer.trunk}:
                away.add(weight.layer)
    return len(away)


@pytest.mark.usefixtures("cheap_buffers")
@quick
@given(st.sampled_from(QUANTS), st.integers(64, 2048), some_devices, some_settings, st.booleans())
def test_every_byte_has_one_place_and_no_budget_is_broken(
    quant: str, ram_gib: int, devices: list[int], wanted: Settings, may_stream: bool
) -> None:
    have = budget_of(ram_gib, devices)
    answer = place(SPECS[quant], have, wanted, policy=Policy(may_stream=may_stream))
    if isinstance(answer, Placed):
        check(SPECS[quant], have, answer)
        assert bool(answer.gave_way) == (answer.settings != wanted), "nothing gives way silently"
    else:
        assert answer.missing_bytes > 0


@pytest.mark.usefixtures("cheap_buffers")
@quick
@given(st.sampled_from(QUANTS), some_devices.filter(bool), some_settings)
def test_devices_are_filled_to_within_one_layers_experts(quant: str, devices: list[int], wanted: Settings) -> None:
    have = budget_of(4096, devices)
    answer = place(SPECS[quant], have, wanted)
    assert isinstance(answer, Placed)
    check_filled(quant, have, answer)


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        # A device that was given nothing but experts of other layers was not held to its budget.
        ([48, 32, 180, 91, 163], Settings(context_tokens=8192)),
        ([197, 141, 48, 144], Settings(context_tokens=8192)),
        # The mask of so long a batch takes 8 GiB of each device that has an attention layer, and of no other.
        ([192, 12, 147, 197, 61, 8], Settings(context_tokens=1048576, ubatch_tokens=4096, batch_tokens=4096)),
        ([16, 11, 8, 180, 8, 76, 62, 151], Settings(context_tokens=1048576, slots=2, ubatch_tokens=4096)),
    ],
)
def test_devices_are_held_to_their_budgets_and_filled_with_the_engines_own_buffers(
    devices: list[int], wanted: Settings
) -> None:
    have = budget_of(4096, devices)
    answer = place(SPECS["UD-IQ1_S"], have, wanted)
    assert isinstance(answer, Placed)
    check(SPECS["UD-IQ1_S"], have, answer)
    check_filled("UD-IQ1_S", have, answer)


@pytest.mark.parametrize(
    ("quant", "devices", "wanted"),
    [
        ("UD-IQ1_S", [131, 180, 97, 127], Settings()),
        ("UD-Q2_K_XL", [141, 121, 183, 58, 79, 182], Settings()),
        ("UD-Q4_K_XL", [141] * 8, Settings(context_tokens=1048576, ubatch_tokens=2048)),
        ("UD-IQ1_S", [80] * 7, Settings(context_tokens=131072, ubatch_tokens=2048)),
    ],
)
def test_experts_lie_with_their_trunk_but_for_what_fills_the_last_gaps(
    quant: str, devices: list[int], wanted: Settings
) -> None:
    answer = place(SPECS[quant], budget_of(4096, devices), wanted)
    assert isinstance(answer, Placed)
    assert host_trunks(answer) == 0
    assert layers_with_experts_on_another_device(answer, SPECS[quant]) <= len(devices)


def test_all_of_it_is_on_devices_wherever_it_fits_without_the_copies_of_pipelining() -> None:
    wanted = Settings(context_tokens=262144, ubatch_tokens=4096, batch_tokens=4096)
    have = budget_of(3000, [40, 40, 48, 48, 96, 180, 180])
    answer = place(SPECS["UD-IQ1_S"], have, wanted)
    assert isinstance(answer, Placed)
    check(SPECS["UD-IQ1_S"], have, answer)
    assert (host_trunks(answer), host_expert_bytes(answer)) == (0, 0)
    assert not is_pipelined(answer.settings, answer.layout)
    roomy = place(SPECS["UD-IQ1_S"], budget_of(3000, [180] * 7), wanted)
    assert isinstance(roomy, Placed)
    assert is_pipelined(roomy.settings, roomy.layout)


def test_what_fits_only_without_pipelining_scatters_no_experts() -> None:
    """Room that is kept for copies which are then not made would leave gaps, and gaps take other layers' tensors."""
    have = budget_of(4096, [86.1, 229.5, 157.4, 261.3])
    answer = place(SPECS["UD-IQ1_S"], have, Settings(context_tokens=1048576, ubatch_tokens=4096, batch_tokens=4096))
    assert isinstance(answer, Placed)
    check(SPECS["UD-IQ1_S"], have, answer)
    assert (host_trunks(answer), host_expert_bytes(answer)) == (0, 0)
    assert layers_with_experts_on_another_device(answer, SPECS["UD-IQ1_S"]) == 0


def test_where_nobody_knows_the_buffers_pipelining_is_left_alone() -> None:
    spec = replace(SPECS["UD-IQ1_S"], architecture="some-other-moe")
    answer = place(spec, budget_of(1024, [400, 400]), Settings())
    assert isinstance(answer, Placed)
    assert host_expert_bytes(answer) == 0
    assert answer.layout.overridden is None


@pytest.mark.parametrize(
    ("devices", "wanted", "on_host"),
    [
        ([31.13, 16.83], Settings(context_tokens=262144, ubatch_tokens=4096, batch_tokens=4096), 44),
        ([17.59, 44.95], Settings(context_tokens=262144, ubatch_tokens=4096, batch_tokens=4096, slots=2), 19),
    ],
)
def test_no_trunk_is_left_on_the_host_for_which_a_device_has_room(
    devices: list[float], wanted: Settings, on_host: int
) -> None:
    """Fewer were tried by hand, with every cut: none fits."""
    have = budget_of(4096, devices)
    answer = place(SPECS["UD-IQ1_S"], have, wanted)
    assert isinstance(answer, Placed)
    check(SPECS["UD-IQ1_S"], have, answer)
    assert host_trunks(answer) == on_host


@pytest.mark.usefixtures("cheap_buffers")
@quick
@given(
    st.sampled_from(QUANTS),
    st.integers(64, 2048),
    some_devices,
    some_settings,
    st.tuples(st.integers(0, 256), st.integers(0, 64), st.integers(0, 15)),
)
def test_more_memory_never_makes_a_placement_worse(
    quant: str, ram_gib: int, devices: list[int], wanted: Settings, more: tuple[int, int, int]
) -> None:
    more_ram, more_vram, which = more
    larger = list(devices)
    if larger:
        larger[which % len(larger)] += more_vram
    small = place(SPECS[quant], budget_of(ram_gib, devices), wanted, policy=Policy(may_stream=True))
    large = place(SPECS[quant], budget_of(ram_gib + more_ram, larger), wanted, policy=Policy(may_stream=True))
    if isinstance(small, Shortfall):
        return
    assert isinstance(large, Placed)
    assert bool(large.streamed_bytes) <= bool(small.streamed_bytes)
    if bool(large.streamed_bytes) == bool(small.streamed_bytes):  # what no longer streams may give up context for it
        assert large.settings.context_tokens >= small.settings.context_tokens
    if large.settings == small.settings:
        tensor = 0 if large.ledger == small.ledger else largest_expert_tensor(quant)
        assert large.streamed_bytes <= small.streamed_bytes + tensor
        assert host_trunks(large) <= host_trunks(small)
        if host_trunks(large) == host_trunks(small):
            # Buffers depend on the split and the split on buffers: the best of them all is searched for, not proven.
            assert host_expert_bytes(large) <= host_expert_bytes(small) + tensor


def test_more_memory_never_makes_a_placement_worse_with_the_engines_own_buffers() -> None:
    # A sample by a fixed seed: working through the real buffers costs a hundred times what the packing does.
    drawn = random.Random(20261130)
    for _ in range(40):
        devices = [drawn.randint(20, 200) for _ in range(drawn.randint(1, 8))]
        larger = list(devices)
        larger[drawn.randrange(len(devices))] += drawn.randint(0, 64)
        settings = Settings(context_tokens=drawn.choice([8192, 32768, 131_072]))
        quant = drawn.choice(QUANTS)
        small = place(SPECS[quant], budget_of(3000, devices), settings)
        large = place(SPECS[quant], budget_of(3000, larger), settings)
        assert isinstance(small, Placed)
        assert isinstance(large, Placed)
        before, after = ((host_trunks(p), host_expert_bytes(p)) for p in (small, large))
        assert after <= before, (quant, devices, larger)


@pytest.mark.usefixtures("cheap_buffers")
@quick
@given(st.sampled_from(QUANTS), some_devices, some_settings)
def test_a_smaller_context_never_needs_more(quant: str, devices: list[int], wanted: Settings) -> None:
    have = budget_of(4096, devices)
    shorter = replace(wanted, context_tokens=max(1024, wanted.context_tokens // 4))
    long, short = place(SPECS[quant], have, wanted), place(SPECS[quant], have, shorter)
    assert isinstance(long, Placed)
    assert isinstance(short, Placed)

    def total(placed: Placed) -> int:
        # A device that is used at all costs its driver's context and a buffer; neither is the context's doing.
        apart = (Component.COMPUTE, Component.GPU_CONTEXT)
        return sum(row.size_bytes or 0 for row in placed.ledger.rows if row.component not in apart)

    assert total(short) <= total(long)
    assert host_trunks(short) <= host_trunks(long)


def test_the_trunk_goes_to_the_device_before_any_expert() -> None:
    answer = place(SPECS["UD-Q2_K_XL"], budget_of(768, [96]), Settings())
    assert isinstance(answer, Placed)
    assert host_trunks(answer) == 0
    assert answer.layout.head == 0
    kept = [place.experts == 0 for place in answer.layout.layers]
    assert 0 < sum(kept) < 10


def test_a_device_too_small_for_the_trunk_takes_the_last_layers_and_the_head() -> None:
    answer = place(SPECS["UD-IQ1_S"], budget_of(768, [24]), Settings())
    assert isinstance(answer, Placed)
    trunks = [place.trunk for place in answer.layout.layers]
    assert trunks == sorted(trunks, key=lambda trunk: -1 if trunk is None else trunk)
    assert trunks[0] is HOST
    assert trunks[-1] == answer.layout.head == 0
    assert host_expert_bytes(answer) == sum(layer.expert_bytes for layer in SPECS["UD-IQ1_S"].layers)


def test_a_device_that_holds_not_even_its_buffers_is_not_used() -> None:
    answer = place(SPECS["UD-IQ1_S"], budget_of(768, [1]), Settings(ubatch_tokens=4096, batch_tokens=4096))
    assert isinstance(answer, Placed)
    assert answer.layout.devices == ()


def test_a_device_of_unknown_memory_takes_nothing_and_a_notice_says_so() -> None:
    accelerators = (Accelerator(name="A", memory_kind=MemoryKind.DISCRETE),)
    machine = Machine(name="m", source="test", ram=Ram(total_bytes=1024 * GIB), accelerators=accelerators)
    answer = place(SPECS["UD-IQ1_S"], budget(machine), Settings())
    assert isinstance(answer, Placed)
    assert host_trunks(answer) == 93
    assert any("gpu0" in notice for notice in answer.notices)


def test_unknown_ram_bounds_nothing_and_a_notice_says_so() -> None:
    machine = Machine(name="m", source="test", accelerators=())
    answer = place(SPECS["UD-IQ1_S"], budget(machine), Settings())
    assert isinstance(answer, Placed)
    assert any("unknown" in notice for notice in answer.notices)


@pytest.mark.parametrize("missing_gib", [0.1, 3, 9, 13])
def test_a_tight_host_lowers_checkpoints_before_anything_else(missing_gib: float) -> None:
    spec, wanted = SPECS["UD-IQ1_S"], Settings(checkpoints=32)
    enough = budget_of(1024, [])
    need = place(spec, enough, wanted)
    assert isinstance(need, Placed)
    have = replace(enough, ram_bytes=need.ledger.total_bytes(HOST) - int(missing_gib * GIB))
    answer = place(spec, have, wanted)
    assert isinstance(answer, Placed)
    check(spec, have, answer)
    assert 1 <= answer.settings.checkpoints < 32
    more = replace(wanted, checkpoints=answer.settings.checkpoints + 1)
    assert not isinstance(again := place(spec, have, more), Shortfall)
    assert again.gave_way, "no more was taken away than had to be"
    assert answer.gave_way[0].startswith("context checkpoints")
    assert answer.settings.context_tokens == 32768


def test_what_cannot_fit_is_a_value_that_names_the_missing_bytes() -> None:
    answer = place(SPECS["UD-IQ1_S"], budget_of(512, []), Settings())
    assert isinstance(answer, Shortfall)
    assert answer.missing_bytes == answer.need_bytes - answer.have_bytes > 50 * GIB
    assert answer.gave_way
    assert "missing" in answer.reason


def test_experts_that_do_not_fit_stream_when_they_may() -> None:
    have = budget_of(256, [24])
    answer = place(SPECS["UD-IQ1_S"], have, Settings(), policy=Policy(may_stream=True))
    assert isinstance(answer, Placed)
    assert answer.streamed_bytes == answer.ledger.total_bytes(HOST) - (have.ram_bytes or 0) > 200 * GIB
    assert not answer.settings.repack
    assert answer.gave_way == (), "what streams anyway need not give up its context"
    assert any("stream from disk" in notice for notice in answer.notices)


def test_streaming_still_needs_room_for_trunk_cache_and_buffers() -> None:
    answer = place(SPECS["UD-IQ1_S"], budget_of(32, []), Settings(), policy=Policy(may_stream=True))
    assert isinstance(answer, Shortfall)
    assert answer.resident_bytes > answer.have_bytes


def test_unified_memory_holds_everything_once_or_streams() -> None:
    have = budget_of(1024, [1024], MemoryKind.UNIFIED)
    answer = place(SPECS["UD-IQ1_S"], have, Settings())
    assert isinstance(answer, Placed)
    check(SPECS["UD-IQ1_S"], have, answer)
    assert host_expert_bytes(answer) == 0
    small = budget_of(512, [512], MemoryKind.UNIFIED)
    streaming = place(SPECS["UD-IQ1_S"], small, Settings(), policy=Policy(may_stream=True))
    assert isinstance(streaming, Placed)
    check(SPECS["UD-IQ1_S"], small, streaming)
    assert streaming.streamed_bytes
    assert resident_bytes(streaming.ledger) < (small.ram_bytes or 0)


def test_an_integrated_gpu_beside_a_real_one_takes_nothing() -> None:
    accelerators = (
        Accelerator(name="iGPU", memory_kind=MemoryKind.UNIFIED, total_bytes=64 * GIB),
        Accelerator(name="GPU", memory_kind=MemoryKind.DISCRETE, total_bytes=96 * GIB),
    )
    machine = Machine(name="m", source="test", ram=Ram(total_bytes=768 * GIB), accelerators=accelerators)
    answer = place(SPECS["UD-IQ1_S"], budget(machine), Settings())
    assert isinstance(answer, Placed)
    assert {place.trunk for place in answer.layout.layers} == {1}


def test_an_architecture_whose_buffers_nobody_knows_keeps_room_for_them_and_says_so() -> None:
    spec = replace(SPECS["UD-IQ1_S"], architecture="some-other-moe")
    have = budget_of(1024, [48, 48])
    answer = place(spec, have, Settings(ubatch_tokens=2048))
    assert isinstance(answer, Placed)
    assert any("compute buffer" in notice for notice in answer.notices)
    for index, device in enumerate(have.devices):
        assert (device.usable_bytes or 0) - device_need_bytes(answer.ledger, index) >= 2 * GIB


def test_eight_devices_are_placed_in_a_tenth_of_a_second() -> None:
    have = budget_of(1024, [24, 48, 24, 32, 80, 24, 16, 48])
    place(SPECS["UD-Q2_K_XL"], have, Settings())
    best = min(_timed(SPECS["UD-Q2_K_XL"], have) for _ in range(3))
    assert best < 0.1


def _timed(spec: ModelSpec, have: Budget) -> float:
    start = time.perf_counter()
    place(spec, have, Settings())
    return time.perf_counter() - start
