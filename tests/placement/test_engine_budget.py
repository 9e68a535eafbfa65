"""Placements of K3 at its true size, asked of the engine: the emitted command keeps every device within its budget.

Loopback ggml-rpc-server processes stand in for GPUs, and llama-fit-params reports what each would hold.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_cpp_fit import fit, kept_by_plan, stand_in_machine
from rpc_devices import RpcDevices, rpc_devices

from kimigguf.gguf_file.shards import ShardSet, find_set, read_set
from kimigguf.hardware.machines import load_machine
from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind, Ram
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import KvType, Settings
from kimigguf.placement.budget import budget
from kimigguf.placement.plan import Plan, plan_for, planned_model
from kimigguf.units import GIB

pytestmark = pytest.mark.native

IQ1, IQ2, Q2, Q4 = "UD-IQ1_S", "UD-IQ2_XXS", "UD-Q2_K_XL", "UD-Q4_K_XL"
CASES = [
    (IQ1, (24,), Settings()),
    (IQ1, (48,), Settings(context_tokens=131072)),
    (IQ1, (96,), Settings(context_tokens=1048576)),
    (IQ1, (180,), Settings(slots=8)),
    (IQ1, (24, 24), Settings()),
    (IQ1, (24, 48), Settings(context_tokens=65536, kv_type=KvType.Q8_0)),
    (IQ1, (80, 80, 80, 80), Settings()),
    (IQ1, (12, 16, 24, 24), Settings(slots=2)),
    (IQ1, (180, 180, 180, 180), Settings(context_tokens=262144)),
    (IQ2, (32,), Settings()),
    (IQ2, (96,), Settings(ubatch_tokens=2048)),
    (IQ2, (252,), Settings(context_tokens=131072)),
    (IQ2, (48, 48), Settings(context_tokens=524288, kv_type=KvType.Q4_0)),
    (IQ2, (96, 24, 80), Settings(ubatch_tokens=1024)),
    (IQ2, (24, 24, 24, 24), Settings(slots=4)),
    (IQ2, (190, 190, 190, 190), Settings()),
    (Q2, (96,), Settings()),
    (Q2, (96,), Settings(context_tokens=262144)),
    (Q2, (24, 24), Settings(ubatch_tokens=4096, batch_tokens=4096)),
    (Q2, (48, 96), Settings(slots=4, context_tokens=131072)),
    (Q2, (141, 141, 141), Settings()),
    (Q2, (48, 24, 24, 96), Settings()),
    (Q2, (240, 240, 240, 240), Settings(context_tokens=131072)),
    (Q4, (96,), Settings()),
    (Q4, (48, 48), Settings(context_tokens=131072)),
    (Q4, (24, 24, 16, 48), Settings()),
    (Q4, (180, 180, 180, 180), Settings()),
    (Q4, (400, 400, 400, 400), Settings(context_tokens=65536)),
    (Q4, (32, 32, 32), Settings(ubatch_tokens=256)),
    (Q2, (24, 24, 24, 24, 24, 24, 24, 24), Settings()),
    (Q4, (180, 180, 180, 180, 180, 180, 180, 180), Settings()),
    (IQ1, (48, 12, 48, 12, 24, 24, 80, 16), Settings(slots=2, context_tokens=131072)),
    # All of it fits, but not with the four copies that pipelining makes: a rule for a tensor switches that off.
    (IQ1, (40, 40, 48, 48, 96, 180, 180), Settings(context_tokens=262144, ubatch_tokens=4096, batch_tokens=4096)),
]
NAMED = [
    ("epyc-768g-rtx-pro-6000", Q2, Settings(context_tokens=131072)),
    ("xeon-768g-2x-rtx-3090", IQ2, Settings()),
    ("epyc-1536g-cpu", Q2, Settings(context_tokens=262144)),
]


@pytest.fixture(scope="module")
def devices(native_bin: Path) -> Iterator[RpcDevices]:
    with rpc_devices(native_bin, 8) as running:
        yield running


def machine(usable_gib: tuple[int, ...]) -> Machine:
    accelerators = tuple(
        Accelerator(name="stand-in", memory_kind=MemoryKind.DISCRETE, total_bytes=size * GIB) for size in usable_gib
    )
    return Machine(name="m", source="test", ram=Ram(total_bytes=4096 * GIB), accelerators=accelerators)


def hold(devices: RpcDevices, shards: ShardSet, folder: Path, described: Machine, wanted: Settings) -> None:
    spec = ModelSpec.from_shards(shards)
    plan = plan_for(spec, described, wanted, model=planned_model(shards, folder=str(folder)))
    assert isinstance(plan, Plan)
    compared = devices.verify(plan, shards)
    assert compared.agrees is True, compared
    have = budget(described)
    for device, allowed in zip(compared.devices[:-1], have.devices, strict=False):
        assert device.engine.total_bytes <= (allowed.usable_bytes or 0), device
    host = compared.devices[-1]
    assert have.ram_bytes is not None
    assert host.engine.total_bytes - plan.streamed_bytes <= have.ram_bytes


@pytest.mark.parametrize(("quant", "usable_gib", "wanted"), CASES)
def test_the_emitted_command_keeps_every_device_within_its_budget(
    devices: RpcDevices, skeleton: Callable[[str], Path], quant: str, usable_gib: tuple[int, ...], wanted: Settings
) -> None:
    folder = skeleton(quant)
    hold(devices, read_set(find_set(folder)), folder, machine(usable_gib), wanted)


@pytest.mark.parametrize(("name", "quant", "wanted"), NAMED)
def test_the_named_machines_stay_within_their_budgets(
    devices: RpcDevices, skeleton: Callable[[str], Path], name: str, quant: str, wanted: Settings
) -> None:
    folder = skeleton(quant)
    hold(devices, read_set(find_set(folder)), folder, load_machine(name, {}), wanted)


@pytest.mark.parametrize(
    ("quant", "usable_gib", "wanted"),
    [
        (IQ1, (96,), Settings()),
        (IQ1, (24, 24), Settings()),  # not even the trunk fits
        (IQ2, (252,), Settings(context_tokens=131072)),
        (Q2, (96, 32), Settings(ubatch_tokens=2048)),
    ],
)
def test_no_placement_keeps_less_on_the_same_devices_than_llama_cpps_own_fit(
    devices: RpcDevices, skeleton: Callable[[str], Path], quant: str, usable_gib: tuple[int, ...], wanted: Settings
) -> None:
    folder = skeleton(quant)
    files = find_set(folder)
    shards = read_set(files)
    spec = ModelSpec.from_shards(shards)
    theirs = fit(devices, files[0], spec, usable_gib, wanted)
    described = stand_in_machine(theirs.targets_bytes)
    plan = plan_for(spec, described, wanted, model=planned_model(shards, folder=str(folder)))
    assert isinstance(plan, Plan)
    ours = kept_by_plan(plan, spec)
    assert ours.ram_bytes_per_token <= theirs.kept.ram_bytes_per_token
    assert ours.host_trunks <= theirs.kept.host_trunks
    if ours.host_trunks == 0:
        assert ours.expert_bytes >= theirs.kept.expert_bytes
    else:  # experts of layers whose trunk lies in RAM would cost more trunks than they save
        assert ours.host_trunks < theirs.kept.host_trunks
