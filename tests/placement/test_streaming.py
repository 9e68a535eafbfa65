"""Experts stream only from a local NVMe that holds the files, or has room for them."""

import pytest

from kimigguf.hardware.snapshot import Disk, DiskKind
from kimigguf.placement.streaming import can_stream


def disk(mount: str, kind: DiskKind | None, free: int = 0, *, read_only: bool = False) -> Disk:
    return Disk(mount=mount, kind=kind, free_bytes=free, read_only=read_only)


ROOT_AND_HDD = (disk("/", DiskKind.NVME, 5), disk("/hdd", DiskKind.HDD, 10**6))


@pytest.mark.parametrize(
    ("disks", "folder", "may"),
    [
        ((disk("/", DiskKind.NVME, 10),), None, True),
        ((disk("/", DiskKind.NVME, 9),), None, False),
        ((disk("/", DiskKind.NVME, 99, read_only=True),), None, False),
        ((disk("/", DiskKind.HDD, 99), disk("/fast", DiskKind.NVME, 99)), None, True),
        ((disk("/", None, 99),), None, False),
        ((), None, False),
        (None, None, False),
        # Files that are here need no room, but must lie on the NVMe itself.
        ((disk("/", DiskKind.NVME, 0, read_only=True),), "/models/k3", True),
        (ROOT_AND_HDD, "/hdd/k3", False),
        (ROOT_AND_HDD, "/hddX/k3", True),
        (None, "/models/k3", False),
    ],
)
def test_only_a_local_nvme_that_holds_or_could_hold_the_files(
    disks: tuple[Disk, ...] | None, folder: str | None, may: bool
) -> None:
    assert can_stream(disks, 10, folder=folder) is may
