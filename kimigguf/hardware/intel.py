"""Intel GPUs from /sys (the xe and i915 drivers).

xe shows each tile's memory in tileN/physical_vram_size_bytes, i915 (where built so) lmem_total_bytes; neither shows
what is free. An integrated GPU sits at bus 0, slot 2, and works in the host's memory.
"""

import re
from typing import Final

from kimigguf.hardware.facts import Facts
from kimigguf.hardware.host import Host
from kimigguf.hardware.pci import GraphicsCard, device_name, graphics_cards, link
from kimigguf.hardware.snapshot import Accelerator, Backend, MemoryKind, Unknown

INTEL: Final = 0x8086


def read_intel(host: Host) -> Facts:
    """Intel GPUs; engines drive them through SYCL or Vulkan."""
    accelerators: list[Accelerator] = []
    unknown: list[Unknown] = []
    for index, card in enumerate(graphics_cards(host, INTEL)):
        integrated = card.folder.endswith("/0000:00:02.0")
        total = None if integrated else _own_memory(host, card)
        name = device_name(host, INTEL, card.device) or f"Intel GPU {card.device:#06x}"
        accelerators.append(
            Accelerator(
                name=name if name.startswith("Intel") else f"Intel {name}",
                backend=Backend.SYCL,
                memory_kind=MemoryKind.UNIFIED if integrated else MemoryKind.DISCRETE,
                total_bytes=total,
                pcie=None if integrated else link(host, card.folder),
            )
        )
        if not integrated and total is None:
            reason = "this driver shows no memory size in /sys: xpu-smi discovery"
            unknown.append(Unknown(what=f"accelerators.{index}.total_bytes", reason=reason))
        elif not integrated:
            reason = "Intel's drivers show no free memory in /sys"
            unknown.append(Unknown(what=f"accelerators.{index}.free_bytes", reason=reason))
    return Facts(accelerators=tuple(accelerators), unknown=tuple(unknown))


def _own_memory(host: Host, card: GraphicsCard) -> int | None:
    tiles = [name for name in host.names(card.folder) if re.fullmatch(r"tile\d+", name)]
    sizes = [
        host.number(f"{card.folder}/{tile}/physical_vram_size_bytes")
        or host.number(f"{card.folder}/{tile}/memory/physical_vram_size_bytes")
        for tile in tiles
    ]
    if sizes and None not in sizes:
        return sum(size for size in sizes if size is not None)
    return host.number(f"{card.card}/lmem_total_bytes") or host.number(f"{card.folder}/lmem_total_bytes")
