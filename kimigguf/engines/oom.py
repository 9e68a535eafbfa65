"""Whether the kernel killed something for memory: counted before and after, so that a SIGKILL is no riddle."""

import re
from dataclasses import dataclass

from kimigguf.hardware.cgroups import find_hierarchy, groups, memory_limits
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.units import memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """How many processes the kernel has killed for memory; None: it does not say.

    ``in_group`` in this process's control group (v1 memory.oom_control, v2 memory.events), ``on_machine`` in all
    (/proc/vmstat). ``limit_bytes`` is the tightest limit of the group.
    """

    in_group: int | None
    on_machine: int | None
    limit_bytes: int | None = None


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


def explain(before: Kills, after: Kills) -> str | None:
    """What the counts say about a SIGKILL between them; None if they say nothing."""
    if before.in_group is not None and after.in_group is not None and after.in_group > before.in_group:
        limit = f", whose limit is {memory(after.limit_bytes)}" if after.limit_bytes is not None else ""
        return f"the kernel killed it: the control group ran out of memory{limit}"
    if before.on_machine is not None and after.on_machine is not None:
        if after.on_machine > before.on_machine:
            return "the kernel killed it: the machine ran out of memory"
        return "the kernel counts no kill for memory meanwhile, so somebody else sent the signal"
    return None
