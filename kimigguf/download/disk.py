"""Is there room? Asked before the first byte, on the file system that will hold it."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kimigguf import units
from kimigguf.errors import MachineError
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import Mount, parse_mountinfo
from kimigguf.hardware.snapshot import Disk, DiskKind

_SLACK_LEAST: Final = 16 << 20
_NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "davfs",
    "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.glusterfs", "fuse.gcsfuse", "fuse.juicefs", "fuse.ceph",
})  # fmt: skip


def slack_bytes(remaining_bytes: int) -> int:
    """What must stay free beyond the files themselves: journals, metadata, others' writing. 0.5 %, at least 16 MiB."""
    return max(_SLACK_LEAST, remaining_bytes // 200)


def free_bytes(folder: Path) -> int:
    """What this user may still write on the file system that ``folder`` lies on, or would.

    Raises:
        MachineError: ``cannot-write``.
    """
    place = existing(folder)
    try:
        return shutil.disk_usage(place).free
    except OSError as error:
        raise MachineError(f"cannot look at the disk of {place}", code="cannot-write", cause=error.strerror) from error


def existing(folder: Path) -> Path:
    """The nearest folder above (or at) ``folder`` that exists."""
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    return place


def require(folder: Path, remaining_bytes: int, *, slack: bool = True) -> None:
    """Refuse a download that can't fit.

    Raises:
        MachineError: ``disk-full`` with what is missing.
    """
    free, need = free_bytes(folder), remaining_bytes + (slack_bytes(remaining_bytes) if slack else 0)
    if remaining_bytes > 0 and free < need:
        raise MachineError(
            f"not enough room on the disk of {folder}: {units.storage(need)} to come, {units.storage(free)} free",
            code="disk-full",
            cause=f"{units.storage(need - free)} are missing" + (" (the files and 0.5 % to spare)" if slack else ""),
            hint="make room, or choose another disk with --models-dir "
            + shlex.quote(other_place(usable(read_all()), need) or "DIR"),
        )


def other_place(disks: Sequence[Disk], need_bytes: int) -> str | None:
    """A folder on the fastest local disk with room, to be named to a user; None if there is none."""
    speed = {DiskKind.NVME: 3, DiskKind.SSD: 2, None: 1, DiskKind.HDD: 0}
    roomy = [
        disk
        for disk in disks
        if disk.kind is not DiskKind.NETWORK and not disk.read_only and (disk.free_bytes or 0) >= need_bytes
    ]
    best = max(roomy, key=lambda disk: (speed[disk.kind], disk.free_bytes or 0), default=None)
    return None if best is None else str(folder_on(best))


def folder_on(disk: Disk) -> Path:
    """Where models go on a disk."""
    return Path(disk.mount) / "kimigguf" / "models"


def usable(disks: Sequence[Disk], host: Host | None = None) -> tuple[Disk, ...]:
    """Those that this user may fill: local, writable, and not to be unplugged."""
    host = host or Host()
    return tuple(
        disk
        for disk in disks
        if disk.kind is not DiskKind.NETWORK
        and not disk.read_only
        and not is_removable(disk, host)
        and os.access(existing(host.path(str(folder_on(disk)))), os.W_OK | os.X_OK)
    )


def is_removable(disk: Disk, host: Host) -> bool:
    """Whether a disk is a card, on USB or behind a plug: it may be gone tomorrow."""
    if disk.mount.startswith(("/media/", "/run/media/")):
        return True
    folders = [found for name in disk.members if (found := host.real(f"/sys/class/block/{name}")) is not None]
    return any(
        "/usb" in folder
        or host.number(f"{folder}/removable") == 1
        or any(host.text(f"{above}/removable") == "removable" for above in Path(folder).parents)
        for folder in folders
    )


def read_all() -> tuple[Disk, ...]:
    """This machine's disks, as far as they can be told."""
    import sys  # noqa: PLC0415 -- with the reader, only when a place is looked for

    from kimigguf.hardware.disks import read_disks  # noqa: PLC0415 -- asks every mount; only when a place is looked for

    return (read_disks(Host()).disks or ()) if sys.platform.startswith("linux") else ()


def read_mounts() -> tuple[Mount, ...]:
    """This machine's mounts; none where they can't be read."""
    try:
        return parse_mountinfo(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def mount_of(folder: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that a folder lies on: the longest path above it, and of two on the same place the later."""
    above = [mount for mount in mounts if folder.is_relative_to(mount.mount_point)]
    return max(enumerate(above), key=lambda m: (len(m[1].mount_point), m[0]), default=(0, None))[1]


def refuse_network(folder: Path) -> None:
    """Refuse to fill a network mount that nobody has named; where mounts can't be read, nothing is refused.

    Raises:
        MachineError: ``network-mount``.
    """
    mount = mount_of(existing(folder).resolve(), read_mounts())
    if mount is not None and mount.file_system in _NETWORK:
        raise MachineError(
            f"{folder} lies on a network mount ({mount.file_system} at {mount.mount_point})",
            code="network-mount",
            cause="a model there is read over the network at every start, and for every token if memory is short",
            hint=f"choose a local disk with --models-dir DIR, or insist: --models-dir {folder.parents[2]}",
        )
