"""AMD, Intel and Apple."""

import pytest
from hardware.captures import Loader

from kimigguf.hardware.amd import Pools, parse_metrics_format, parse_pools, read_amd
from kimigguf.hardware.apple import parse_diskutil, parse_displays, parse_vm_stat, working_set_limit
from kimigguf.hardware.detect import detect
from kimigguf.hardware.intel import read_intel
from kimigguf.hardware.pci import parse_generation
from kimigguf.hardware.snapshot import Backend, Disk, DiskKind, Driver, MemoryKind, PcieLink
from kimigguf.units import GIB, KIB, MIB


def test_amd_cards_with_their_names_and_links_in_the_kernels_order(capture: Loader) -> None:
    facts = read_amd(capture("amd-dgpus"))
    assert facts.accelerators is not None
    assert [card.name for card in facts.accelerators] == [
        "AMD Instinct MI300X",
        "AMD GPU 0x9999",
        "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M",
    ]
    first, odd, silent = facts.accelerators
    assert (first.memory_kind, first.total_bytes) == (MemoryKind.DISCRETE, 206141652992)
    assert first.free_bytes == 206141652992 - 297795584
    assert first.pcie == PcieLink(generation=5, width=16, max_generation=5, max_width=16)
    assert odd.memory_kind is None
    assert silent.total_bytes is None
    assert [one.what for one in facts.unknown] == ["accelerators.1.memory_kind", "accelerators.2.total_bytes"]
    assert facts.drivers == (Driver(backend=Backend.ROCM, version="6.12.12", runtime_version="7.0.2"),)


def test_strix_halo_is_one_pool_with_the_host_and_its_ceiling_is_the_gtt(capture: Loader) -> None:
    machine = detect(host=capture("strix-halo"), nvml=_no_nvml)
    (card,) = machine.accelerators or ()
    assert card.memory_kind is MemoryKind.UNIFIED
    assert machine.is_unified
    assert card.total_bytes == machine.ram.total_bytes
    assert card.working_set_bytes == 100 * GIB
    assert any("96.0 GiB" in notice for notice in machine.notices)


def test_a_large_carve_out_is_memory_that_the_host_does_not_count(capture: Loader) -> None:
    machine = detect(host=capture("strix-halo-carve-out"), nvml=_no_nvml)
    (card,) = machine.accelerators or ()
    assert (card.memory_kind, card.total_bytes, card.free_bytes) == (MemoryKind.DISCRETE, 96 * GIB, 95 * GIB)


@pytest.mark.parametrize(
    ("data", "expected"),
    [("08010300", 3), ("08010105", 1), ("7800010300", 1), ("00000300", None), ("0801", None), ("0801ff00", None)],
)
def test_the_format_of_gpu_metrics(data: str, expected: int | None) -> None:
    assert parse_metrics_format(bytes.fromhex(data)) == expected


def test_more_memory_in_use_than_there_is_makes_both_unknown() -> None:
    pools = Pools(vram=GIB, vram_used=2 * GIB, gtt=None, is_apu=False)
    card, unknown, _ = parse_pools("accelerators.0", "X", pools)
    assert (card.total_bytes, card.free_bytes) == (None, None)
    assert len(unknown) == 1


def test_an_apu_whose_vram_is_the_hosts_own_memory_is_not_counted_beside_it() -> None:
    pools = Pools(vram=128 * GIB, vram_used=GIB, gtt=64 * GIB, is_apu=True, one_pool=True)
    card, unknown, _ = parse_pools("accelerators.0", "AMD Instinct MI300A", pools)
    assert (card.memory_kind, card.total_bytes, card.working_set_bytes) == (MemoryKind.UNIFIED, None, 128 * GIB)
    assert unknown == []


def test_intel_cards_integrated_and_not(capture: Loader) -> None:
    facts = read_intel(capture("intel-arc"))
    assert facts.accelerators is not None
    assert [(card.memory_kind, card.total_bytes) for card in facts.accelerators] == [
        (MemoryKind.UNIFIED, None),
        (MemoryKind.DISCRETE, 12 * GIB),
        (MemoryKind.DISCRETE, None),
    ]
    assert [one.what for one in facts.unknown] == ["accelerators.1.free_bytes", "accelerators.2.total_bytes"]


@pytest.mark.parametrize(
    ("text", "expected"), [("2.5 GT/s PCIe", 1), ("8 GT/s", 3), ("64.0 GT/s PCIe", 6), ("Unknown", None), (None, None)]
)
def test_link_speeds(text: str | None, expected: int | None) -> None:
    assert parse_generation(text) == expected


def test_a_mac_is_one_pool_counted_once_with_its_wired_limit(capture: Loader) -> None:
    machine = detect(host=capture("mac-studio"))
    (card,) = machine.accelerators or ()
    assert machine.system == "macOS 15.5"
    assert (machine.cpu.cores, machine.cpu.performance_cores) == (32, 24)
    assert machine.cpu.isa == ("neon", "dotprod", "i8mm")
    assert machine.ram.total_bytes == card.total_bytes == 512 * GIB
    assert machine.ram.available_bytes == 25600000 * 16 * KIB
    assert machine.ram.swap_total_bytes == 2048 * MIB
    assert (card.name, card.backend, card.memory_kind) == (
        "Apple M3 Ultra, 80 GPU cores",
        Backend.METAL,
        MemoryKind.UNIFIED,
    )
    assert card.working_set_bytes == 448 * GIB
    assert machine.disks == (
        Disk(
            mount="/",
            file_system="apfs",
            kind=DiskKind.NVME,
            total_bytes=4000000000000,
            free_bytes=2500000000000,
            device="/dev/disk3s5",
        ),
        Disk(
            mount="/Volumes/Models",
            file_system="smbfs",
            kind=DiskKind.NETWORK,
            total_bytes=20000000000000,
            free_bytes=8000000000000,
            device="//carol@files.example.org/Models",
        ),
    )


def test_the_working_set_is_the_limit_where_one_is_set() -> None:
    assert working_set_limit(512 * GIB, None) == 384 * GIB
    assert working_set_limit(24 * GIB, 0) == 16 * GIB
    assert working_set_limit(64 * GIB, 60 * 1024) == 60 * GIB
    assert working_set_limit(64 * GIB, 999 * 1024) == 64 * GIB


@pytest.mark.parametrize("text", ["", "{", "[]", '{"SPDisplaysDataType": []}', '{"SPDisplaysDataType": [7]}'])
def test_a_system_profiler_that_prints_garbage_costs_the_core_count_only(text: str) -> None:
    assert parse_displays(text) == (None, None)


def test_garbage_of_vm_stat_and_diskutil_is_unknown() -> None:
    assert parse_vm_stat("Mach Virtual Memory Statistics") is None
    assert parse_diskutil(b"not a plist") is None
    assert parse_diskutil(b"") is None


def _no_nvml() -> object:
    from hardware.nvml_stand_in import NvmlStandIn

    return NvmlStandIn.load("no-driver")
