"""Disks: what is under a mount, and what a dead one costs."""

import time
from pathlib import Path

import pytest
from hardware.captures import Loader

from kimigguf.hardware.disks import candidates, classify, read_disks, resolve
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.snapshot import DiskKind, PcieLink
from kimigguf.units import KIB


def test_every_kind_of_disk_is_told_apart_and_a_dead_mount_costs_its_sizes_only(capture: Loader) -> None:
    host = capture("disks")
    started = time.monotonic()
    facts = read_disks(host)
    assert time.monotonic() - started < 1.0
    disks = {disk.mount: disk for disk in facts.disks or ()}
    assert {mount: disk.kind for mount, disk in disks.items()} == {
        "/": DiskKind.NVME,
        "/raid": DiskKind.NVME,
        "/data": DiskKind.SSD,
        "/run/media/alice/usb": DiskKind.HDD,
        "/pool": DiskKind.NVME,
        "/tank": None,
        "/mnt/nas": DiskKind.NETWORK,
        "/mnt/dead": DiskKind.NETWORK,
        "/mnt/win": DiskKind.NETWORK,
        "/mnt/ssh": DiskKind.NETWORK,
        "/mnt/mystery": None,
        "/ro": DiskKind.NVME,
    }
    root = disks["/"]
    assert (root.model, root.free_bytes) == ("Samsung SSD 990 PRO 4TB", 3000000000000)
    assert root.pcie == PcieLink(generation=4, width=4, max_generation=4, max_width=4)
    assert root.read_ahead_bytes == 128 * KIB
    assert disks["/raid"].members == ("nvme1n1", "nvme2n1")
    assert (disks["/data"].members, disks["/data"].model) == (("sda",), "CT2000MX500SSD1")
    assert disks["/ro"].read_only
    assert disks["/mnt/dead"].free_bytes is None
    reasons = {one.what: one.reason for one in facts.unknown}
    mounts = list(disks)
    assert "zpool status tank" in reasons[f"disks.{mounts.index('/tank')}.kind"]
    assert "no answer within" in reasons[f"disks.{mounts.index('/mnt/dead')}.free_bytes"]


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        (("nvme0n1", "sda"), DiskKind.HDD),
        (("sda", "nvme0n1"), DiskKind.HDD),
        (("nvme0n1", "nvme1n1"), DiskKind.NVME),
        (("nvme0n1", "vda"), None),
    ],
)
def test_a_raid_is_as_slow_as_its_slowest_member_and_unknown_if_one_is(
    tmp_path: Path, members: tuple[str, ...], kind: DiskKind | None
) -> None:
    for name, turns in (("nvme0n1", "0"), ("nvme1n1", "0"), ("sda", "1"), ("vda", "1")):
        (tmp_path / f"sys/devices/{name}/queue").mkdir(parents=True)
        (tmp_path / f"sys/devices/{name}/queue/rotational").write_text(turns)
    (tmp_path / "sys/devices/md0/slaves").mkdir(parents=True)
    for place, member in enumerate(members):
        (tmp_path / f"sys/devices/md0/slaves/{place}").symlink_to(f"../../{member}")
    device = resolve(Host(root=tmp_path, environ={}), "/sys/devices/md0")
    assert (device.kind, device.members) == (kind, members)
    assert (device.reason is None) == (kind is not None)


def test_a_stack_of_devices_that_loops_ends(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/dm-0/slaves").mkdir(parents=True)
    (tmp_path / "sys/devices/dm-0/slaves/dm-0").symlink_to("../../dm-0")
    assert resolve(Host(root=tmp_path, environ={}), "/sys/devices/dm-0").kind is None


def test_the_same_file_system_mounted_twice_counts_once(capture: Loader) -> None:
    text = capture("disks").text("proc/self/mountinfo") or ""
    mounts = [mount.mount_point for mount in candidates(parse_mountinfo(text))]
    assert "/home" not in mounts
    assert "/boot/efi" not in mounts
    assert "/dev/shm" not in mounts
    assert "/snap/core/1" not in mounts


def test_a_containers_overlay_does_not_pretend_to_know_its_drive(capture: Loader) -> None:
    facts = read_disks(capture("docker-v1"))
    (disk,) = facts.disks or ()
    assert (disk.mount, disk.file_system, disk.kind) == ("/", "overlay", None)
    assert "not visible here" in facts.unknown[0].reason


def test_a_virtual_disk_that_says_it_turns_is_not_called_a_hard_disk(capture: Loader) -> None:
    (disk,) = read_disks(capture("vm-v1-no-limit")).disks or ()
    assert (disk.kind, disk.members, disk.read_ahead_bytes) == (None, ("vda",), 8192 * KIB)


@pytest.mark.parametrize(
    ("name", "folder", "model", "rotational", "transport", "expected"),
    [
        ("nvme0n1", "/sys/devices/x", "Amazon Elastic Block Store", 0, "pcie", DiskKind.NETWORK),
        ("nvme1n1", "/sys/devices/x", "Amazon EC2 NVMe Instance Storage", 0, "pcie", DiskKind.NVME),
        ("nvme0n1", "/sys/devices/x", "nvme_card-pd", 0, "pcie", DiskKind.NETWORK),
        ("nvme2n1", "/sys/devices/x", "Linux", 0, "tcp", DiskKind.NETWORK),
        ("nvme3n1", "/sys/devices/x", None, None, None, DiskKind.NVME),
        ("sda", "/sys/devices/platform/host2/session1/target", "LUN", 1, None, DiskKind.NETWORK),
        ("sda", "/sys/devices/x", "QEMU HARDDISK", 1, None, None),
        ("sda", "/sys/devices/x", "WDC WD80", 1, None, DiskKind.HDD),
        ("sda", "/sys/devices/x", "WDC WD80", None, None, None),
        ("rbd0", "/sys/devices/rbd", None, 0, None, DiskKind.NETWORK),
        ("xvda", "/sys/devices/x", None, 0, None, None),
    ],
)
def test_kinds(  # noqa: PLR0917 -- the columns of the table
    name: str, folder: str, model: str | None, rotational: int | None, transport: str | None, expected: DiskKind | None
) -> None:
    kind, reason = classify(name, folder, model, rotational=rotational, transport=transport)
    assert kind == expected
    assert (reason is None) == (kind is not None)
