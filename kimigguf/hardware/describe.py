"""A machine in words, one short line per part; pure, for the first screen, ``machine show`` and reports."""

import re
from dataclasses import replace
from itertools import groupby
from typing import Final

from kimigguf.hardware.snapshot import Accelerator, Cpu, Disk, Machine, MemoryKind, Ram
from kimigguf.units import memory, rate, storage

_ISA_SHOWN: Final = (
    "amx_int8", "amx_tile", "avx512_vnni", "avx512_bf16", "avx512f", "avx_vnni", "avx2", "sve2", "sve", "i8mm", "neon",
)  # fmt: skip

_PERSONAL: Final = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"(/(?:home|Users|run/media|media|run/user)/)[^/\s:,]+", r"\1<user>"),
        (r"(\w+://)[^/\s]+", r"\1<host>"),
        (r"\b(?:GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]{6,}", "<uuid>"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "<address>"),
        (r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}\b", "<address>"),
        (r"(?<![\w/.])[\w.-]+:(?=/[^/])", "<host>:"),
    )
)


def cpu_line(cpu: Cpu) -> str:
    """Model, sockets, cores, quota and the extensions that matter: ``AMD EPYC 9355 · 2 sockets, 64 cores · avx2``."""
    counts = [
        _count(cpu.sockets, "socket"),
        _count(cpu.cores, "core") + (f" ({cpu.performance_cores} fast)" if cpu.performance_cores else ""),
        _count(cpu.threads, "thread"),
        f"{cpu.numa_nodes} NUMA nodes" if (cpu.numa_nodes or 0) > 1 else "",
    ]
    quota = f"a cgroup allows {cpu.quota_cores:g} cores" if cpu.quota_cores is not None else ""
    isa = "extensions unknown" if cpu.isa is None else " ".join(name for name in _ISA_SHOWN if name in cpu.isa)
    return _joined(cpu.model or "unknown model", ", ".join(filter(None, counts)), quota, isa)


def ram_line(ram: Ram) -> str:
    """Total, available, what control groups allow and swap: ``768.0 GiB · 700.1 GiB available · swap 8.0 GiB``."""
    limit = ""
    if ram.cgroup_limit_bytes is not None:
        limit = f"cgroup {memory(ram.cgroup_limit_bytes)}, {memory(ram.cgroup_available_bytes)} left"
    speed = f"reads {rate(ram.read_bytes_per_second)}" if ram.read_bytes_per_second is not None else ""
    if ram.rated_bytes_per_second is not None:
        speed += f"{' of ' if speed else ''}{rate(ram.rated_bytes_per_second)} rated"
    return _joined(
        memory(ram.total_bytes) if ram.total_bytes is not None else "unknown size",
        f"{memory(ram.available_bytes)} available" if ram.available_bytes is not None else "",
        limit,
        f"swap {memory(ram.swap_total_bytes)} (never counted)" if ram.swap_total_bytes else "",
        f"huge pages {memory(ram.huge_pages_bytes)}" if ram.huge_pages_bytes else "",
        ram.modules or "",
        speed,
    )


def nodes_line(ram: Ram) -> str | None:
    """The memory of each NUMA node: ``node 0 376.5 GiB, node 1 377.9 GiB``; None where there is one or none is told."""
    nodes = ram.numa or ()
    if len(nodes) < 2:  # noqa: PLR2004 -- one node is the whole memory
        return None
    return ", ".join(
        f"node {node.index} {memory(node.total_bytes)}"
        + (" without cores" if node.cpus == 0 else "")
        + (f", reads {rate(node.read_bytes_per_second)}" if node.read_bytes_per_second is not None else "")
        for node in nodes
    )


def accelerator_lines(machine: Machine) -> list[str]:
    """One line per kind of accelerator, equal ones counted together whatever is free on each."""
    if machine.accelerators is None:
        return ["unknown"]
    alike = groupby(machine.accelerators, key=lambda one: (one.name, one.memory_kind, one.total_bytes, one.instance))
    return [_accelerators(list(group)) for _, group in alike] or ["none"]


def _accelerators(group: list[Accelerator]) -> str:
    first = group[0]
    name = first.name or "unnamed accelerator"
    title = f"{len(group)} x {name}" if len(group) > 1 else name
    each = " each" if len(group) > 1 else ""
    if first.memory_kind is MemoryKind.UNIFIED:
        most = f", up to {memory(first.working_set_bytes)}" if first.working_set_bytes is not None else ""
        return _joined(title, f"works in the host's memory{most}")
    size = f"{memory(first.total_bytes)}{each}" if first.total_bytes is not None else "memory unknown"
    free = [one.free_bytes for one in group if one.free_bytes is not None]
    least = f"{memory(min(free))} free" + (" on the fullest" if len(set(free)) > 1 else "") if free else ""
    kind = first.memory_kind.value if first.memory_kind else ""
    return _joined(title, size, least, kind, f"compute {first.compute_capability}" if first.compute_capability else "")


def disk_line(disk: Disk) -> str:
    """Mount, kind, free space and drive: ``/ · nvme · 3.00 TB free of 4.00 TB · ext4 on Samsung 990 PRO``."""
    kind = disk.kind.value if disk.kind else "kind unknown"
    space = "free space unknown"
    if disk.free_bytes is not None:
        space = f"{storage(disk.free_bytes)} free of {storage(disk.total_bytes)}"
    drives = f"{len(disk.members)} drives" if len(disk.members) > 1 else ""
    below = " on ".join(filter(None, [disk.file_system, _joined(disk.model or "", drives)]))
    speed = f"reads {rate(disk.read_bytes_per_second)}" if disk.read_bytes_per_second is not None else ""
    if disk.random_read_16_bytes_per_second is not None:
        speed += f", {rate(disk.random_read_16_bytes_per_second)} at random"
    return _joined(disk.mount, kind, space, below, "read-only" if disk.read_only else "", speed)


def driver_line(machine: Machine) -> str | None:
    """Driver and runtime versions: ``cuda driver 580.95.05, runtime 13.0``; None where there is none."""
    parts = [
        f"{d.backend.value} driver {d.version}" + (f", runtime {d.runtime_version}" if d.runtime_version else "")
        for d in machine.drivers
        if d.version
    ]
    return " · ".join(parts) or None


def rows(machine: Machine) -> list[tuple[str, str]]:
    """The whole machine as (label, text); a label is empty where the row continues the one above."""
    found = [("System", machine.system)] if machine.system else []
    found += [("CPU", cpu_line(machine.cpu)), ("Memory", ram_line(machine.ram))]
    found += [("Nodes", nodes)] if (nodes := nodes_line(machine.ram)) else []
    found += _labelled("GPU", accelerator_lines(machine))
    found += [("Driver", driver)] if (driver := driver_line(machine)) else []
    disks = ["unknown"] if machine.disks is None else [disk_line(disk) for disk in machine.disks]
    return found + _labelled("Disk", disks or ["none that could hold a model"])


def _labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]


def _count(number: int | None, word: str) -> str:
    return "" if number is None else f"{number} {word}" + ("s" if number != 1 else "")


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def without_personal_details(machine: Machine) -> Machine:
    """The machine without serial numbers, host names, user names and addresses, for a public report."""
    cards = machine.accelerators
    return replace(
        machine,
        accelerators=None if cards is None else tuple(replace(card, uuid=None) for card in cards),
        disks=None if machine.disks is None else tuple(map(_anonymous_disk, machine.disks)),
        notices=tuple(map(anonymous, machine.notices)),
        unknown=tuple(replace(one, reason=anonymous(one.reason)) for one in machine.unknown),
    )


def _anonymous_disk(disk: Disk) -> Disk:
    local = disk.device is not None and disk.device.startswith("/dev/")
    return replace(disk, mount=anonymous(disk.mount), device=disk.device if local else None)


def anonymous(text: str) -> str:
    """Text without the names of users in paths, the hosts of URLs and network mounts, UUIDs and IP addresses."""
    for pattern, shown in _PERSONAL:
        text = pattern.sub(shown, text)
    return text
