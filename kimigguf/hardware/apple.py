"""A Mac, from sysctl, vm_stat, system_profiler, mount and diskutil."""

import json
import plistlib
import re
from collections.abc import Mapping
from typing import Any, Final

from kimigguf.hardware.facts import Facts, unknowns
from kimigguf.hardware.host import CommandError, Host
from kimigguf.hardware.probes import ask_all
from kimigguf.hardware.snapshot import Accelerator, Backend, Cpu, Disk, DiskKind, MemoryKind, Ram, Unknown
from kimigguf.units import GIB, MIB

_ISA: Final[Mapping[str, str]] = {
    "hw.optional.neon": "neon", "hw.optional.AdvSIMD": "neon", "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_I8MM": "i8mm", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.avx2_0": "avx2",
}  # fmt: skip
_SYSCTL: Final = (
    "hw.memsize", "hw.physicalcpu", "hw.logicalcpu", "hw.packages", "hw.perflevel0.physicalcpu", "hw.pagesize",
    "machdep.cpu.brand_string", "kern.osproductversion", "vm.swapusage", "iogpu.wired_limit_mb", *_ISA,
)  # fmt: skip
_DISPLAYS: Final = ("system_profiler", "-json", "SPDisplaysDataType")
_DISPLAYS_LIMIT_SECONDS: Final = 0.6
_WORKING_SET_STEP: Final = 36 * GIB


def parse_sysctl(text: str) -> dict[str, str]:
    """``name: value`` lines; unknown names print nothing on stdout."""
    return {key.strip(): value.strip() for key, colon, value in (x.partition(": ") for x in text.splitlines()) if colon}


def parse_vm_stat(text: str) -> int | None:
    """Bytes that new work can have: free, inactive, speculative and purgeable pages of vm_stat."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {m[1]: int(m[2]) for m in re.finditer(r"^Pages (\w+):\s+(\d+)\.", text, re.MULTILINE)}
    if size is None or "free" not in pages or "inactive" not in pages:
        return None
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))


def working_set_limit(total_bytes: int, wired_limit_mib: int | None) -> int:
    """How much the GPU may hold: iogpu.wired_limit_mb where set, else what Metal recommends by default.

    Metal's recommendedMaxWorkingSetSize is about two thirds of the memory up to 36 GiB and three quarters above (as
    llama.cpp prints it on such machines); macOS documents no formula.
    """
    if wired_limit_mib:
        return min(total_bytes, wired_limit_mib * MIB)
    return total_bytes * 2 // 3 if total_bytes <= _WORKING_SET_STEP else total_bytes * 3 // 4


def parse_displays(text: str) -> tuple[str | None, int | None]:
    """The first GPU's model and its cores from ``system_profiler -json SPDisplaysDataType``."""
    try:
        first: dict[str, Any] = json.loads(text)["SPDisplaysDataType"][0]
        cores = str(first.get("sppci_cores", ""))
        return first.get("sppci_model"), int(cores) if cores.isdigit() else None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None, None


def parse_machine(values: Mapping[str, str], vm_stat: str | None, displays: str | None) -> Facts:
    """Processor, memory and GPU of a Mac; ``vm_stat`` and ``displays`` None where those commands failed."""
    total = _number(values, "hw.memsize")
    chip = values.get("machdep.cpu.brand_string")
    swap = re.search(r"total = ([\d.]+)M", values.get("vm.swapusage", ""))
    available = parse_vm_stat(vm_stat) if vm_stat is not None else None
    if total is not None and available is not None and available > total:
        available = None
    cores, fast = _number(values, "hw.physicalcpu"), _number(values, "hw.perflevel0.physicalcpu")
    version = values.get("kern.osproductversion")
    gpu, unknown = _gpu(values, chip, total, available, displays)
    return Facts(
        system=f"macOS {version}" if version else "macOS",
        cpu=Cpu(
            model=chip,
            sockets=_number(values, "hw.packages"),
            cores=cores,
            performance_cores=fast if fast != cores else None,
            threads=_number(values, "hw.logicalcpu"),
            isa=tuple(dict.fromkeys(name for key, name in _ISA.items() if values.get(key) == "1")),
            numa_nodes=1,
        ),
        ram=Ram(
            total_bytes=total,
            available_bytes=available,
            swap_total_bytes=round(float(swap[1]) * MIB) if swap else None,
        ),
        accelerators=gpu,
        unknown=(
            *unknowns(
                [
                    ("ram.total_bytes", total, "sysctl tells no hw.memsize"),
                    ("ram.available_bytes", available, "vm_stat gave no plausible page counts"),
                ]
            ),
            *unknown,
        ),
    )


def _gpu(
    values: Mapping[str, str], chip: str | None, total: int | None, available: int | None, displays: str | None
) -> tuple[tuple[Accelerator, ...] | None, tuple[Unknown, ...]]:
    if chip is None or not chip.startswith("Apple"):
        reason = "only the GPUs of Apple's own chips are looked at on macOS"
        return None, (Unknown(what="accelerators", reason=reason),)
    model, cores = parse_displays(displays) if displays is not None else (None, None)
    name = model or chip
    gpu = Accelerator(
        name=f"{name}, {cores} GPU cores" if cores else name,
        backend=Backend.METAL,
        memory_kind=MemoryKind.UNIFIED,
        total_bytes=total,
        free_bytes=available,
        working_set_bytes=working_set_limit(total, _number(values, "iogpu.wired_limit_mb")) if total else None,
    )
    return (gpu,), ()


def _number(values: Mapping[str, str], key: str) -> int | None:
    text = values.get(key, "")
    return int(text) if text.isdigit() else None


def read_machine(host: Host) -> Facts:
    """Everything but the disks. system_profiler is slow, so a failure of it costs the GPU's core count only.

    Raises:
        CommandError: sysctl itself failed.
    """
    # An unknown name makes sysctl exit with 1 after printing the others, so it is asked for one subtree at a time.
    values: dict[str, str] = {}
    for name in _SYSCTL:
        values |= parse_sysctl(_try(host, "sysctl", name) or "")
    if not values:
        raise CommandError("sysctl told nothing")
    # system_profiler alone can take a second, and only a count of cores depends on it.
    displays = ask_all({"displays": lambda: host.run(_DISPLAYS)}, limit_seconds=_DISPLAYS_LIMIT_SECONDS)["displays"]
    return parse_machine(values, _try(host, "vm_stat"), displays.value)


def _try(host: Host, *argv: str) -> str | None:
    try:
        return host.run(argv)
    except CommandError:
        return None


def parse_mounts(text: str) -> tuple[tuple[str, str, str, bool], ...]:
    """(device, mount, file system, read-only) of each line of ``mount``: ``/dev/disk3s1 on / (apfs, local, ...)``."""
    found = re.finditer(r"^(\S+) on (.+) \((\w+)(?:, ([^)]*))?\)$", text, re.MULTILINE)
    return tuple((m[1], m[2], m[3], "read-only" in (m[4] or "")) for m in found)


def parse_diskutil(data: bytes) -> DiskKind | None:
    """The kind of drive from ``diskutil info -plist``."""
    try:
        info = plistlib.loads(data)
    except (plistlib.InvalidFileException, ValueError, OverflowError):
        return None
    if not isinstance(info, dict) or "SolidState" not in info:
        return None
    if not info["SolidState"]:
        return DiskKind.HDD
    return DiskKind.NVME if info.get("BusProtocol") in {"Apple Fabric", "PCI-Express"} else DiskKind.SSD


def read_disks(host: Host) -> Facts:
    """The file systems that could hold a model: the data volume and what is mounted under /Volumes.

    The data volume is called "/": macOS shows its folders there (/Users is /System/Volumes/Data/Users), so that is
    what the path of a models' folder begins with.
    """
    disks: list[Disk] = []
    for device, mount, kind, read_only in parse_mounts(_try(host, "mount") or ""):
        if mount != "/System/Volumes/Data" and not mount.startswith("/Volumes/"):
            continue
        size = host.size_of(mount)
        network = kind in {"smbfs", "nfs", "afpfs", "webdav"}
        plist = None if network else _try(host, "diskutil", "info", "-plist", device)
        disks.append(
            Disk(
                mount="/" if mount == "/System/Volumes/Data" else mount,
                file_system=kind,
                kind=DiskKind.NETWORK if network else parse_diskutil((plist or "").encode()),
                total_bytes=size.total_bytes,
                free_bytes=size.free_bytes,
                device=device,
                read_only=read_only,
            )
        )
    return Facts(disks=tuple(disks))
