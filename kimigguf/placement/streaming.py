"""Whether experts that memory cannot hold may be read from disk again and again: only from a local NVMe."""

from collections.abc import Sequence
from pathlib import PurePath

from kimigguf.hardware.snapshot import Disk, DiskKind


def can_stream(disks: Sequence[Disk] | None, size_bytes: int, *, folder: str | None) -> bool:
    """Whether the files lie on a local NVMe (``folder``), or, while they are nowhere, would find room on one.

    Args:
        disks: The machine's disks; None: unknown, which is no yes.
        size_bytes: Size of the files.
        folder: Where they are on this very machine; None while they are not.
    """
    if folder is not None:
        disk = _under(disks or (), PurePath(folder))
        return disk is not None and disk.kind is DiskKind.NVME
    return any(
        disk.kind is DiskKind.NVME and not disk.read_only and (disk.free_bytes or 0) >= size_bytes
        for disk in disks or ()
    )


def _under(disks: Sequence[Disk], folder: PurePath) -> Disk | None:
    """The disk that a folder lies on: the one with the longest mount above it."""
    above = [disk for disk in disks if folder.is_relative_to(disk.mount)]
    return max(above, key=lambda disk: len(disk.mount), default=None)
