"""Measured rates: real ones of this machine, and those that must not be believed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kimigguf.errors import MachineError
from kimigguf.events import Advance, Event, Notice
from kimigguf.hardware.detect import detect
from kimigguf.hardware.host import Host
from kimigguf.hardware.measure import (
    DiskRates,
    buffer_bytes,
    cache_bytes,
    disk_of,
    judged,
    large_file,
    measure_disk,
    measure_memory,
    read_memory,
    takes_direct_io,
)
from kimigguf.hardware.snapshot import Disk, DiskKind, Machine, NumaNode, PcieLink, Ram
from kimigguf.units import GIB, MIB

DISK = Disk(mount="/", kind=DiskKind.NVME, pcie=PcieLink(generation=4, width=4), members=("nvme0n1",))


def rates(fastest: int, *, direct: bool = True) -> DiskRates:
    return DiskRates(sequential=fastest, random=fastest // 2, random_16=fastest // 2, direct=direct)


def test_memory_is_read_at_a_rate_that_memory_has() -> None:
    machine = measure_memory(detect(), Host(environ={}), seconds=0.3)
    assert machine.ram.read_bytes_per_second is not None
    assert 0.2e9 < machine.ram.read_bytes_per_second < 20e12


def test_nodes_are_measured_on_their_own_processors_and_memory_alone_is_not(tmp_path: Path) -> None:
    for node, cpus in ((0, "0"), (1, "0"), (2, "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    nodes = (NumaNode(index=0, cpus=1), NumaNode(index=1, cpus=1), NumaNode(index=2, cpus=0))
    machine = Machine(name="x", source="y", ram=Ram(numa=nodes, rated_bytes_per_second=1, available_bytes=GIB))
    said: list[Event] = []
    measured = measure_memory(machine, Host(root=tmp_path, environ={}), seconds=0.1, listen=said.append).ram.numa
    assert measured is not None
    assert [node.read_bytes_per_second is not None for node in measured] == [True, True, False]
    assert any(isinstance(event, Notice) and "% of the modules'" in event.text for event in said)


def test_buffers_are_larger_than_the_caches_and_never_fill_the_memory(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(shared)
        (folder / "size").write_text("32768K")
    assert cache_bytes(Host(root=tmp_path, environ={})) == 64 * MIB
    assert cache_bytes(Host(root=tmp_path / "none", environ={})) == 64 * MIB
    assert buffer_bytes(512 * MIB, 16, None) == 128 * MIB
    assert buffer_bytes(64 * MIB, 64, None) == 64 * MIB
    assert buffer_bytes(64 * MIB, 2, 512 * MIB) == 32 * MIB


def test_a_buffer_that_cannot_be_had_ends_the_measurement_instead_of_hanging() -> None:
    with pytest.raises(MachineError) as caught:
        read_memory([0, 0], 1 << 62, 0.1)
    assert caught.value.code == "memory-not-measurable"
    assert caught.value.cause


def test_a_control_groups_rest_bounds_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def record(cpus: list[int], each: int, _seconds: float) -> int:
        asked.append(each * len(cpus))
        return 1

    monkeypatch.setattr("kimigguf.hardware.measure.read_memory", record)
    ram = Ram(available_bytes=64 * GIB, cgroup_available_bytes=256 * MIB)
    measure_memory(Machine(name="x", source="y", ram=ram), Host(environ={}))
    assert asked[0] <= 32 * MIB


def test_a_disk_is_read_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    machine = Machine(name="x", source="y", disks=(Disk(mount="/", kind=DiskKind.SSD, free_bytes=10**12),))
    seen: list[Event] = []
    measured = measure_disk(machine, tmp_path / "models", file_bytes=96 * MIB, seconds=0.3, listen=seen.append)
    (disk,) = measured.disks or ()
    assert list((tmp_path / "models").iterdir()) == []
    assert disk.direct_io is not None
    if disk.direct_io:
        assert disk.read_bytes_per_second
        assert disk.random_read_bytes_per_second
        assert disk.random_read_16_bytes_per_second
    else:
        assert disk.read_bytes_per_second is None
        assert "page cache" in measured.notices[0]
    written = [event for event in seen if isinstance(event, Advance)]
    assert written[-1].done_bytes == written[-1].total_bytes == 96 * MIB


def test_a_file_system_without_o_direct_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr("kimigguf.hardware.measure.os.open", refuse)
    machine = Machine(name="x", source="y", disks=(Disk(mount="/"),))
    measured = measure_disk(machine, tmp_path, file_bytes=64 * MIB, seconds=0.1)
    assert (measured.disks or ())[0] == Disk(mount="/", direct_io=False)
    assert "is the page cache, not the disk" in measured.notices[0]


def test_a_shard_that_is_there_is_read_and_a_stub_full_of_holes_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "stub.gguf").open("wb") as file:
        file.truncate(64 * MIB)
    assert large_file(tmp_path, 64 * MIB) is None
    shard = tmp_path / "a" / "shard.gguf"
    shard.write_bytes(os.urandom(64 * MIB))
    assert large_file(tmp_path, 64 * MIB) == shard
    before = shard.stat()
    seen: list[Event] = []
    machine = Machine(name="x", source="y", disks=(Disk(mount="/"),))
    measure_disk(machine, tmp_path, file_bytes=64 * MIB, seconds=0.1, listen=seen.append)
    assert not [event for event in seen if isinstance(event, Advance)], "nothing was written"
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_o_direct_is_tried_without_leaving_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes_direct_io(tmp_path) in {True, False, None}
    assert list(tmp_path.iterdir()) == []
    assert takes_direct_io(tmp_path / "none") is None
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    if takes_direct_io(tmp_path):
        monkeypatch.setattr("kimigguf.hardware.measure.os.open", refuse)
        assert takes_direct_io(tmp_path) is False


def test_a_rate_above_the_links_is_refused() -> None:
    believed, notice = judged(DISK, rates(7 * 10**9))
    assert (believed.read_bytes_per_second, notice) == (7 * 10**9, None)
    refused, notice = judged(DISK, rates(9 * 10**9))
    assert refused.read_bytes_per_second is None
    assert notice is not None
    assert "more than its link's 7.9 GB/s" in notice
    raid, notice = judged(replace(DISK, members=("a", "b")), rates(14 * 10**9))
    assert (raid.read_bytes_per_second, notice) == (14 * 10**9, None)


def test_the_disk_is_the_one_that_the_folder_lies_on(tmp_path: Path) -> None:
    disks = (Disk(mount="/"), Disk(mount="/data"), Disk(mount="/data2"), Disk(mount="/data/models"))
    assert disk_of(disks, Path("/data2/x")) == 2
    assert disk_of(disks, Path("/data/models")) == 3
    assert disk_of(disks, Path("/elsewhere")) == 0
    assert disk_of((), Path("/x")) is None
    assert disk_of(None, Path("/x")) is None


def test_a_folder_on_no_known_disk_stays_unknown(tmp_path: Path) -> None:
    machine = Machine(name="x", source="y", disks=())
    said: list[Event] = []
    assert measure_disk(machine, tmp_path, listen=said.append) == machine
    assert len(said) == 1


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    full = Machine(name="x", source="y", disks=(Disk(mount="/", free_bytes=100 * MIB),))
    with pytest.raises(MachineError, match="no room") as caught:
        measure_disk(full, tmp_path)
    assert caught.value.code == "disk-not-measurable"
    (tmp_path / "file").write_text("")
    open_disk = Machine(name="x", source="y", disks=(Disk(mount="/"),))
    with pytest.raises(MachineError, match="cannot be measured"):
        measure_disk(open_disk, tmp_path / "file" / "models")
