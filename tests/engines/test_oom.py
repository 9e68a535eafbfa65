"""A SIGKILL is the kernel's or somebody's: the counts tell, and where they do not, nothing is claimed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kimigguf.engines.oom import Kills, explain, parse_kills, read_kills
from kimigguf.hardware.host import Host
from kimigguf.units import GIB

MOUNTS_V2 = "25 20 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
MOUNTS_V1 = "25 20 0:22 / /sys/fs/cgroup/memory rw shared:4 - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 3\nmax 17\noom 1\noom_kill 2\noom_group_kill 0\n", 2),  # v2 memory.events
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),  # v1 memory.oom_control
        ("pgfault 1\noom_kill 0\n", 0),  # /proc/vmstat
        ("oom_kill_disable 0\nunder_oom 0\n", None),  # before kernel 4.13
        (None, None),
    ],
)
def test_the_count_is_read_from_each_kind_of_file(text: str | None, count: int | None) -> None:
    assert parse_kills(text) == count


def test_the_groups_own_count_and_limit_are_found(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/kimi"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/kimi\n")
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS_V2)
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    (group / "memory.events").write_text("oom_kill 2\n")
    (group / "memory.max").write_text(f"{64 * GIB}\n")
    assert read_kills(Host(root=tmp_path)) == Kills(in_group=2, on_machine=9, limit_bytes=64 * GIB)


def test_a_kill_in_the_group_names_its_limit() -> None:
    words = explain(Kills(in_group=0, on_machine=4), Kills(in_group=1, on_machine=5, limit_bytes=64 * GIB))
    assert words is not None
    assert "control group" in words
    assert "64.0 GiB" in words


def test_a_kill_elsewhere_on_the_machine_is_told_from_a_persons() -> None:
    assert "machine ran out" in (explain(Kills(in_group=0, on_machine=4), Kills(in_group=0, on_machine=5)) or "")
    assert "somebody else" in (explain(Kills(in_group=0, on_machine=4), Kills(in_group=0, on_machine=4)) or "")


def test_without_counts_nothing_is_claimed() -> None:
    unknown = Kills(in_group=None, on_machine=None)
    assert explain(unknown, unknown) is None


def test_a_real_kill_by_the_kernel_under_a_real_limit_is_counted(tmp_path: Path) -> None:
    """A child in a control group of its own takes more than the group allows."""
    top = Path("/sys/fs/cgroup/memory")
    group = top / f"kimigguf-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no v1 memory control group can be made here: {error}")
    try:
        before = parse_kills((group / "memory.oom_control").read_text())
        code = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); x = bytearray(256 << 20)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        after = parse_kills((group / "memory.oom_control").read_text())
    finally:
        group.rmdir()
    if before is None or after is None:
        pytest.skip("this kernel does not count kills per group")
    assert after == before + 1
