"""What a process and the accelerators use, read again and again while something runs; their peaks, as far as known."""

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

import psutil

from kimigguf.hardware.cgroups import find_hierarchy, groups, parse_limit
from kimigguf.hardware.detect import combine, probes_for
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.nvidia import load_nvml
from kimigguf.hardware.probes import ask_all
from kimigguf.hardware.snapshot import Accelerator, MemoryKind

_EVERY_SECONDS: Final = 0.5
_THOROUGH_EVERY: Final = 8
"""Looking for new children goes through every process of the machine, and asking the drivers costs as much: what is
measured meanwhile must not be slowed down by it. Neither children nor weights on a GPU come and go that fast."""
_DEVICES_LIMIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """Memory of a process and all below it, in bytes. ``file_bytes`` are mapped files, shared memory among them.

    None where the system does not tell them apart. ``read_bytes`` came from disk since the processes began.
    """

    resident_bytes: int
    anonymous_bytes: int | None = None
    file_bytes: int | None = None
    read_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """The most that was in use on one accelerator, by whomever."""

    name: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that was seen; None is unknown. ``devices`` is empty where there is none, or no memory of their own."""

    tree: TreeUse | None = None
    read_bytes: int | None = None
    cgroup: str | None = None
    cgroup_bytes: int | None = None
    devices: tuple[DevicePeak, ...] | None = None


def read_tree(pid: int) -> TreeUse | None:
    """What the tree below ``pid`` has in memory now; None if it is gone or may not be asked."""
    return read_processes(tree_of(pid))


def tree_of(pid: int) -> tuple[psutil.Process, ...]:
    """The process and all below it; empty if it is gone or may not be asked."""
    try:
        root = psutil.Process(pid)
        return (root, *root.children(recursive=True))
    except psutil.Error:
        return ()


def read_processes(processes: Iterable[psutil.Process]) -> TreeUse | None:
    """What the processes have in memory now; None if none is left that may be asked."""
    uses = [use for process in processes if (use := _read_one(process)) is not None]
    if not uses:
        return None
    return TreeUse(
        resident_bytes=sum(use.resident_bytes for use in uses),
        anonymous_bytes=_sum(use.anonymous_bytes for use in uses),
        file_bytes=_sum(use.file_bytes for use in uses),
        read_bytes=_sum(use.read_bytes for use in uses),
    )


def _read_one(process: psutil.Process) -> TreeUse | None:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return None
    shared = getattr(memory, "shared", None)  # Linux: RssFile and RssShmem together
    read = None
    with suppress(psutil.Error, AttributeError):
        read = process.io_counters().read_bytes
    return TreeUse(
        resident_bytes=memory.rss,
        anonymous_bytes=None if shared is None else max(0, memory.rss - shared),
        file_bytes=shared,
        read_bytes=read,
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def cgroup_peak(host: Host, pid: int) -> tuple[str, int] | None:
    """The control group of ``pid`` and the most memory it ever had, page cache included; None where nothing tells."""
    cgroup_text, mount_text = host.text(f"proc/{pid}/cgroup"), host.text("proc/self/mountinfo")
    if cgroup_text is None or mount_text is None:
        return None
    hierarchy = find_hierarchy(cgroup_text, parse_mountinfo(mount_text), "memory")
    folder = next(groups(host, hierarchy), None) if hierarchy else None
    if hierarchy is None or folder is None:
        return None
    file = "memory.max_usage_in_bytes" if hierarchy.version == 1 else "memory.peak"
    peak = parse_limit(host.text(f"{folder}/{file}"))
    return None if peak is None else (folder, peak)


def accelerators_now(environ: Mapping[str, str]) -> tuple[Accelerator, ...] | None:
    """The accelerators with what is free on them now; None where no driver answered."""
    probes = probes_for(Host(environ=environ), load_nvml)
    asked = {name: probe for name, probe in probes.items() if name.startswith("accelerators")}
    return combine(ask_all(asked, limit_seconds=_DEVICES_LIMIT_SECONDS)).accelerators


class PeakWatch:
    """Watches a process tree and the accelerators from a thread of its own while the ``with`` block runs."""

    def __init__(self, pid: int | None, environ: Mapping[str, str] = os.environ) -> None:
        self._pid = pid
        self._environ = environ
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peaks", daemon=True)
        self._processes: tuple[psutil.Process, ...] = ()
        self._tree: TreeUse | None = None
        self._first_read: int | None = None
        self._last_read: int | None = None
        self._devices: dict[int, DevicePeak] | None = None
        self._has_devices = True

    def __enter__(self) -> Self:
        if self._pid is not None:
            self._look(thorough=True)
            self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._look(thorough=True)

    @property
    def peaks(self) -> Peaks:
        """What was seen so far."""
        if self._pid is None:
            return Peaks()
        known = self._first_read is not None and self._last_read is not None
        cgroup = cgroup_peak(Host(environ=self._environ), self._pid)
        return Peaks(
            tree=self._tree,
            read_bytes=max(0, (self._last_read or 0) - (self._first_read or 0)) if known else None,
            cgroup=cgroup[0] if cgroup else None,
            cgroup_bytes=cgroup[1] if cgroup else None,
            devices=None if self._devices is None else tuple(self._devices.values()),
        )

    def _run(self) -> None:
        turn = 0
        while not self._end.wait(_EVERY_SECONDS):
            turn += 1
            self._look(thorough=turn % _THOROUGH_EVERY == 0)

    def _look(self, *, thorough: bool) -> None:
        if thorough and self._pid is not None:
            self._processes = tree_of(self._pid)
        if (now := read_processes(self._processes)) is not None:
            self._first_read = now.read_bytes if self._first_read is None else self._first_read
            self._last_read = now.read_bytes
            self._tree = now if self._tree is None else higher(self._tree, now)
        if thorough and self._has_devices:
            found = accelerators_now(self._environ)
            self._has_devices = found is None or any(one.memory_kind is MemoryKind.DISCRETE for one in found)
            self._devices = None if found is None and self._devices is None else device_peaks(self._devices, found)


def higher(one: TreeUse, other: TreeUse) -> TreeUse:
    """The higher of each figure: anonymous memory and mapped files need not peak together."""

    def most(a: int | None, b: int | None) -> int | None:
        return a if b is None else b if a is None else max(a, b)

    return TreeUse(
        resident_bytes=max(one.resident_bytes, other.resident_bytes),
        anonymous_bytes=most(one.anonymous_bytes, other.anonymous_bytes),
        file_bytes=most(one.file_bytes, other.file_bytes),
        read_bytes=most(one.read_bytes, other.read_bytes),
    )


def device_peaks(
    before: Mapping[int, DevicePeak] | None, found: tuple[Accelerator, ...] | None
) -> dict[int, DevicePeak]:
    """The peaks so far with a new reading; accelerators that tell no memory of their own are left out."""
    peaks = dict(before or {})
    for index, card in enumerate(found or ()):
        if card.memory_kind is not MemoryKind.DISCRETE or card.total_bytes is None or card.free_bytes is None:
            continue
        now = DevicePeak(
            name=card.name or f"gpu{index}", used_bytes=card.total_bytes - card.free_bytes, total_bytes=card.total_bytes
        )
        old = peaks.get(index)
        peaks[index] = now if old is None else replace(now, used_bytes=max(now.used_bytes, old.used_bytes))
    return peaks
