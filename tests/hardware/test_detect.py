"""The whole picture: nothing hangs, nothing is counted twice, a failed probe costs its own facts."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hardware.captures import HANG, Loader
from hardware.nvml_stand_in import NvmlStandIn

from kimigguf.hardware.detect import detect
from kimigguf.hardware.host import CommandError, Host, run_command
from kimigguf.hardware.machines import load_file, save
from kimigguf.hardware.probes import ask_all
from kimigguf.hardware.snapshot import MemoryKind
from kimigguf.units import GIB, KIB, MIB


def nvml(name: str) -> object:
    return NvmlStandIn.load(name)


_HUNG = """
import time, pynvml
pynvml.nvmlInit = lambda: time.sleep(60)
from kimigguf.hardware.detect import detect
machine = detect()
print([one.reason for one in machine.unknown if one.what == "accelerators.nvidia"])
"""


def test_a_hung_driver_does_not_keep_the_process_from_ending() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _HUNG], capture_output=True, text=True, check=True, timeout=30)
    assert time.monotonic() - started < 6
    assert "no answer within 1 s" in done.stdout


def test_this_machine_is_detected_in_time_and_its_file_says_the_same(tmp_path: Path) -> None:
    started = time.monotonic()
    machine = detect()
    assert time.monotonic() - started < 1.5
    assert machine.ram.total_bytes is not None
    assert machine.cpu.threads
    save(machine, tmp_path / "here.toml")
    saved = load_file(tmp_path / "here.toml")
    assert not saved.is_this_one, "read elsewhere or later, a file describes a machine"
    assert saved == replace(machine, name="here", source=saved.source)


def test_a_hung_nvml_costs_the_nvidia_facts_only(capture: Loader) -> None:
    started = time.monotonic()
    machine = detect(host=capture("vm-v1-no-limit"), nvml=HANG.wait, limit_seconds=0.3)
    assert time.monotonic() - started < 1.0
    assert machine.ram.total_bytes == 24684092 * KIB
    assert machine.accelerators is None, "there may be GPUs that nobody could list"
    assert ("accelerators.nvidia", "no answer within 0.3 s") in [(one.what, one.reason) for one in machine.unknown]


def test_a_hung_nvml_still_leaves_the_names_of_the_cards(capture: Loader) -> None:
    host = capture("vm-v1-no-limit")
    folder = host.path("proc/driver/nvidia/gpus/0000:01:00.0")
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\n")
    machine = detect(host=host, nvml=HANG.wait, limit_seconds=0.3)
    assert [(card.name, card.total_bytes) for card in machine.accelerators or ()] == [("NVIDIA H100 80GB HBM3", None)]
    assert ("accelerators.nvidia", "no answer within 0.3 s") in [(one.what, one.reason) for one in machine.unknown]
    assert len([one for one in machine.unknown if "nvidia" in one.what]) == 1


def test_a_probe_that_raises_is_named_with_its_error(capture: Loader) -> None:
    def broken() -> object:
        raise RuntimeError("the library is half installed")

    machine = detect(host=capture("vm-v1-no-limit"), nvml=broken)
    assert [one.reason for one in machine.unknown if one.what == "accelerators.nvidia"] == [
        "RuntimeError: the library is half installed"
    ]


def test_an_empty_machine_is_unknown_and_not_a_crash(tmp_path: Path) -> None:
    machine = detect(host=Host(root=tmp_path, system="linux", environ={}), nvml=lambda: nvml("no-driver"))
    assert machine.ram.total_bytes is None
    assert machine.disks is None
    assert {"ram", "cpu", "disks", "ram.cgroup_limit_bytes"} <= {one.what for one in machine.unknown}


def test_garbage_everywhere_is_unknown_and_not_a_crash(tmp_path: Path, capture: Loader) -> None:
    host = capture("disks")
    for name in ("proc/meminfo", "proc/cpuinfo", "proc/self/cgroup", "proc/self/mountinfo"):
        path = host.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xfe\0:\n0::\n- - -\n" * 50)
    machine = detect(host=host, nvml=lambda: nvml("no-driver"))
    assert machine.ram.total_bytes is None
    assert machine.cpu.threads is None
    assert machine.disks == ()


def test_unified_memory_is_the_hosts_and_counted_once(capture: Loader) -> None:
    machine = detect(host=capture("gb10"), nvml=lambda: nvml("gb10"))
    (card,) = machine.accelerators or ()
    assert machine.is_unified
    assert (card.total_bytes, card.free_bytes) == (127600748 * KIB, 118566368 * KIB)


def test_hbm_that_linux_counts_as_ram_is_not_counted_twice(capture: Loader) -> None:
    machine = detect(host=capture("gb300"), nvml=lambda: nvml("gb300"))
    (card,) = machine.accelerators or ()
    assert card.memory_kind is MemoryKind.DISCRETE
    assert card.total_bytes == 256703 * MIB
    assert machine.ram.total_bytes is not None
    assert machine.ram.total_bytes / GIB == pytest.approx(492.3, abs=0.1)
    assert machine.ram.available_bytes == (765000000 - 260000000) * KIB
    assert len(machine.notices) == 1


def test_processorless_memory_beside_another_gpu_stays_ram(capture: Loader) -> None:
    machine = detect(host=capture("gb300"), nvml=lambda: nvml("rtx-3090-busy"))
    assert machine.ram.total_bytes == 779091968 * KIB


def test_two_vendors_in_one_machine_keep_their_unknowns_apart(capture: Loader) -> None:
    machine = detect(host=capture("amd-dgpus"), nvml=lambda: nvml("no-permission"))
    assert machine.accelerators is not None
    assert len(machine.accelerators) == 4 + 3
    named = [one.what for one in machine.unknown if one.what.startswith("accelerators")]
    assert named == [
        "accelerators.1.total_bytes",
        "accelerators.2",
        "accelerators.3.total_bytes",
        "accelerators.5.memory_kind",
        "accelerators.6.total_bytes",
    ]


def test_another_system_gets_memory_and_says_what_is_not_looked_at(capture: Loader) -> None:
    machine = detect(host=replace(capture("gb10"), system="freebsd14"))
    assert machine.ram.total_bytes is not None
    assert {one.what for one in machine.unknown} == {"accelerators", "disks"}
    assert machine.accelerators is None


def test_probes_run_side_by_side() -> None:
    started = time.monotonic()
    answers = ask_all({str(n): lambda: time.sleep(0.2) for n in range(10)}, limit_seconds=1.0)
    assert time.monotonic() - started < 0.8
    assert all(answer.reason is None for answer in answers.values())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["kimigguf-no-such-command"], "there is no command"),
        (["sleep", "30"], "did not answer within"),
        (["false"], "failed with exit code 1"),
    ],
)
def test_a_command_that_is_missing_hangs_or_fails_is_told_as_it_is(argv: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        run_command(argv)
