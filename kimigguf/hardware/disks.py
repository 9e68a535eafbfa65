"""The file systems of a Linux machine that could hold a model, and what lies under them.

A device is followed through partitions, RAID, LVM and encryption to the drives it is made of; the slowest kind among
them is the disk's. Virtual disks do not tell what is under them, so their kind is unknown, except where a cloud names
its own network volumes.
"""

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from kimigguf.hardware.facts import Facts, unknowns
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import Mount, parse_mountinfo
from kimigguf.hardware.pci import link_above
from kimigguf.hardware.probes import Answer, ask_all
from kimigguf.hardware.snapshot import Disk, DiskKind, Unknown
from kimigguf.units import GIB, KIB

_LOCAL: Final = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "ntfs", "ntfs3", "fuseblk",
    "exfat", "ufs", "nilfs2",
})  # fmt: skip
_NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "pvfs2", "orangefs",
    "afs", "9p", "virtiofs", "davfs",
})  # fmt: skip
_NETWORK_FUSE: Final = frozenset({
    "sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "juicefs", "glusterfs", "cephfs", "blobfuse2", "mount-s3",
})  # fmt: skip
_SMALLEST_BYTES: Final = 32 * GIB
"""Below this a file system other than the root holds no quant's first shards; boot and recovery partitions."""
_BOOT: Final = re.compile(r"/(boot|efi|snap|var/lib/docker/.|var/lib/containers/.|run(?!/media/)|dev|proc|sys)(/|$)")
_SLOWEST_FIRST: Final = (DiskKind.HDD, DiskKind.NETWORK, DiskKind.SSD, DiskKind.NVME)
_NETWORK_MODELS: Final = re.compile(r"Amazon Elastic Block Store|nvme_card-pd|PersistentDisk|MSFT NVMe Accelerator")
_VIRTUAL_MODELS: Final = re.compile(r"QEMU|VMware|Virtual|VBOX|Msft", re.IGNORECASE)
_VIRTUAL_NAMES: Final = re.compile(r"(vd|xvd|loop|zram|nbd|rbd|drbd)")
_SIZE_LIMIT_SECONDS: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What is under a mount: the kind, the drives by name, the first one's model and folder in /sys."""

    kind: DiskKind | None
    members: tuple[str, ...] = ()
    model: str | None = None
    folder: str | None = None
    reason: str | None = None


def candidates(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """The mounts that could hold a model: one per file system (the shortest path, the root first), in mount order.

    Memory (tmpfs), read-only images, boot partitions and single files bound into a container are left out.
    """
    best: dict[tuple[str, str], Mount] = {}
    for mount in mounts:
        if not _could_hold(mount):
            continue
        key = (mount.device, mount.source if mount.file_system in _NETWORK else "")
        known = best.get(key)
        if known is None or len(mount.mount_point) < len(known.mount_point):
            best[key] = mount
    return tuple(best.values())


def _could_hold(mount: Mount) -> bool:
    file_system, _, flavour = mount.file_system.partition(".")
    holds = file_system in _LOCAL | _NETWORK or file_system == "overlay" or (file_system == "fuse" and flavour != "")
    system_fuse = flavour in {"gvfsd-fuse", "portal", "lxcfs", "snapfuse", "fusectl"}
    bound_file = re.fullmatch(r"/etc/(hosts|hostname|resolv\.conf)|/\.\w+", mount.mount_point) is not None
    return holds and not system_fuse and not bound_file and _BOOT.match(mount.mount_point) is None


def is_network(file_system: str) -> bool:
    """Whether a file system's data comes over a network (or from a hypervisor's host, which is as opaque)."""
    family, _, flavour = file_system.partition(".")
    return family in _NETWORK or (family == "fuse" and flavour in _NETWORK_FUSE)


def find_device(host: Host, mount: Mount, mounts: tuple[Mount, ...] = ()) -> Device:
    """What is under a mount; ``mounts`` lets an overlay be followed to where it writes."""
    family = mount.file_system.partition(".")[0]
    if is_network(mount.file_system):
        return Device(kind=DiskKind.NETWORK)
    if family == "overlay":
        return _under_overlay(host, mount, mounts)
    if family == "zfs":
        return Device(kind=None, reason=f"a ZFS pool: zpool status {mount.source.partition('/')[0]}")
    if family == "fuse":
        return Device(kind=None, reason=f"{mount.file_system} does not tell where its data lies")
    folder = _block_folder(host, mount)
    if folder is None:
        return Device(kind=None, reason=f"{mount.source} ({mount.device}) is not to be found in /sys")
    return resolve(host, folder)


def _under_overlay(host: Host, mount: Mount, mounts: tuple[Mount, ...]) -> Device:
    """Follow an overlay's upper folder, unless it lies on a file system of the host that a container cannot see."""
    upper = next((x.partition("=")[2] for x in mount.super_options if x.startswith("upperdir=")), None)
    reason = "a container's overlay: the drive under it is the host's and not visible here"
    if upper is None or mount.mount_point == "/":
        return Device(kind=None, reason=reason)
    under = [m for m in mounts if m is not mount and (upper + "/").startswith(m.mount_point.rstrip("/") + "/")]
    if not under:
        return Device(kind=None, reason=reason)
    return find_device(host, max(under, key=lambda m: len(m.mount_point)))


def _block_folder(host: Host, mount: Mount) -> str | None:
    """The mount's block device in /sys, by number, or by name where the number is anonymous (btrfs)."""
    by_number = host.real(f"/sys/dev/block/{mount.device}")
    if by_number is not None:
        return by_number
    name = posixpath.basename(mount.source)
    if mount.source.startswith("/dev/mapper/"):
        for candidate in host.names("sys/block"):
            if host.text(f"sys/block/{candidate}/dm/name") == name:
                return host.real(f"/sys/block/{candidate}")
    return host.real(f"/sys/class/block/{name}") if mount.source.startswith("/dev/") else None


def resolve(host: Host, folder: str, depth: int = 0) -> Device:
    """Follow one block device folder down to drives. ``depth`` ends a loop that a broken /sys could hold."""
    if host.exists(f"{folder}/partition"):
        folder = posixpath.dirname(folder)
    below = host.names(f"{folder}/slaves")
    if not below or depth > 8:  # noqa: PLR2004 -- no one stacks more
        return _drive(host, folder)
    parts = [
        resolve(host, target, depth + 1)
        for name in below
        if (target := host.real(f"{folder}/slaves/{name}") or host.real(f"/sys/class/block/{name}")) is not None
    ]
    if not parts:
        return Device(kind=None, reason=f"the members of {posixpath.basename(folder)} are not to be found in /sys")
    reason = next((part.reason for part in parts if part.reason), None)
    kinds = [part.kind for part in parts]
    slowest = None if None in kinds else next(kind for kind in _SLOWEST_FIRST if kind in kinds)
    members = tuple(dict.fromkeys(member for part in parts for member in part.members))
    return Device(kind=slowest, members=members, model=parts[0].model, folder=parts[0].folder, reason=reason)


def _drive(host: Host, folder: str) -> Device:
    name = posixpath.basename(folder)
    model = host.text(f"{folder}/device/model") or None
    kind, reason = classify(
        name,
        folder,
        model,
        rotational=host.number(f"{folder}/queue/rotational"),
        transport=_transport(host, folder),
    )
    return Device(kind=kind, members=(name,), model=model, folder=folder, reason=reason)


def _transport(host: Host, folder: str) -> str | None:
    """How an NVMe drive is attached: ``pcie``, or ``tcp``, ``rdma``, ``fc`` over a network."""
    return host.text(f"{folder}/device/transport") or host.text(f"{posixpath.dirname(folder)}/transport")


def classify(
    name: str, folder: str, model: str | None, *, rotational: int | None, transport: str | None
) -> tuple[DiskKind | None, str | None]:
    """The kind of one drive, or why it cannot be told."""
    if model is not None and _NETWORK_MODELS.search(model):
        return DiskKind.NETWORK, None
    if name.startswith("nvme"):
        remote = transport is not None and transport not in {"pcie", "apple-nvme"}
        return (DiskKind.NETWORK if remote else DiskKind.NVME), None
    if "/session" in folder or name.startswith(("nbd", "rbd", "drbd")):
        return DiskKind.NETWORK, None
    if _VIRTUAL_NAMES.match(name) or (model is not None and _VIRTUAL_MODELS.search(model)):
        return None, f"{name} is a virtual disk; what lies under it only the hypervisor knows"
    if rotational is None:
        return None, f"/sys does not tell whether {name} turns"
    return (DiskKind.HDD if rotational else DiskKind.SSD), None


def read_disks(host: Host) -> Facts:
    """Every mount that could hold a model, with sizes asked side by side: a dead network mount costs its sizes only."""
    text = host.text("proc/self/mountinfo")
    if text is None:
        return Facts(unknown=(Unknown(what="disks", reason="/proc/self/mountinfo cannot be read"),))
    mounts = parse_mountinfo(text)
    chosen = candidates(mounts)
    points = [mount.mount_point for mount in chosen]
    sizes = {f"size {point}": partial(host.size_of, point) for point in points}
    direct = {f"direct {point}": partial(host.direct_io_of, point) for point in points}
    quotas = {f"quota {point}": partial(host.quota_room, point) for point in points}
    said: dict[str, Answer[Any]] = ask_all({**sizes, **direct, **quotas}, limit_seconds=_SIZE_LIMIT_SECONDS)
    disks: list[Disk] = []
    unknown: list[Unknown] = []
    for mount in chosen:
        size, works, room = (said[f"{what} {mount.mount_point}"] for what in ("size", "direct", "quota"))
        if size.value is not None and size.value.total_bytes < _SMALLEST_BYTES and mount.mount_point != "/":
            continue
        disk, reason = _disk(host, mount, find_device(host, mount, mounts))
        where = f"disks.{len(disks)}"
        if size.value is not None and 0 <= size.value.free_bytes <= size.value.total_bytes:
            disk = replace(disk, total_bytes=size.value.total_bytes, free_bytes=size.value.free_bytes)
        disk = replace(disk, free_bytes=least(disk.free_bytes, room.value), direct_io=works.value)
        disks.append(disk)
        unknown += unknowns(
            [
                (f"{where}.kind", disk.kind, reason or "not told"),
                (f"{where}.free_bytes", disk.free_bytes, size.reason or "the file system's own numbers contradict"),
                (f"{where}.direct_io", disk.direct_io, works.reason or "not told"),
                (f"{where}.quota", None if room.reason else 0, f"{room.reason}; this may tell: quota -s"),
            ]
        )
    return Facts(disks=tuple(disks), unknown=tuple(unknown))


def least(free: int | None, room: int | None) -> int | None:
    """What a user may still write: the free space, or what a quota leaves where that is less."""
    return free if room is None or free is None else min(free, room)


def _disk(host: Host, mount: Mount, device: Device) -> tuple[Disk, str | None]:
    ahead = host.number(f"sys/class/bdi/{mount.device}/read_ahead_kb")
    if ahead is None and device.folder is not None:
        ahead = host.number(f"{device.folder}/queue/read_ahead_kb")
    return Disk(
        mount=mount.mount_point,
        file_system=mount.file_system,
        kind=device.kind,
        device=mount.source,
        members=device.members,
        model=device.model,
        pcie=link_above(host, device.folder) if device.folder and device.kind is DiskKind.NVME else None,
        read_only="ro" in mount.options or "ro" in mount.super_options,
        read_ahead_bytes=None if ahead is None else ahead * KIB,
    ), device.reason
