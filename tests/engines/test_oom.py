"""A SIGKILL is the kernel's or somebody's: the counts tell, and where they do not, nothing is claimed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimigguf.engines import oom
from kimigguf.engines.oom import Kills, KillWatch, explain, find_kill, parse_kills, read_kill, read_kills
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
    after = Kills(in_group=1, on_machine=5, limit_bytes=64 * GIB)
    verdict = explain(Kills(in_group=0, on_machine=4), after)
    assert verdict is not None
    assert verdict.by_kernel
    assert "control group's limit of 64.0 GiB was reached" in verdict.words


def test_a_kill_elsewhere_on_the_machine_is_told_from_a_persons() -> None:
    machine = explain(Kills(in_group=0, on_machine=4), Kills(in_group=0, on_machine=5))
    person = explain(Kills(in_group=0, on_machine=4), Kills(in_group=0, on_machine=4))
    assert machine is not None
    assert machine.by_kernel
    assert "machine's memory was used up" in machine.words
    assert person is not None
    assert not person.by_kernel
    assert "somebody else" in person.words


KMSG = [
    "6,1140,14690000000,-;systemd[1]: Started something.\n",
    "3,1141,14690817776,-;Memory cgroup out of memory: Killed process 18517 (llama-server) anon-rss:68224kB, UID:0\n",
    "3,1142,14690817777,-;oom_reaper: reaped process 18517 (llama-server), now anon-rss:0kB\n",
    "rubbish",
]


def test_the_kernels_own_line_names_the_process_it_killed() -> None:
    line = find_kill(KMSG, 18517)
    assert line is not None
    assert line.startswith("Memory cgroup out of memory: Killed process 18517 (llama-server)")
    assert find_kill(KMSG, 1851) is None
    assert find_kill(KMSG, 18517, since=14691.0) is None  # an earlier process of that number
    nowhere = Kills(in_group=None, on_machine=None)
    verdict = explain(nowhere, nowhere, line)
    assert verdict is not None
    assert verdict.by_kernel
    assert "anon-rss:68224kB" in verdict.words


def test_a_kill_of_something_else_days_ago_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [3]
    monkeypatch.setattr(oom, "read_kills", lambda: Kills(in_group=0, on_machine=counts[0]))
    monkeypatch.setattr(oom, "read_kill", lambda _pid, since: None)
    watch = KillWatch()
    counts[0] = 4  # a browser, while the engine went on
    watch.look()
    watch.look()
    person = watch.verdict(1)
    assert person is not None
    assert not person.by_kernel
    counts[0] = 5
    watch.look()  # between the engine's end and somebody noticing it
    kernel = watch.verdict(1)
    assert kernel is not None
    assert kernel.by_kernel


def test_an_empty_device_in_place_of_the_kernels_log_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_KMSG", Path("/dev/null"))
    assert read_kill(1, since=0.0) is None


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
        began = time.monotonic()
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as child:
            assert child.wait(60) == -signal.SIGKILL
        after = parse_kills((group / "memory.oom_control").read_text())
    finally:
        group.rmdir()
    if before is None or after is None:
        pytest.skip("this kernel does not count kills per group")
    assert after == before + 1
    if os.access("/dev/kmsg", os.R_OK):
        assert f"Killed process {child.pid} " in (read_kill(child.pid, since=began) or "")
