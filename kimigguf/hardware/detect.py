"""Asks every detector at once and puts their facts together; nothing here waits longer than the limit."""

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Final, TypeVar

from kimigguf.hardware import amd, apple, cgroups, disks, intel, linux, nvidia
from kimigguf.hardware.facts import Facts
from kimigguf.hardware.host import Host
from kimigguf.hardware.probes import Answer, ask_all
from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Accelerator, Cpu, Machine, MemoryKind, Ram, Unknown

LIMIT_SECONDS: Final = 1.0
PATIENT_LIMIT_SECONDS: Final = 10.0
"""For commands whose answer stands on the GPUs: NVIDIA's driver wakes eight sleeping cards in several seconds."""
_NVIDIA: Final = "accelerators.nvidia"
_NVIDIA_NAMES: Final = "accelerators.nvidia by name"
_COHERENT: Final = re.compile(r"\bGH200|\bGB[23]00")
"""Parts whose own memory Linux also counts in MemTotal, as NUMA nodes without processors."""

T = TypeVar("T", Cpu, Ram)


def detect(
    *,
    environ: Mapping[str, str] = os.environ,
    host: Host | None = None,
    nvml: Callable[[], nvidia.Nvml] = nvidia.load_nvml,
    limit_seconds: float = LIMIT_SECONDS,
) -> Machine:
    """This machine as it is now. Each probe has ``limit_seconds``; what it cannot tell is in ``unknown``.

    Args:
        environ: Read for CUDA_VISIBLE_DEVICES and its like.
        host: Another root and runner (tests).
        nvml: Where NVML comes from (tests).
        limit_seconds: How long all probes together may take. A sleeping NVIDIA driver can need several seconds.
    """
    host = Host(environ=environ) if host is None else host
    return combine(ask_all(probes_for(host, nvml), limit_seconds=limit_seconds))


def probes_for(host: Host, nvml: Callable[[], nvidia.Nvml]) -> dict[str, Callable[[], Facts]]:
    """The probes of this kind of system, by the part of the machine that is lost when one fails."""
    if host.system == "darwin":
        return {"machine": partial(apple.read_machine, host), "disks": partial(apple.read_disks, host)}
    if host.system.startswith("linux"):
        return {
            "cpu": partial(linux.read_cpu, host),
            "ram": partial(linux.read_ram, host),
            "ram.cgroup_limit_bytes": partial(cgroups.read_cgroups, host),
            _NVIDIA: partial(nvidia.read_nvidia, host, nvml),
            _NVIDIA_NAMES: partial(nvidia.without_nvml, host, "no answer"),
            "accelerators.amd": partial(amd.read_amd, host),
            "accelerators.intel": partial(intel.read_intel, host),
            "disks": partial(disks.read_disks, host),
        }
    return {"machine": partial(_portable, host)}


def _portable(host: Host) -> Facts:
    """Processor count and memory where there is no detector of this system's own."""
    import psutil  # noqa: PLC0415 -- only on systems without /proc

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    reason = f"there is no detector for {host.system} yet"
    return Facts(
        cpu=Cpu(model=platform.processor() or None, cores=psutil.cpu_count(logical=False), threads=psutil.cpu_count()),
        ram=Ram(total_bytes=memory.total, available_bytes=memory.available, swap_total_bytes=swap.total),
        unknown=(Unknown(what="accelerators", reason=reason), Unknown(what="disks", reason=reason)),
    )


def combine(answers: Mapping[str, Answer[Facts]]) -> Machine:
    """One machine from what the probes said, whatever some of them did not say."""
    said = {name: a.value for name, a in answers.items() if a.value is not None and name != _NVIDIA_NAMES}
    lost = [Unknown(what=name, reason=a.reason or "no answer") for name, a in answers.items() if a.value is None]
    named = answers[_NVIDIA_NAMES].value if _NVIDIA_NAMES in answers else None
    if _NVIDIA not in said and named is not None and named.accelerators:
        # NVML hangs: the cards are there all the same, and only their memory is unknown.
        said[_NVIDIA] = Facts(accelerators=named.accelerators)
    accelerators, unknown = _accelerators(said, lost)
    ram = _merge([facts.ram for facts in said.values() if facts.ram is not None], Ram())
    cpu = _merge([facts.cpu for facts in said.values() if facts.cpu is not None], Cpu())
    ram, remarks = without_gpu_nodes(ram, accelerators or ())
    machine = Machine(
        name=THIS_MACHINE,
        source=DETECTED,
        system=next((facts.system for facts in said.values() if facts.system), None) or platform.system(),
        cpu=replace(cpu, architecture=cpu.architecture or platform.machine() or None),
        ram=ram,
        accelerators=accelerators,
        disks=next((facts.disks for facts in said.values() if facts.disks is not None), None),
        drivers=tuple(driver for facts in said.values() for driver in facts.drivers),
        unknown=(*lost, *unknown),
        notices=(*(notice for facts in said.values() for notice in facts.notices), *remarks),
    )
    return replace(machine, accelerators=_with_shared_pool(machine))


def _merge(parts: list[T], empty: T) -> T:
    """The parts laid over each other: the first known value of each field."""
    merged = empty
    for part in parts:
        known = {f.name: getattr(part, f.name) for f in fields(part) if getattr(merged, f.name) is None}
        merged = replace(merged, **known)
    return merged


def _accelerators(
    said: Mapping[str, Facts], lost: list[Unknown]
) -> tuple[tuple[Accelerator, ...] | None, list[Unknown]]:
    """All vendors' devices in one list, the places in ``unknown`` counted on; None where no vendor's probe answered."""
    together: list[Accelerator] = []
    unknown: list[Unknown] = []
    answered = False
    for facts in said.values():
        shift = len(together)
        unknown += [
            replace(one, what=f"accelerators.{int(match[1]) + shift}{one.what[match.end() :]}")
            if (match := re.match(r"accelerators\.(\d+)", one.what))
            else one
            for one in facts.unknown
        ]
        if facts.accelerators is not None:
            answered = True
            together += facts.accelerators
    incomplete = any(re.fullmatch(r"accelerators(\.[a-z]+)?|machine", one.what) for one in [*lost, *unknown])
    return (tuple(together) if together or (answered and not incomplete) else None), unknown


def without_gpu_nodes(ram: Ram, accelerators: tuple[Accelerator, ...]) -> tuple[Ram, tuple[str, ...]]:
    """RAM without the memory of coherent GPUs (GH200, GB200, GB300), which Linux counts in MemTotal as well.

    Those pages are NUMA nodes without processors. Counted in both places, a model would be promised them twice.
    """
    if not any(_COHERENT.search(accelerator.name or "") for accelerator in accelerators):
        return ram, ()
    nodes = [node for node in ram.numa or () if node.cpus == 0]
    total = sum(node.total_bytes or 0 for node in nodes)
    if not total or ram.total_bytes is None or total >= ram.total_bytes:
        return ram, ()
    free = sum(node.free_bytes or 0 for node in nodes)
    available = None if ram.available_bytes is None else max(0, ram.available_bytes - free)
    notice = f"MemTotal counts {total} bytes of GPU memory; they are counted with the GPU only"
    return replace(ram, total_bytes=ram.total_bytes - total, available_bytes=available), (notice,)


def _with_shared_pool(machine: Machine) -> tuple[Accelerator, ...] | None:
    """Unified accelerators that tell no size of their own have the host's."""
    if machine.accelerators is None:
        return None
    return tuple(
        replace(one, total_bytes=machine.ram.total_bytes, free_bytes=machine.ram.available_bytes)
        if one.memory_kind is MemoryKind.UNIFIED and one.total_bytes is None
        else one
        for one in machine.accelerators
    )
