"""What control groups allow this process: memory and processor time, through every group above it, v1 and v2.

Sources: the kernel's admin guide on cgroup-v1 (memory.txt) and cgroup-v2, and cgroup_namespaces(7) for the ways in
which a container's view is cut: the path in /proc/self/cgroup and the root of the mount in /proc/self/mountinfo.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kimigguf.hardware.facts import Facts
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import Mount, parse_mountinfo
from kimigguf.hardware.snapshot import Cpu, Ram, Unknown

_NO_LIMIT_FROM: Final = 1 << 60
"""v1 writes "no limit" as the largest page-aligned number below 2^63; no machine has an exbibyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one group allows, in bytes; ``available_bytes`` None where its use cannot be read."""

    group: str
    limit_bytes: int
    available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where one controller's groups are mounted, and this process's path in it. ``version`` is 1 or 2."""

    version: int
    mount: Mount
    path: str


def parse_limit(text: str | None) -> int | None:
    """A limit file's bytes; None for ``max``, for v1's "no limit" and for what is no number."""
    if text is None or not re.fullmatch(r"\d{1,20}", text.strip()):
        return None
    value = int(text)
    return None if value >= _NO_LIMIT_FROM else value


def parse_stat(text: str | None) -> dict[str, int]:
    """The numbers of a memory.stat file by name."""
    return {m[1]: int(m[2]) for m in re.finditer(r"^(\w+) (\d{1,20})$", text or "", re.MULTILINE)}


def find_hierarchy(cgroup_text: str, mounts: tuple[Mount, ...], controller: str) -> Hierarchy | None:
    """The hierarchy that holds ``controller``: a v1 mount of its own where there is one, else the v2 tree."""
    paths = {}
    for line in cgroup_text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(",") if controllers else [""]:
            paths[name if number != "0" else ""] = path
    for mount in mounts:
        if mount.file_system == "cgroup" and controller in mount.super_options and controller in paths:
            return Hierarchy(version=1, mount=mount, path=paths[controller])
    for mount in mounts:
        if mount.file_system == "cgroup2" and "" in paths:
            return Hierarchy(version=2, mount=mount, path=paths[""])
    return None


def groups(host: Host, hierarchy: Hierarchy) -> Iterator[str]:
    """This process's group and every one above it that is mounted here, innermost first, as names of folders.

    With a cgroup namespace of its own a process sees "/" and a mount whose root is "/". Without one it sees the
    host's path, and the mount is often the bind mount of just its own group: its root is then a prefix of the path.
    A path that starts with ".." lies above the namespace's root, where nothing can be followed.
    """
    top = hierarchy.mount.mount_point
    path = posixpath.normpath("/" + hierarchy.path.lstrip("/"))
    if hierarchy.path.startswith("/.."):
        path = "/"
    root = hierarchy.mount.root.rstrip("/")
    if root and (path + "/").startswith(root + "/"):
        path = path[len(root) :] or "/"
    folder = posixpath.normpath(top + path)
    while not host.exists(folder) and folder != top and folder.startswith(top + "/"):
        folder = posixpath.dirname(folder)
    while folder.startswith(top):
        yield folder
        if folder == top:
            return
        folder = posixpath.dirname(folder)


def memory_limits(host: Host, hierarchy: Hierarchy) -> tuple[Limit, ...]:
    """The memory limit of every visible group that has one, innermost first."""
    read = _limit_v1 if hierarchy.version == 1 else _limit_v2
    found = [limit for folder in groups(host, hierarchy) if (limit := read(host, folder)) is not None]
    if hierarchy.version == 1 and (hidden := _hidden_limit_v1(host, hierarchy, found)):
        found.append(hidden)
    return tuple(found)


def _droppable(stat: Mapping[str, int], prefix: str) -> int:
    """Page cache that the kernel can drop: clean file pages, the active ones too.

    A model's shards become active when they are read a second time (hashed, then mapped; or by the run before), and
    would otherwise count against the very model that is to be loaded again. Shared memory and locked pages are in
    neither list.
    """
    held = sum(stat.get(prefix + key, 0) for key in ("inactive_file", "active_file"))
    unwritten = ("dirty", "writeback") if prefix else ("file_dirty", "file_writeback")  # v1 names them otherwise
    return max(0, held - sum(stat.get(prefix + key, 0) for key in unwritten))


def _limit_v2(host: Host, folder: str) -> Limit | None:
    """memory.max kills, memory.high throttles hard: the lower one is what a model server can live with."""
    both = (parse_limit(host.text(f"{folder}/memory.max")), parse_limit(host.text(f"{folder}/memory.high")))
    limits = [limit for limit in both if limit is not None]
    if not limits:
        return None
    used = parse_limit(host.text(f"{folder}/memory.current"))
    reclaimable = _droppable(parse_stat(host.text(f"{folder}/memory.stat")), "")
    return _limit(folder, min(limits), used, reclaimable)


def _limit_v1(host: Host, folder: str) -> Limit | None:
    limit = parse_limit(host.text(f"{folder}/memory.limit_in_bytes"))
    if limit is None:
        return None
    used = parse_limit(host.text(f"{folder}/memory.usage_in_bytes"))
    reclaimable = _droppable(parse_stat(host.text(f"{folder}/memory.stat")), "total_")
    return _limit(folder, limit, used, reclaimable)


def _hidden_limit_v1(host: Host, hierarchy: Hierarchy, found: list[Limit]) -> Limit | None:
    """A tighter limit above what is mounted here: v1 tells it in memory.stat, though not how much of it is used."""
    own = next(groups(host, hierarchy), None)
    if own is None:
        return None
    stat = parse_stat(host.text(f"{own}/memory.stat"))
    limit = stat.get("hierarchical_memory_limit", _NO_LIMIT_FROM)
    if limit >= _NO_LIMIT_FROM or any(one.limit_bytes <= limit for one in found):
        return None
    used = parse_limit(host.text(f"{own}/memory.usage_in_bytes"))
    return _limit("a group above this container", limit, used, _droppable(stat, "total_"))


def _limit(group: str, limit: int, used: int | None, reclaimable: int) -> Limit:
    left = None if used is None else min(limit, max(0, limit - used + min(reclaimable, used)))
    return Limit(group=group, limit_bytes=limit, available_bytes=left)


def quota_cores(host: Host, hierarchy: Hierarchy) -> float | None:
    """The fewest cores' worth of time that any group above allows; None where none limits it."""
    quotas = [q for folder in groups(host, hierarchy) if (q := _quota(host, folder, hierarchy.version)) is not None]
    return min(quotas, default=None)


def _quota(host: Host, folder: str, version: int) -> float | None:
    if version == 2:  # noqa: PLR2004 -- the version's own number
        match = re.fullmatch(r"(\d+) (\d+)", host.text(f"{folder}/cpu.max") or "")
        quota, period = (int(match[1]), int(match[2])) if match else (None, None)
    else:
        quota, period = host.number(f"{folder}/cpu.cfs_quota_us"), host.number(f"{folder}/cpu.cfs_period_us")
    if quota is None or not period or quota <= 0:
        return None
    return round(quota / period, 3)


def read_cgroups(host: Host) -> Facts:
    """The tightest memory limit, what all of them together still allow, and the processor quota."""
    cgroup_text, mount_text = host.text("proc/self/cgroup"), host.text("proc/self/mountinfo")
    if cgroup_text is None or mount_text is None:
        reason = "/proc/self/cgroup or /proc/self/mountinfo cannot be read"
        return Facts(unknown=(Unknown(what="ram.cgroup_limit_bytes", reason=reason),))
    mounts = parse_mountinfo(mount_text)
    memory = find_hierarchy(cgroup_text, mounts, "memory")
    cpu = find_hierarchy(cgroup_text, mounts, "cpu")
    limits = memory_limits(host, memory) if memory else ()
    # Where the use is unreadable, the limit itself is the best bound there is, and it is said to be one.
    left = [one.limit_bytes if one.available_bytes is None else one.available_bytes for one in limits]
    unknown = [
        Unknown(what="ram.cgroup_available_bytes", reason=f"the use of {limit.group} cannot be read, only its limit")
        for limit in limits
        if limit.available_bytes is None
    ]
    if memory is None and cgroup_text.strip():
        unknown.append(Unknown(what="ram.cgroup_limit_bytes", reason="no control group file system is mounted here"))
    tightest = min((limit.limit_bytes for limit in limits), default=None)
    return Facts(
        ram=Ram(cgroup_limit_bytes=tightest, cgroup_available_bytes=min(left, default=None)),
        cpu=Cpu(quota_cores=quota_cores(host, cpu) if cpu else None),
        unknown=tuple(unknown),
    )
