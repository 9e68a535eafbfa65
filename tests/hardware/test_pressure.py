"""How hard the kernel fights for memory: its pressure files, v1 and v2, and a real group that is squeezed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes import until

from kimigguf.hardware.host import Host
from kimigguf.hardware.pressure import MemoryPressure, Room, Stall, parse_stall, read_pressure, read_processor_stall
from kimigguf.units import GIB, MIB

SQUEEZED = (
    "some avg10=42.50 avg60=18.25 avg300=6.01 total=123456789\nfull avg10=40.00 avg60=12.25 avg300=5.00 total=99999\n"
)
_CALM = Stall(of_10_seconds=0.0, of_60_seconds=0.0, of_300_seconds=0.0)
MOUNT_V2 = "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
MOUNTS_V1 = (
    "25 20 0:22 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "26 20 0:23 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        (SQUEEZED, 12.25),
        (SQUEEZED.splitlines()[0], 18.25),  # where nothing but "some" is counted
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0.0),
        ("full avg10=1.2.3 avg60=0.00 avg300=0.00 total=0", None),
        ("full avg10=900.00 avg60=900.00 avg300=0.00 total=0", None),
        ("nonsense", None),
        ("", None),
        (None, None),
    ],
)
def test_the_time_in_which_nothing_got_on_is_read(text: str | None, percent: float | None) -> None:
    stall = parse_stall(text)
    assert (stall.of_60_seconds if stall else None) == percent


def test_a_thread_without_a_processor_counts_although_others_run(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kimi.service"
    files = {
        "proc/7/cgroup": "0::/kimi.service\n",
        "proc/self/mountinfo": MOUNT_V2,
        "proc/pressure/cpu": "some avg10=1.00 avg60=1.00 avg300=0.00 total=0\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    }
    assert read_processor_stall(7, machine(tmp_path, files)) == Stall(
        of_10_seconds=1.0, of_60_seconds=1.0, of_300_seconds=0.0
    )
    own = read_processor_stall(7, machine(tmp_path, {f"{group}/cpu.pressure": SQUEEZED}))
    assert own is not None
    assert own.of_60_seconds == 18.25
    assert read_processor_stall(7, Host(root=tmp_path / "nothing")) is None


def machine(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root=root, system="linux")


def test_a_v2_group_tells_its_own_stalls_room_and_throttling(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kimi.service"
    host = machine(
        tmp_path,
        {
            "proc/7/cgroup": "0::/kimi.service\n",
            "proc/self/mountinfo": MOUNT_V2,
            "proc/pressure/memory": "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
            "proc/meminfo": "MemTotal: 1048576000 kB\nMemAvailable: 524288000 kB\n",
            f"{group}/memory.pressure": SQUEEZED,
            f"{group}/memory.max": f"{700 * GIB}\n",
            f"{group}/memory.high": f"{650 * GIB}\n",
            f"{group}/memory.current": f"{649 * GIB}\n",
            f"{group}/memory.stat": f"inactive_file {2 * GIB}\nactive_file 0\nfile_dirty 0\nfile_writeback 0\n",
            f"{group}/memory.events": "low 0\nhigh 31\nmax 0\noom 0\noom_kill 0\n",
        },
    )
    assert read_pressure(7, host) == MemoryPressure(
        stall=Stall(of_10_seconds=40.0, of_60_seconds=12.25, of_300_seconds=5.0),
        rooms=(
            Room(name="the cgroup", total_bytes=650 * GIB, left_bytes=3 * GIB),
            Room(name="the machine", total_bytes=1000 * GIB, left_bytes=500 * GIB),
        ),
        throttled=31,
    )


def test_under_v1_the_clock_of_stalls_is_in_the_v2_tree_beside_it(tmp_path: Path) -> None:
    files = {
        "proc/7/cgroup": "4:memory:/box\n0::/box\n",
        "proc/self/mountinfo": MOUNTS_V1,
        "sys/fs/cgroup/unified/box/memory.pressure": SQUEEZED,
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{64 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{60 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 0\n",
    }
    reading = read_pressure(7, machine(tmp_path, files))
    assert reading.stall is not None
    assert reading.stall.of_60_seconds == 12.25
    assert reading.rooms == (Room(name="the cgroup", total_bytes=64 * GIB, left_bytes=4 * GIB),)
    assert reading.throttled is None  # v1 has no memory.high


def test_without_a_group_it_is_the_machines(tmp_path: Path) -> None:
    reading = read_pressure(7, machine(tmp_path, {"proc/pressure/memory": SQUEEZED}))
    assert reading.stall is not None
    assert reading.stall.of_300_seconds == 5.0
    assert reading.rooms == ()


def test_a_system_that_tells_nothing_leaves_everything_unknown(tmp_path: Path) -> None:
    assert read_pressure(7, Host(root=tmp_path)) == MemoryPressure()


# It holds main memory, a MiB more for each line that it reads; "read" has it read a file that has no room beside it.
_CHILD = """
import mmap, os, random, sys
for group in sys.argv[2:]:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
file = open(sys.argv[1], "rb")
os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
held, pages = [], mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("up", flush=True)
for line in sys.stdin:
    while line == "read\\n":
        pages[random.randrange(len(pages) // 4096) * 4096]
    held.append(os.urandom(1 << 20))
    print("more", flush=True)
"""


@pytest.fixture
def groups() -> Iterator[tuple[Path, ...]]:
    """A v1 memory group of 64 MiB, and one in the v2 tree that counts its stalls."""
    made = [Path(f"/sys/fs/cgroup/{tree}/kimigguf-pressure-{os.getpid()}") for tree in ("memory", "unified")]
    try:
        for group in made:
            group.mkdir()
        (made[0] / "memory.limit_in_bytes").write_text(str(64 * MIB))
        (made[1] / "memory.pressure").read_text()
    except OSError as error:
        for group in made:
            if group.is_dir():
                group.rmdir()
        pytest.skip(f"no v1 memory group with a clock of stalls can be made here: {error}")
    yield tuple(made)
    for group in made:
        until(lambda group=group: not (group / "cgroup.procs").read_text())  # type: ignore[misc]  # bound now
        group.rmdir()


def test_a_real_group_that_fills_up_and_thrashes_is_seen(groups: tuple[Path, ...], tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        for _ in range(96):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
    argv = [sys.executable, "-c", _CHILD, str(big), *map(str, groups)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"

            def room() -> Room:
                found = read_pressure(child.pid).rooms[0]
                assert (found.name, found.total_bytes) == ("the cgroup", 64 * MIB)
                return found

            before = room().left_bytes
            while room().left_bytes > 6 * MIB:
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "more\n"  # it is still alive
            assert before > 30 * MIB
            child.stdin.write("read\n")
            child.stdin.flush()
            assert until(lambda: (read_pressure(child.pid).stall or _CALM).of_10_seconds > 1.0, seconds=20)
        finally:
            child.kill()
