"""The budget: the rule by tables, impossible readings, and properties over any machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Accelerator, Machine, MemoryKind, NumaNode, Ram
from kimigguf.placement.budget import Budget, budget
from kimigguf.units import GIB


def machine(ram: Ram, *accelerators: Accelerator) -> Machine:
    return Machine(name="m", source="test", ram=ram, accelerators=accelerators)


def gpu(
    total_gib: float | None, free_gib: float | None = None, kind: MemoryKind | None = MemoryKind.DISCRETE
) -> Accelerator:
    return Accelerator(
        name="GPU",
        memory_kind=kind,
        total_bytes=None if total_gib is None else int(total_gib * GIB),
        free_bytes=None if free_gib is None else int(free_gib * GIB),
    )


@pytest.mark.parametrize(
    ("ram", "usable", "binds"),
    [
        (Ram(total_bytes=64 * GIB), 60 * GIB, "installed"),
        (Ram(total_bytes=768 * GIB), 768 * GIB - 768 * GIB * 3 // 100, "installed"),
        (Ram(total_bytes=64 * GIB, available_bytes=50 * GIB), 50 * GIB, "MemAvailable"),
        (Ram(total_bytes=64 * GIB, available_bytes=62 * GIB), 60 * GIB, "installed"),
        (
            Ram(
                total_bytes=64 * GIB,
                available_bytes=50 * GIB,
                cgroup_limit_bytes=32 * GIB,
                cgroup_available_bytes=20 * GIB,
            ),
            20 * GIB,
            "control group",
        ),
        (Ram(total_bytes=64 * GIB, cgroup_limit_bytes=32 * GIB), 32 * GIB, "control group's limit"),
        (Ram(total_bytes=64 * GIB, cgroup_limit_bytes=2**63), 60 * GIB, "installed"),
        (Ram(total_bytes=64 * GIB, swap_total_bytes=500 * GIB), 60 * GIB, "installed"),
        (Ram(available_bytes=50 * GIB), 50 * GIB, "MemAvailable"),
        (Ram(total_bytes=2 * GIB), 0, "installed"),
    ],
)
def test_usable_ram_is_the_least_of_every_bound(ram: Ram, usable: int, binds: str) -> None:
    answer = budget(machine(ram))
    assert answer.ram_bytes == usable == answer.total_bytes
    assert binds in next(line.reason for line in answer.lines if line.what == "usable RAM")


def test_only_this_machines_ram_is_what_the_system_reports() -> None:
    def said(described: Machine) -> str:
        return next(line.reason for line in budget(described).lines if line.what == "RAM installed")

    here = Machine(name=THIS_MACHINE, source=DETECTED, ram=Ram(total_bytes=64 * GIB))
    assert said(here) == "as the system reports it"
    assert said(machine(here.ram)) == "as the machine's description has it"


@pytest.mark.parametrize(
    "ram",
    [
        Ram(),
        Ram(total_bytes=0),
        Ram(total_bytes=-1),
        Ram(cgroup_limit_bytes=GIB, cgroup_available_bytes=GIB),
        Ram(available_bytes=-5),
    ],
)
def test_ram_that_nobody_could_read_is_unknown_and_never_zero(ram: Ram) -> None:
    answer = budget(machine(ram, gpu(24)))
    assert answer.ram_bytes is None
    assert answer.total_bytes is None
    assert not answer.is_complete


@pytest.mark.parametrize(
    ("ram", "refused"),
    [
        (Ram(total_bytes=64 * GIB, available_bytes=65 * GIB), "MemAvailable"),
        (
            Ram(total_bytes=64 * GIB, cgroup_limit_bytes=70 * GIB, cgroup_available_bytes=71 * GIB),
            "cgroup still allows",
        ),
        (Ram(total_bytes=64 * GIB, cgroup_limit_bytes=-1), "cgroup limit"),
    ],
)
def test_an_impossible_ram_reading_is_refused_and_the_rest_still_counts(ram: Ram, refused: str) -> None:
    answer = budget(machine(ram))
    assert answer.ram_bytes == 60 * GIB
    line = next(line for line in answer.lines if line.what == refused)
    assert line.size_bytes is None
    assert "refused" in line.reason


@pytest.mark.parametrize(
    ("accelerator", "usable_gib"),
    [
        (gpu(96), 95),
        (gpu(96, 40), 39),
        (gpu(None, 40), 39),
        (gpu(0.5), 0),
        (gpu(96, 0), 0),
        (gpu(96, 97), None),
        (gpu(0, 0), None),
        (gpu(None, 0), None),
        (gpu(None), None),
        (gpu(96, -1), None),
        (gpu(96, kind=None), None),
    ],
)
def test_a_device_counts_what_is_free_and_an_impossible_reading_is_unknown(
    accelerator: Accelerator, usable_gib: int | None
) -> None:
    answer = budget(machine(Ram(total_bytes=64 * GIB), accelerator))
    device = answer.devices[0]
    assert device.usable_bytes == (None if usable_gib is None else usable_gib * GIB)
    assert answer.vram_bytes == (usable_gib or 0) * GIB
    assert answer.is_complete == (usable_gib is not None)
    assert answer.total_bytes == (60 + (usable_gib or 0)) * GIB


@pytest.mark.parametrize("size", [None, 512.0, 384.0])
def test_unified_memory_is_counted_once(size: float | None) -> None:
    answer = budget(machine(Ram(total_bytes=512 * GIB), gpu(size, kind=MemoryKind.UNIFIED)))
    assert answer.vram_bytes == 0
    assert answer.total_bytes == answer.ram_bytes == 512 * GIB - 512 * GIB * 3 // 100
    assert answer.devices[0].unified
    assert answer.devices[0].usable_bytes == min(answer.ram_bytes, int(size * GIB) if size else answer.ram_bytes)
    assert answer.is_complete


def test_accelerators_that_nobody_looked_for_make_the_total_a_lower_bound() -> None:
    answer = budget(Machine(name="m", source="test", ram=Ram(total_bytes=64 * GIB), accelerators=None))
    assert answer.total_bytes == 60 * GIB
    assert not answer.is_complete


def test_what_the_user_reserves_comes_off_ram_and_off_each_device() -> None:
    answer = budget(
        machine(Ram(total_bytes=64 * GIB), gpu(24), gpu(48, kind=MemoryKind.DISCRETE)),
        reserve_ram_bytes=10 * GIB,
        reserve_vram_bytes=3 * GIB,
    )
    assert answer.ram_bytes == 50 * GIB
    assert [device.usable_bytes for device in answer.devices] == [20 * GIB, 44 * GIB]
    assert [device.reserve_bytes for device in answer.devices] == [4 * GIB, 4 * GIB]


def test_a_reserve_above_what_there_is_leaves_nothing_rather_than_a_debt() -> None:
    answer = budget(machine(Ram(total_bytes=64 * GIB), gpu(24)), reserve_ram_bytes=10**15, reserve_vram_bytes=10**15)
    assert answer.total_bytes == 0


def test_the_working_set_limit_bounds_what_a_unified_gpu_may_hold_but_not_the_pool() -> None:
    mac = Accelerator(memory_kind=MemoryKind.UNIFIED, total_bytes=512 * GIB, working_set_bytes=384 * GIB)
    answer = budget(machine(Ram(total_bytes=512 * GIB), mac))
    assert answer.devices[0].usable_bytes == 384 * GIB
    assert answer.total_bytes == 512 * GIB - 512 * GIB * 3 // 100


def test_a_huge_page_pool_comes_off_once_and_not_off_memavailable_again() -> None:
    ram = Ram(total_bytes=64 * GIB, huge_pages_bytes=16 * GIB)
    assert budget(machine(ram)).ram_bytes == 44 * GIB
    measured = Ram(total_bytes=64 * GIB, huge_pages_bytes=16 * GIB, available_bytes=43 * GIB)
    assert budget(machine(measured)).ram_bytes == 43 * GIB


def test_numa_nodes_are_shown_and_bound_nothing() -> None:
    nodes = tuple(NumaNode(index=i, total_bytes=32 * GIB, free_bytes=10 * GIB, cpus=8) for i in range(2))
    answer = budget(machine(Ram(total_bytes=64 * GIB, numa=nodes)))
    assert answer.ram_bytes == 60 * GIB
    assert [line.size_bytes for line in answer.lines if "NUMA node" in line.what] == [10 * GIB] * 2


sizes = st.none() | st.integers(-GIB, 4096 * GIB)
kinds = st.sampled_from([None, MemoryKind.DISCRETE, MemoryKind.UNIFIED])
accelerators = st.builds(Accelerator, memory_kind=kinds, total_bytes=sizes, free_bytes=sizes)
rams = st.builds(Ram, total_bytes=sizes, available_bytes=sizes, cgroup_limit_bytes=sizes, cgroup_available_bytes=sizes)


def check(answer: Budget, described: Machine) -> None:
    installed = described.ram.total_bytes
    if answer.ram_bytes is not None:
        assert answer.ram_bytes >= 0
        if installed is not None and installed > 0:
            assert answer.ram_bytes <= installed
    for device, accelerator in zip(answer.devices, described.accelerators or (), strict=True):
        if device.usable_bytes is not None and accelerator.total_bytes is not None and not device.unified:
            assert 0 <= device.usable_bytes <= accelerator.total_bytes
    assert all(line.reason for line in answer.lines)


@given(rams, st.lists(accelerators, max_size=16))
def test_no_reading_however_odd_yields_more_than_is_installed(ram: Ram, found: list[Accelerator]) -> None:
    described = machine(ram, *found)
    check(budget(described), described)


@given(
    st.integers(1, 4096 * GIB),
    st.integers(0, 1024 * GIB),
    st.integers(1, 256 * GIB),
    st.integers(0, 64 * GIB),
)
def test_more_memory_never_makes_the_budget_smaller(ram: int, more_ram: int, vram: int, more_vram: int) -> None:
    def of(ram_bytes: int, vram_bytes: int) -> Budget:
        device = Accelerator(memory_kind=MemoryKind.DISCRETE, total_bytes=vram_bytes)
        return budget(machine(Ram(total_bytes=ram_bytes), device))

    small, large = of(ram, vram), of(ram + more_ram, vram + more_vram)
    assert (large.ram_bytes or 0) >= (small.ram_bytes or 0)
    assert large.vram_bytes >= small.vram_bytes
