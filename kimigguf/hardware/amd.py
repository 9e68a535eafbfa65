"""AMD GPUs from /sys (the amdgpu driver's files), which needs neither ROCm nor root.

Sources: the kernel's amdgpu documentation (mem_info_* in driver-misc, gpu_metrics in the thermal chapter; its first
four bytes are size, format and content revision, and formats 2 and 3 are those of APUs), and ROCm issue 5595 for what
an APU's engine really gets: the GTT ceiling, whatever the carve-out.
"""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kimigguf.hardware.amd_smi import read_amd_smi, with_amd_smi
from kimigguf.hardware.facts import Facts
from kimigguf.hardware.host import Host
from kimigguf.hardware.pci import GraphicsCard, device_name, graphics_cards, link
from kimigguf.hardware.snapshot import Accelerator, Backend, Driver, MemoryKind, PcieLink, Unknown
from kimigguf.units import memory

AMD: Final = 0x1002
_APU_FORMATS: Final = (2, 3)
_DISCRETE_FORMAT: Final = 1
_APU_DEVICES: Final[Mapping[int, str]] = {
    0x1586: "Radeon 8060S (Strix Halo)",
    0x150E: "Radeon 890M (Strix Point)",
    0x1900: "Radeon 780M (Hawk Point)",
    0x15BF: "Radeon 780M (Phoenix)",
    0x15C8: "Radeon 740M (Phoenix 2)",
    0x1681: "Radeon 680M (Rembrandt)",
    0x164E: "Radeon Graphics (Raphael)",
    0x13C0: "Radeon Graphics (Granite Ridge)",
    0x1638: "Radeon Graphics (Cezanne)",
    0x74A0: "Instinct MI300A",
}
"""PCI device ids of integrated GPUs, for kernels and containers that show no gpu_metrics."""
_ONE_POOL: Final = frozenset({0x74A0})
"""APUs without any carve-out: the driver calls the host's whole memory VRAM, and MemTotal is the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """A card's memory in bytes: ``vram`` its own (an APU's carve-out), ``gtt`` what it may map of the host's.

    ``one_pool``: what the driver calls VRAM is the host's memory itself.
    """

    vram: int | None
    vram_used: int | None
    gtt: int | None
    is_apu: bool | None
    one_pool: bool = False


def parse_metrics_format(data: bytes) -> int | None:
    """The format revision in a gpu_metrics file: 1 of discrete GPUs, 2 and 3 of APUs."""
    size, revision = (int.from_bytes(data[:2], "little"), data[2]) if len(data) >= 4 else (0, 0)  # noqa: PLR2004 -- the header's length
    return revision if size >= 4 and 1 <= revision <= 3 else None  # noqa: PLR2004 -- the header's length, the formats there are


def is_apu(device: int, metrics_format: int | None) -> bool | None:
    """Whether a GPU is integrated: by its id, else by the format of its metrics; None where neither tells."""
    if device in _APU_DEVICES:
        return True
    if metrics_format is None:
        return None
    return metrics_format in _APU_FORMATS


def parse_pools(where: str, name: str | None, pools: Pools) -> tuple[Accelerator, list[Unknown], list[str]]:
    """The accelerator that these pools make, what is unknown about it, and notices.

    An APU's carve-out is taken from the host before Linux sees it: it is not in MemTotal. A carve-out larger than the
    GTT ceiling therefore counts as memory of its own; otherwise the GPU works in the host's RAM, up to that ceiling.
    """
    if pools.is_apu is None:
        reason = "neither the device id nor gpu_metrics tells whether it is integrated"
        return Accelerator(name=name, backend=Backend.ROCM), [Unknown(what=f"{where}.memory_kind", reason=reason)], []
    if pools.one_pool:
        card = Accelerator(
            name=name, backend=Backend.ROCM, memory_kind=MemoryKind.UNIFIED, working_set_bytes=pools.vram
        )
        return card, [], []
    if pools.is_apu and (pools.vram or 0) <= (pools.gtt or 0):
        ceiling = None if pools.gtt is None else pools.gtt + (pools.vram or 0)
        note = f"{name or where} works in the host's RAM: it may map {memory(pools.gtt)} of it"
        unified = Accelerator(
            name=name, backend=Backend.ROCM, memory_kind=MemoryKind.UNIFIED, working_set_bytes=ceiling
        )
        return unified, [], [f"{note}, and the firmware keeps {memory(pools.vram)} for it alone"]
    total = pools.vram or None
    free = None if total is None or pools.vram_used is None else total - pools.vram_used
    if free is not None and free < 0:
        total = free = None
    notices = [f"{name or where} has {memory(total)} carved out of the host's RAM"] if pools.is_apu else []
    reason = "the driver shows no plausible mem_info_vram_total"
    unknown = [Unknown(what=f"{where}.total_bytes", reason=reason)] if total is None else []
    card = Accelerator(
        name=name, backend=Backend.ROCM, memory_kind=MemoryKind.DISCRETE, total_bytes=total, free_bytes=free
    )
    return card, unknown, notices


def read_amd(host: Host) -> Facts:
    """AMD GPUs with the driver's version; ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are shown, not applied."""
    accelerators: list[Accelerator] = []
    unknown: list[Unknown] = []
    notices: list[str] = []
    cards = tuple(graphics_cards(host, AMD))
    second = read_amd_smi(host) if cards else {}
    for index, card in enumerate(cards):
        name = _name(host, card)
        accelerator, missing, remarks = parse_pools(f"accelerators.{index}", name, read_pools(host, card))
        address = posixpath.basename(card.folder).lower()
        accelerators.append(with_amd_smi(_with_details(host, card, accelerator), second.get(address, {})))
        unknown += missing
        notices += remarks
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if accelerators and variable in host.environ:
            notices.append(f"{variable}={host.environ[variable]} may hide some of these GPUs from the engine")
    driver = Driver(
        backend=Backend.ROCM,
        version=host.text("sys/module/amdgpu/version"),
        runtime_version=_rocm(host.text("opt/rocm/.info/version")),
    )
    return Facts(
        accelerators=tuple(accelerators),
        drivers=(driver,) if accelerators else (),
        unknown=tuple(unknown),
        notices=tuple(notices),
    )


def read_pools(host: Host, card: GraphicsCard) -> Pools:
    """A card's memory as the amdgpu driver shows it."""
    try:
        metrics = host.path(f"{card.folder}/gpu_metrics").read_bytes()
    except OSError:
        metrics = b""
    return Pools(
        vram=host.number(f"{card.folder}/mem_info_vram_total"),
        vram_used=host.number(f"{card.folder}/mem_info_vram_used"),
        gtt=host.number(f"{card.folder}/mem_info_gtt_total"),
        is_apu=is_apu(card.device, parse_metrics_format(metrics)),
        one_pool=card.device in _ONE_POOL,
    )


def _name(host: Host, card: GraphicsCard) -> str | None:
    product = host.text(f"{card.folder}/product_name")
    found = product or device_name(host, AMD, card.device) or _APU_DEVICES.get(card.device)
    if found is None:
        return f"AMD GPU {card.device:#06x}"
    return found if found.upper().startswith("AMD") else f"AMD {found}"


def _with_details(host: Host, card: GraphicsCard, accelerator: Accelerator) -> Accelerator:
    unified = accelerator.memory_kind is MemoryKind.UNIFIED
    pcie: PcieLink | None = None if unified else link(host, card.folder)
    return replace(accelerator, uuid=host.text(f"{card.folder}/unique_id") or None, pcie=pcie)


def _rocm(text: str | None) -> str | None:
    match = re.match(r"\d+\.\d+(?:\.\d+)?", text or "")
    return match[0] if match else None
