"""What control groups allow: every group above the process, v1 and v2, with and without a namespace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hardware.captures import Loader

from kimigguf.hardware.cgroups import parse_limit, read_cgroups
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.snapshot import Cpu, Ram
from kimigguf.units import GIB, MIB


@pytest.mark.parametrize(
    ("name", "limit", "available", "cores"),
    [
        # 34.4 GB in use, 30 GB of them inactive file pages and 1 GiB active ones: reclaimable, not lost (ollama 15474).
        ("docker-v1", 64 * GIB, 64 * GIB - 32 * GIB + 30064771072 + GIB, 8.0),
        ("docker-v1-hidden-parent", 32 * GIB, 31 * GIB, None),
        ("docker-v2-private", 128 * GIB, 128 * GIB - 100 * GIB + 90 * GIB + 5 * GIB, 16.0),
        # The pod's limit is the tightest, and what it leaves is more than what kubepods.slice still has.
        ("kubernetes-v2-nested", 800 * GIB, 1016 * GIB - 800 * GIB + 100 * GIB, 64.0),
        ("systemd-slice", 96 * GIB, 96 * GIB - 10 * GIB + 4 * GIB, None),
        ("host-namespace-v2", 8 * GIB, 7 * GIB + 512 * MIB, None),
        ("vm-v1-no-limit", None, None, None),
    ],
)
def test_limits_of_known_arrangements(
    capture: Loader, name: str, limit: int | None, available: int | None, cores: float | None
) -> None:
    facts = read_cgroups(capture(name))
    assert facts.ram == Ram(cgroup_limit_bytes=limit, cgroup_available_bytes=available)
    assert facts.cpu == Cpu(quota_cores=cores)


def test_a_limit_whose_use_is_unreadable_is_a_bound_that_says_so(capture: Loader) -> None:
    facts = read_cgroups(capture("outside-namespace-v2"))
    assert facts.ram == Ram(cgroup_limit_bytes=16 * GIB, cgroup_available_bytes=16 * GIB)
    assert [one.what for one in facts.unknown] == ["ram.cgroup_available_bytes"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max", None), ("9223372036854771712", None), ("1024", 1024), ("0", 0), ("", None), ("-1", None), (None, None)],
)
def test_max_is_no_limit_and_garbage_is_none(text: str | None, expected: int | None) -> None:
    assert parse_limit(text) == expected


def test_blanks_in_mount_points_are_undone_and_garbage_lines_left_out() -> None:
    (mount,) = parse_mountinfo("1 2 8:1 / /mnt/My\\040disk rw - ext4 /dev/sda1 rw\nnonsense\n1 2 - x\n")
    assert mount.mount_point == "/mnt/My disk"


# A child under a real limit, asked what it sees.
_CHILD = (
    "import sys; from kimigguf.hardware.cgroups import read_cgroups; from kimigguf.hardware.host import Host;"
    "sys.stdin.read(1); ram = read_cgroups(Host()).ram; print(ram.cgroup_limit_bytes, ram.cgroup_available_bytes)"
)
_LIMIT = 512 * MIB


def _ask_child(procs: Path) -> tuple[int, int]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        procs.write_text(str(child.pid))
        out, _ = child.communicate("x", timeout=60)
    finally:
        child.kill()
        child.wait()
    limit, available = out.split()
    return int(limit), int(available)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
def test_a_child_under_a_real_limit_sees_it() -> None:
    group, limit_file = _own_group()
    try:
        group.mkdir()
        (group / limit_file).write_text(str(_LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit, available = _ask_child(group / "cgroup.procs")
    finally:
        group.rmdir()
    assert limit == _LIMIT
    assert 0 < available <= _LIMIT


def _own_group() -> tuple[Path, str]:
    """A new group's folder beside this process's memory hierarchy, and the name of its limit file."""
    from kimigguf.hardware.cgroups import find_hierarchy, groups

    host = Host(environ={})
    hierarchy = find_hierarchy(
        host.text("proc/self/cgroup") or "", parse_mountinfo(host.text("proc/self/mountinfo") or ""), "memory"
    )
    own = None if hierarchy is None else next(groups(host, hierarchy), None)
    if hierarchy is None or own is None:
        pytest.skip("no memory control group is mounted here")
    name = f"kimigguf-test-{os.getpid()}"
    if hierarchy.version == 1:
        return Path(own) / name, "memory.limit_in_bytes"
    # v2 lets no group with processes of its own hand controllers on, except the root.
    return Path(hierarchy.mount.mount_point) / name, "memory.max"
