"""Whether the kernel killed something for memory, by its counts and its log: then a SIGKILL is no riddle."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kimigguf.hardware.cgroups import find_hierarchy, groups, memory_limits
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.units import memory

_KMSG: Final = Path("/dev/kmsg")
_RECORD_BYTES: Final = 8192
SOMEBODY: Final = "somebody else sent the signal"
_CLOCKS_APART_SECONDS: Final = 60.0
"""The kernel's log has a clock of its own, which strays a little from the monotonic one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who sent a SIGKILL, in words; ``by_kernel``: the kernel did, for want of memory."""

    by_kernel: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """How many processes the kernel has killed for memory; None: it does not say.

    ``in_group`` in this process's control group (v1 memory.oom_control, v2 memory.events), ``on_machine`` in all
    (/proc/vmstat). ``limit_bytes`` is the tightest limit of the group.
    """

    in_group: int | None
    on_machine: int | None
    limit_bytes: int | None = None
    at: float = field(default_factory=time.monotonic, compare=False)


def parse_kills(text: str | None) -> int | None:
    """The ``oom_kill`` count in memory.events, memory.oom_control or vmstat; None if there is none."""
    match = re.search(r"^oom_kill (\d{1,18})$", text or "", re.MULTILINE)
    return int(match[1]) if match else None


def read_kills(host: Host | None = None) -> Kills:
    """The counts as they stand now."""
    host = host or Host()
    on_machine = parse_kills(host.text("proc/vmstat"))
    cgroup, mounts = host.text("proc/self/cgroup"), host.text("proc/self/mountinfo")
    hierarchy = find_hierarchy(cgroup, parse_mountinfo(mounts), "memory") if cgroup and mounts else None
    if hierarchy is None:
        return Kills(in_group=None, on_machine=on_machine)
    name = "memory.oom_control" if hierarchy.version == 1 else "memory.events"
    counts = [parse_kills(host.text(f"{folder}/{name}")) for folder in groups(host, hierarchy)]
    known = [count for count in counts if count is not None]
    limits = [limit.limit_bytes for limit in memory_limits(host, hierarchy)]
    return Kills(in_group=max(known, default=None), on_machine=on_machine, limit_bytes=min(limits, default=None))


def explain(before: Kills, after: Kills, kernel_line: str | None = None) -> Verdict | None:
    """What the counts and the kernel's own line say about a SIGKILL between them; None if they say nothing."""
    told = f" ({kernel_line})" if kernel_line else ""
    if before.in_group is not None and after.in_group is not None and after.in_group > before.in_group:
        limit = f" of {memory(after.limit_bytes)}" if after.limit_bytes is not None else ""
        return Verdict(
            by_kernel=True, words=f"the kernel killed it: its control group's limit{limit} was reached{told}"
        )
    if kernel_line:
        return Verdict(by_kernel=True, words=f"the kernel killed it for memory{told}")
    if before.on_machine is not None and after.on_machine is not None:
        if after.on_machine > before.on_machine:
            return Verdict(by_kernel=True, words="the kernel killed it: the machine's memory was used up")
        words = f"the kernel counts no kill for memory meanwhile, so {SOMEBODY}"
        return Verdict(by_kernel=False, words=words)
    return None


class KillWatch:
    """Tells who killed an engine from the counts of a moment before: an older kill of something else is not its own."""

    def __init__(self) -> None:
        self._before = self._latest = read_kills()

    def look(self) -> None:
        """Read the counts again, while the engine lives. The reading before is kept: this one may be just too late."""
        self._before, self._latest = self._latest, read_kills()

    def verdict(self, pid: int) -> Verdict | None:
        """Who sent the SIGKILL that ended ``pid``; None where nothing tells."""
        return explain(self._before, read_kills(), read_kill(pid, since=self._before.at))


def find_kill(records: Iterable[str], pid: int, *, since: float = 0.0) -> str | None:
    """The kernel's line about its kill of process ``pid``, not before second ``since`` of its clock; None if none."""
    found = None
    for record in records:
        match = re.match(r"\d+,\d+,(\d{1,18}),[^;]*;(.*out of memory: Killed process (\d+) .*)", record, re.IGNORECASE)
        if match and int(match[3]) == pid and int(match[1]) / 1e6 >= since:
            found = match[2][:200].rstrip()
    return found


def read_kill(pid: int, *, since: float) -> str | None:
    """What the kernel's log says of its kill of ``pid`` since that monotonic second; None where it cannot be read."""
    return find_kill(_records(), pid, since=since - _CLOCKS_APART_SECONDS)


def _records() -> Iterator[str]:
    with suppress(OSError, AttributeError):  # not readable, or no such device
        kernel = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                with suppress(BrokenPipeError):  # records that were overwritten meanwhile
                    record = os.read(kernel, _RECORD_BYTES)
                    if not record:  # containers have /dev/null in its place
                        return
                    yield record.decode(errors="replace")
        finally:
            os.close(kernel)
