"""Peaks of a real process tree, of control groups as text, and of accelerators as values."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.processes import until
from hardware.captures import DATA
from hardware.nvml_stand_in import NvmlStandIn

from kimigguf.hardware import usage
from kimigguf.hardware.host import Host
from kimigguf.hardware.snapshot import Accelerator, MemoryKind
from kimigguf.hardware.usage import DevicePeak, Peaks, PeakWatch, TreeUse, cgroup_peak, device_peaks, higher, read_tree
from kimigguf.units import MIB

PARENT = """
import subprocess, sys
held = "import sys; held = b'x' * (64 << 20); print('held', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE)
sys.stdin.readline()
child.stdin.close(); child.wait()
print("freed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells anonymous memory from files")
def test_the_peak_of_a_child_counts_after_the_child_has_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "held\n"
        with PeakWatch(parent.pid, {}) as watch:
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "freed\n"
            alone = read_tree(parent.pid)
        parent.stdin.close()
        parent.wait()
    tree = watch.peaks.tree
    assert alone is not None
    assert tree is not None
    assert tree.anonymous_bytes is not None
    assert tree.file_bytes is not None
    assert tree.anonymous_bytes >= 64 * MIB
    assert tree.resident_bytes >= alone.resident_bytes + 60 * MIB
    assert watch.peaks.read_bytes is not None


def test_a_process_that_is_gone_or_not_known_is_unknown_and_not_zero() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert until(lambda: read_tree(gone.pid) is None)
    with PeakWatch(gone.pid, {}) as watch:
        pass
    assert watch.peaks.tree is None
    assert watch.peaks.read_bytes is None
    with PeakWatch(None, {}) as nobody:
        pass
    assert nobody.peaks == Peaks()


@pytest.mark.parametrize(
    ("cgroup", "mount", "files", "expected"),
    [
        (
            "0::/user.slice/k3.scope",
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            {"sys/fs/cgroup/user.slice/k3.scope/memory.peak": "700\n", "sys/fs/cgroup/user.slice/memory.peak": "900"},
            ("/sys/fs/cgroup/user.slice/k3.scope", 700),
        ),
        (
            "5:memory:/k3",
            "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
            {"sys/fs/cgroup/memory/k3/memory.max_usage_in_bytes": "800"},
            ("/sys/fs/cgroup/memory/k3", 800),
        ),
        # The root of the tree has no peak; neither has a kernel before 5.19.
        ("0::/", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", {}, None),
        ("", "", {}, None),
    ],
)
def test_the_peak_of_a_control_group_is_its_own_or_unknown(
    tmp_path: Path, cgroup: str, mount: str, files: dict[str, str], expected: tuple[str, int] | None
) -> None:
    for name, text in {"proc/7/cgroup": cgroup, "proc/self/mountinfo": mount, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    assert cgroup_peak(Host(root=tmp_path), 7) == expected
    assert cgroup_peak(Host(root=tmp_path), 8) is None


def test_files_and_anonymous_memory_peak_each_for_itself() -> None:
    early = TreeUse(resident_bytes=10, anonymous_bytes=9, file_bytes=1, read_bytes=None)
    late = TreeUse(resident_bytes=12, anonymous_bytes=2, file_bytes=10, read_bytes=5)
    assert higher(early, late) == TreeUse(resident_bytes=12, anonymous_bytes=9, file_bytes=10, read_bytes=5)


def test_a_gpus_peak_is_what_was_least_free_and_unreadable_ones_are_left_out() -> None:
    card = Accelerator(name="RTX", memory_kind=MemoryKind.DISCRETE, total_bytes=100, free_bytes=30)
    shared = Accelerator(name="APU", memory_kind=MemoryKind.UNIFIED, total_bytes=100, free_bytes=30)
    silent = replace(card, name="silent", free_bytes=None)
    peaks = device_peaks(None, (shared, silent, card))
    peaks = device_peaks(peaks, (shared, silent, replace(card, free_bytes=80)))
    assert peaks == {2: DevicePeak(name="RTX", used_bytes=70, total_bytes=100)}
    assert device_peaks(peaks, None) == peaks


def test_gpus_are_read_by_their_driver_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three readings of NVML: the weights come onto the card, and some of it is freed again."""
    capture = json.loads((DATA / "rtx-3090-busy.nvml.json").read_text())
    total = 24 * 2**30
    readings = iter([20, 2, 8])

    def nvml() -> NvmlStandIn:
        free = next(readings) * 2**30
        memory = {"total": total, "free": free, "used": total - free}
        return NvmlStandIn({**capture, "devices": [{**capture["devices"][0], "nvmlDeviceGetMemoryInfo": memory}]})

    monkeypatch.setattr(usage, "load_nvml", nvml)
    with PeakWatch(os.getpid(), {}) as watch:
        watch._look(thorough=True)
    assert watch.peaks.devices == (
        DevicePeak(name="NVIDIA GeForce RTX 3090", used_bytes=22 * 2**30, total_bytes=total),
    )


def test_this_process_can_be_read() -> None:
    found = read_tree(os.getpid())
    assert found is not None
    assert found.resident_bytes > 0
