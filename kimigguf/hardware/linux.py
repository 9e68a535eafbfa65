"""Processor and memory of a Linux machine, from /proc and /sys."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from kimigguf.hardware.facts import Facts, unknowns
from kimigguf.hardware.host import Host
from kimigguf.hardware.memory_modules import describe, rated_bytes_per_second, read_modules
from kimigguf.hardware.snapshot import Cpu, NumaNode, Ram
from kimigguf.units import KIB

_ISA_X86: Final = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip
_ISA_ARM: Final[Mapping[str, str]] = {
    "asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve", "sve2": "sve2", "sme": "sme",
}  # fmt: skip
_MOST_CPUS: Final = 1 << 16
_ARM_CORES: Final[Mapping[tuple[int, int], str]] = {
    (0x41, 0xD0C): "Neoverse N1", (0x41, 0xD40): "Neoverse V1", (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4F): "Neoverse V2", (0x41, 0xD84): "Neoverse V3", (0x41, 0xD8E): "Neoverse N3",
    (0x41, 0xD85): "Cortex-X925", (0x41, 0xD87): "Cortex-A725", (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1A",
}  # fmt: skip
"""(implementer, part) of Arm's MIDR register; /proc/cpuinfo on Arm has no model name."""


def parse_cpuinfo(text: str) -> Cpu:
    """Model, sockets, physical cores, threads and ISA extensions from /proc/cpuinfo (x86, Arm or other).

    A field that a kernel does not print stays None.
    """
    blocks = [_fields(block) for block in re.split(r"\n[ \t]*\n", text) if "processor" in block]
    if not blocks:
        return Cpu()
    first = blocks[0]
    packages = {block["physical id"] for block in blocks if "physical id" in block}
    cores = {(b["physical id"], b["core id"]) for b in blocks if "physical id" in b and "core id" in b}
    model = first.get("model name") or first.get("cpu model") or _arm_model(blocks)
    return Cpu(
        model=re.sub(r"\s+", " ", model).strip() if model else None,
        sockets=len(packages) or None,
        cores=len(cores) or None,
        threads=len(blocks),
        isa=_isa(first),
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _isa(block: Mapping[str, str]) -> tuple[str, ...] | None:
    if "flags" in block:
        flags = set(block["flags"].split())
        return tuple(name for name in _ISA_X86 if name in flags)
    if "Features" in block:
        flags = set(block["Features"].split())
        return tuple(name for flag, name in _ISA_ARM.items() if flag in flags)
    return None


def _arm_model(blocks: Iterable[Mapping[str, str]]) -> str | None:
    names: list[str] = []
    for block in blocks:
        try:
            key = (int(block["CPU implementer"], 0), int(block["CPU part"], 0))
        except (KeyError, ValueError):
            continue
        name = _ARM_CORES.get(key, f"Arm part {key[0]:#x}:{key[1]:#x}")
        if name not in names:
            names.append(name)
    return " + ".join(names) or None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a kernel list such as ``0-3,8,10-11``.

    Raises:
        ValueError: It is no such list.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if int(last or first) > _MOST_CPUS:
            raise ValueError(f"{part} is no range of processors")
        numbers += range(int(first), int(last) + 1) if dash else [int(first)]
    return tuple(numbers)


def parse_meminfo(text: str) -> Ram:
    """Total, available, swap and huge pages from /proc/meminfo; a line that is missing or absurd is None."""
    sizes = {
        match[1]: int(match[2]) * (KIB if match[3] else 1)
        for match in re.finditer(r"^(\w+(?:\(\w+\))?):\s+(\d{1,18})( kB)?\s*$", text, re.MULTILINE)
    }
    total = sizes.get("MemTotal") or None
    available = sizes.get("MemAvailable")
    if total is not None and available is not None and available > total:
        available = None
    pages, page_size = sizes.get("HugePages_Total"), sizes.get("Hugepagesize")
    return Ram(
        total_bytes=total,
        available_bytes=available,
        swap_total_bytes=sizes.get("SwapTotal"),
        huge_pages_bytes=pages * page_size if pages is not None and page_size is not None else None,
    )


def parse_node_meminfo(index: int, text: str, cpus: int | None) -> NumaNode:
    """One NUMA node from /sys/devices/system/node/nodeN/meminfo."""
    sizes = {m[1]: int(m[2]) * KIB for m in re.finditer(r"^Node \d+ (\w+):\s+(\d{1,18}) kB", text, re.MULTILINE)}
    return NumaNode(index=index, total_bytes=sizes.get("MemTotal"), free_bytes=sizes.get("MemFree"), cpus=cpus)


def read_cpu(host: Host) -> Facts:
    """The processor: /proc/cpuinfo, completed from /sys where the kernel prints less there."""
    text = host.text("proc/cpuinfo")
    if text is None:
        return Facts(unknown=unknowns([("cpu", None, "/proc/cpuinfo cannot be read")]))
    cpu = parse_cpuinfo(text)
    sockets, cores = _topology(host)
    fast = _performance_cores(host)
    cpu = replace(
        cpu,
        architecture=host.text("proc/sys/kernel/arch"),
        sockets=cpu.sockets or sockets,
        cores=cpu.cores or cores,
        performance_cores=fast,
        governor=host.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    )
    return Facts(
        cpu=cpu,
        system=_system(host),
        unknown=unknowns(
            [
                ("cpu.model", cpu.model, "/proc/cpuinfo names none"),
                ("cpu.cores", cpu.cores, "neither /proc/cpuinfo nor /sys tells physical cores apart"),
                ("cpu.isa", cpu.isa, "/proc/cpuinfo lists no flags"),
                ("cpu.governor", cpu.governor, "no frequency control is visible (virtual machine or container)"),
            ]
        ),
    )


def _system(host: Host) -> str | None:
    kernel = host.text("proc/sys/kernel/osrelease")
    name = re.search(r'^PRETTY_NAME="?([^"\n]+)', host.text("etc/os-release") or "", re.MULTILINE)
    words = [name[1] if name else "Linux", f"kernel {kernel}" if kernel else ""]
    return ", ".join(filter(None, words))


def _topology(host: Host) -> tuple[int | None, int | None]:
    """Sockets and physical cores as /sys tells them; package ids below 0 mean that the firmware named none."""
    packages, cores = set(), set()
    for name in host.names("sys/devices/system/cpu"):
        if not re.fullmatch(r"cpu\d+", name):
            continue
        folder = f"sys/devices/system/cpu/{name}/topology"
        package, core = host.number(f"{folder}/physical_package_id"), host.number(f"{folder}/core_id")
        if package is not None and core is not None:
            packages.add(max(package, 0))
            cores.add((package, host.number(f"{folder}/cluster_id"), core))
    return len(packages) or None, len(cores) or None


def _performance_cores(host: Host) -> int | None:
    """How many physical cores are of the fast kind, None where all are alike.

    Intel names them in cpu_core and cpu_atom; elsewhere the kernel's relative capacity (1024 is the fastest) tells.
    """
    fast = host.text("sys/devices/cpu_core/cpus")
    if fast is not None and host.exists("sys/devices/cpu_atom/cpus"):
        siblings = {host.text(f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in _cpus(fast)}
        return len(siblings)
    capacities = [
        capacity
        for name in host.names("sys/devices/system/cpu")
        if re.fullmatch(r"cpu\d+", name)
        and (capacity := host.number(f"sys/devices/system/cpu/{name}/cpu_capacity")) is not None
    ]
    return capacities.count(max(capacities)) if len(set(capacities)) > 1 else None


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return ()


def read_ram(host: Host) -> Facts:
    """Main memory, its NUMA nodes and its modules."""
    text = host.text("proc/meminfo")
    if text is None:
        return Facts(unknown=unknowns([("ram", None, "/proc/meminfo cannot be read")]))
    modules = read_modules(host)
    ram = replace(
        parse_meminfo(text),
        numa=read_numa(host),
        modules=describe(modules),
        rated_bytes_per_second=rated_bytes_per_second(modules),
    )
    return Facts(
        ram=ram,
        cpu=Cpu(numa_nodes=sum(node.cpus != 0 for node in ram.numa) if ram.numa else None),
        unknown=unknowns(
            [
                ("ram.total_bytes", ram.total_bytes, "/proc/meminfo has no plausible MemTotal"),
                ("ram.available_bytes", ram.available_bytes, "/proc/meminfo has no plausible MemAvailable"),
                ("ram.modules", ram.modules, "udev tells of none, the firmware only to root: sudo dmidecode -t memory"),
            ]
        ),
    )


def read_numa(host: Host) -> tuple[NumaNode, ...] | None:
    """The NUMA nodes that have memory, None where /sys shows none."""
    nodes = []
    for name in host.names("sys/devices/system/node"):
        match = re.fullmatch(r"node(\d+)", name)
        meminfo = host.text(f"sys/devices/system/node/{name}/meminfo") if match else None
        if match is None or meminfo is None:
            continue
        cpu_list = host.text(f"sys/devices/system/node/{name}/cpulist")
        node = parse_node_meminfo(int(match[1]), meminfo, None if cpu_list is None else len(_cpus(cpu_list)))
        if node.total_bytes:
            nodes.append(node)
    return tuple(sorted(nodes, key=lambda node: node.index)) or None
