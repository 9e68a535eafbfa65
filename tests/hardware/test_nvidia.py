"""NVML's replies, whole and broken."""

from pathlib import Path

import pytest
from hardware.captures import Loader
from hardware.nvml_stand_in import NvmlStandIn

from kimigguf.hardware.facts import Facts
from kimigguf.hardware.host import Host
from kimigguf.hardware.nvidia import read_nvidia
from kimigguf.hardware.snapshot import Accelerator, Backend, Driver, MemoryKind, PcieLink
from kimigguf.units import MIB


def look(name: str, root: Path, environ: dict[str, str] | None = None) -> Facts:
    nvml = NvmlStandIn.load(name)
    facts = read_nvidia(Host(root=root, environ=environ or {}), lambda: nvml)
    assert nvml.started == 0, "NVML is shut down again"
    return facts


def test_memory_that_another_process_holds_is_not_free(tmp_path: Path) -> None:
    facts = look("rtx-3090-busy", tmp_path)
    assert facts.accelerators == (
        Accelerator(
            name="NVIDIA GeForce RTX 3090",
            backend=Backend.CUDA,
            memory_kind=MemoryKind.DISCRETE,
            total_bytes=24576 * MIB,
            free_bytes=9571 * MIB,
            uuid="GPU-11111111-2222-3333-4444-555555555555",
            used_by_others_bytes=14990 * MIB,
            compute_capability="8.6",
            pcie=PcieLink(generation=1, width=16, max_generation=4, max_width=16),
            nvlinks=None,
            ecc=None,
            power_limit_watts=420.0,
        ),
    )
    assert facts.drivers == (Driver(backend=Backend.CUDA, version="580.142", runtime_version="13.0"),)
    assert facts.unknown == ()


def test_the_links_speed_is_that_of_its_best_form() -> None:
    link = PcieLink(generation=1, width=16, max_generation=4, max_width=16)
    assert link.max_bytes_per_second == pytest.approx(31.5e9, rel=0.01)
    assert PcieLink(width=16).max_bytes_per_second is None


def test_eight_equal_cards(tmp_path: Path) -> None:
    cards = look("8x-b200", tmp_path).accelerators
    assert cards is not None
    assert [card.total_bytes for card in cards] == [183359 * MIB] * 8
    assert {card.nvlinks for card in cards} == {18}
    assert {card.ecc for card in cards} == {True}


def test_mig_instances_are_devices_and_their_gpu_is_none(tmp_path: Path) -> None:
    facts = look("mig-in-container", tmp_path)
    assert facts.accelerators is not None
    assert [(card.instance, card.total_bytes) for card in facts.accelerators] == [
        ("3g.40gb", 40192 * MIB),
        ("1g.10gb", 9728 * MIB),
    ]
    assert any("shows no instance" in notice for notice in facts.notices)
    assert any("one MIG instance per process" in notice for notice in facts.notices)


def test_a_gpu_that_will_be_cut_only_after_a_reset_is_still_whole(tmp_path: Path) -> None:
    device = {"nvmlDeviceGetName": "NVIDIA A100", "nvmlDeviceGetMigMode": [0, 1]}
    memory = {"total": 80 << 30, "free": 79 << 30, "used": 1 << 30}
    nvml = NvmlStandIn({"devices": [device | {"nvmlDeviceGetMemoryInfo": memory}]})
    facts = read_nvidia(Host(root=tmp_path, environ={}), lambda: nvml)
    assert [(card.total_bytes, card.instance) for card in facts.accelerators or ()] == [(80 << 30, None)]


def test_a_unified_part_has_no_memory_of_its_own(tmp_path: Path) -> None:
    (card,) = look("gb10", tmp_path).accelerators or ()
    assert (card.memory_kind, card.total_bytes, card.pcie) == (MemoryKind.UNIFIED, None, None)


def test_the_hbm_of_a_grace_part_is_memory_of_its_own(tmp_path: Path) -> None:
    (card,) = look("gb300", tmp_path).accelerators or ()
    assert (card.memory_kind, card.total_bytes) == (MemoryKind.DISCRETE, 256703 * MIB)


def test_unreadable_lost_and_nonsensical_memory_is_unknown_never_zero(tmp_path: Path) -> None:
    facts = look("no-permission", tmp_path)
    assert facts.accelerators is not None
    assert [card.total_bytes for card in facts.accelerators] == [46068 * MIB, None, None, None]
    assert [card.free_bytes for card in facts.accelerators] == [45000 * MIB, None, None, None]
    assert [card.used_by_others_bytes for card in facts.accelerators] == [None, None, None, 0]
    assert [one.what for one in facts.unknown] == [
        "accelerators.1.total_bytes",
        "accelerators.2",
        "accelerators.3.total_bytes",
        "drivers.version",
    ]
    assert "Insufficient Permissions" in facts.unknown[0].reason


@pytest.mark.parametrize(
    ("value", "order", "kept", "said"),
    [
        ("2,0", None, ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"], "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("2,0", "PCI_BUS_ID", ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"], "leaves 2 of 8"),
        ("0,99,1", "PCI_BUS_ID", ["NVIDIA GeForce RTX 5090"], "leaves 1 of 8"),
        ("1,1,0", "PCI_BUS_ID", ["NVIDIA GeForce RTX 4090"], "leaves 1 of 8"),
        ("GPU-00000004,GPU-00000007", None, ["NVIDIA RTX A6000", "NVIDIA A100-PCIE-40GB"], "leaves 2 of 8"),
        ("GPU-0000000", None, [], "leaves 0 of 8"),
        ("-1", None, [], "leaves 0 of 8"),
        ("", None, [], "leaves 0 of 8"),
    ],
)
def test_cuda_visible_devices_is_honoured_and_shown(
    tmp_path: Path, value: str, order: str | None, kept: list[str], said: str
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value} | ({"CUDA_DEVICE_ORDER": order} if order else {})
    facts = look("8-unequal", tmp_path, environ)
    assert [card.name for card in facts.accelerators or ()] == kept
    assert any(said in notice for notice in facts.notices)


def test_hiding_devices_moves_what_is_unknown_with_them(tmp_path: Path) -> None:
    facts = look("no-permission", tmp_path, {"CUDA_VISIBLE_DEVICES": "3,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [one.what for one in facts.unknown] == ["accelerators.0.total_bytes", "drivers.version"]


def test_no_driver_and_no_card_is_none_and_not_unknown(tmp_path: Path) -> None:
    facts = look("no-driver", tmp_path)
    assert facts.accelerators == ()
    assert facts.unknown == ()


def test_a_card_without_driver_is_said_to_be_there(tmp_path: Path) -> None:
    for name, vendor, kind in (("0000:01:00.0", "0x10de", "0x030000"), ("0000:01:00.1", "0x10de", "0x040300")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
        (folder / "class").write_text(kind)
    facts = look("no-driver", tmp_path)
    assert facts.accelerators is None
    assert facts.unknown[0].reason.startswith("1 NVIDIA GPU(s) on the PCI bus without a working driver")


def test_a_loaded_driver_without_its_library_still_names_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   150\n")
    facts = look("version-mismatch", tmp_path)
    assert [card.name for card in facts.accelerators or ()] == ["NVIDIA GeForce RTX 4090"]
    assert "mismatch" in facts.unknown[0].reason


def test_the_real_library_answers_or_says_why_not(capture: Loader) -> None:
    facts = read_nvidia(Host(environ={}))
    assert facts.accelerators is not None or facts.unknown
