"""How hard a Linux kernel fights for memory and processors: its own clock of stalls (PSI), and the room that is left.

Sources: the kernel's accounting/psi.rst and admin-guide/cgroup-v2.rst (memory.pressure, memory.events, cpu.pressure).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kimigguf.hardware.cgroups import Hierarchy, find_hierarchy, groups, memory_limits, parse_stat
from kimigguf.hardware.host import Host
from kimigguf.hardware.linux import parse_meminfo
from kimigguf.hardware.mounts import parse_mountinfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Per cent of the last 10, 60 and 300 seconds in which work stood still for want of something."""

    of_10_seconds: float
    of_60_seconds: float
    of_300_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one pool of memory has left, page cache that can be dropped included. ``name``: ``the cgroup``, ..."""

    name: str
    total_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPressure:
    """A reading for one process. None and empty: not known, or not there.

    ``stall`` is that of its control group where the kernel keeps one, else the machine's. ``throttled`` is how often
    a group of it went over its memory.high, where the kernel makes it wait.
    """

    stall: Stall | None = None
    rooms: tuple[Room, ...] = ()
    throttled: int | None = None


def parse_stall(text: str | None, *, of_some: bool = False) -> Stall | None:
    """The stalls in a pressure file: of all work at once (``full``) where the kernel counts it, else of some.

    ``full`` is the time in which nothing got on, which is what a model server's user waits for. ``of_some``: the time
    in which some thread stood still, which is enough where the others wait for it.
    """
    found: dict[str, Stall] = {}
    for line in (text or "").splitlines():
        match = re.fullmatch(r"(some|full) avg10=([\d.]{1,9}) avg60=([\d.]{1,9}) avg300=([\d.]{1,9}) total=\d+", line)
        try:
            averages = [float(part) for part in match.groups()[1:]] if match else []
        except ValueError:
            continue
        if match and all(0 <= average <= 100 for average in averages):  # noqa: PLR2004 -- per cent
            ten, sixty, most = averages
            found[match[1]] = Stall(of_10_seconds=ten, of_60_seconds=sixty, of_300_seconds=most)
    return found.get("some") if of_some else found.get("full") or found.get("some")


def read_pressure(pid: int, host: Host | None = None) -> MemoryPressure:
    """How it stands with the memory of process ``pid``; empty where this system does not tell (no Linux)."""
    host = host or Host()
    cgroup, mount_text = host.text(f"proc/{pid}/cgroup"), host.text("proc/self/mountinfo")
    limited = find_hierarchy(cgroup, parse_mountinfo(mount_text or ""), "memory") if cgroup else None
    return MemoryPressure(
        stall=next((stall for text in _stalls(pid, host, "memory") if (stall := parse_stall(text))), None),
        rooms=tuple(_rooms(host, limited)),
        throttled=_throttled(host, limited),
    )


def read_processor_stall(pid: int, host: Host | None = None) -> Stall | None:
    """How much of the time some thread near ``pid`` was ready to run and had no processor; None: the kernel keeps none.

    llama.cpp's threads wait for each other after every operation: one without a processor holds up all of them.
    """
    texts = _stalls(pid, host or Host(), "cpu")
    return next((stall for text in texts if (stall := parse_stall(text, of_some=True))), None)


def _stalls(pid: int, host: Host, what: str) -> Iterable[str | None]:
    """The pressure files for a process: of its control group and those above, then the machine's."""
    cgroup, mount_text = host.text(f"proc/{pid}/cgroup"), host.text("proc/self/mountinfo")
    # With a controller under v1 the kernel's clock of stalls is still in the v2 tree, if one is mounted beside it.
    mounts = tuple(one for one in parse_mountinfo(mount_text or "") if one.file_system == "cgroup2")
    timed = find_hierarchy(cgroup, mounts, "") if cgroup else None
    for folder in groups(host, timed) if timed else ():
        yield host.text(f"{folder}/{what}.pressure")
    yield host.text(f"proc/pressure/{what}")


def _rooms(host: Host, hierarchy: Hierarchy | None) -> Iterable[Room]:
    limits = memory_limits(host, hierarchy) if hierarchy else ()
    known = [(one.available_bytes, one.limit_bytes) for one in limits if one.available_bytes is not None]
    if known:
        left, limit = min(known)
        yield Room(name="the cgroup", total_bytes=limit, left_bytes=left)
    ram = parse_meminfo(host.text("proc/meminfo") or "")
    if ram.total_bytes is not None and ram.available_bytes is not None:
        yield Room(name="the machine", total_bytes=ram.total_bytes, left_bytes=ram.available_bytes)


def _throttled(host: Host, hierarchy: Hierarchy | None) -> int | None:
    if hierarchy is None or hierarchy.version == 1:
        return None
    counts = [parse_stat(host.text(f"{folder}/memory.events")).get("high") for folder in groups(host, hierarchy)]
    return max((count for count in counts if count is not None), default=None)
