"""What of a machine's memory a model may use: one rule, stated here once and applied to every verdict and placement.

**The rule.** Usable RAM is the least of what is installed less what the system keeps (the larger of 4 GiB and 3 %),
MemAvailable where it was measured, and what every control group above the process still allows. Usable VRAM of a
device is the lesser of what is installed and what is free, less 1 GiB for the driver's context. Unified memory is one
pool, counted once. Swap never counts. What a user reserves comes off at the end.
"""

from dataclasses import dataclass
from typing import Final

from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind, Ram
from kimigguf.units import GIB, memory

KEEP_BYTES: Final = 4 * GIB
KEEP_PERCENT: Final = 3
GPU_CONTEXT_BYTES: Final = GIB
"""0.3-0.7 GiB is what a CUDA context takes; the rest covers fragments and the driver's own scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One step of the arithmetic. ``size_bytes`` is negative where memory is taken off, None where it is unknown."""

    what: str
    size_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """What one accelerator may hold. For unified memory that is a share of the RAM, not memory beside it.

    ``index`` is the accelerator's place in ``Machine.accelerators``; ``name`` is how plans and ledgers call it.
    """

    name: str
    usable_bytes: int | None
    unified: bool
    index: int
    total_bytes: int | None = None
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that may be used, with the arithmetic in ``lines``.

    ``ram_bytes`` None: unknown. ``devices_known`` False: there may be accelerators that nobody listed.
    """

    ram_bytes: int | None
    devices: tuple[DeviceBudget, ...]
    lines: tuple[BudgetLine, ...]
    devices_known: bool = True
    ram_total_bytes: int | None = None

    @property
    def vram_bytes(self) -> int:
        """Usable memory of all discrete accelerators whose memory is known."""
        return sum(device.usable_bytes or 0 for device in self.devices if not device.unified)

    @property
    def total_bytes(self) -> int | None:
        """RAM and VRAM together, None when the RAM is unknown; a lower bound unless ``is_complete``."""
        return None if self.ram_bytes is None else self.ram_bytes + self.vram_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every part is known, so that a "no" is a no and not a lack of knowledge."""
        return (
            self.ram_bytes is not None
            and self.devices_known
            and all(device.usable_bytes is not None for device in self.devices if not device.unified)
        )


def budget(machine: Machine, *, reserve_ram_bytes: int | None = None, reserve_vram_bytes: int | None = None) -> Budget:
    """The memory of a machine that a model may use.

    Args:
        machine: Live or described. Impossible readings in it (free above total, a total of zero) are refused, that is
            treated as unknown and named in a line.
        reserve_ram_bytes: What the user wants left free besides, in RAM.
        reserve_vram_bytes: The same on each discrete device.
    """
    ram_bytes, lines = _ram(machine, reserve_ram_bytes or 0)
    devices: list[DeviceBudget] = []
    for index, accelerator in enumerate(machine.accelerators or ()):
        name = f"gpu{index}"
        if accelerator.memory_kind is MemoryKind.UNIFIED:
            device, line = _unified(name, index, accelerator, ram_bytes)
            lines.append(line)
        else:
            device, device_lines = _discrete(name, index, accelerator, reserve_vram_bytes or 0)
            lines.extend(device_lines)
        devices.append(device)
    if machine.accelerators is None:
        lines.append(BudgetLine(what="accelerators", size_bytes=None, reason="nobody could tell whether there are any"))
    return Budget(
        ram_bytes=ram_bytes,
        devices=tuple(devices),
        lines=tuple(lines),
        devices_known=machine.accelerators is not None,
        ram_total_bytes=_positive(machine.ram.total_bytes),
    )


def keep_bytes(installed_bytes: int) -> int:
    """What the system keeps of its RAM: the larger of 4 GiB and 3 %."""
    return max(KEEP_BYTES, installed_bytes * KEEP_PERCENT // 100)


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


def _ram(machine: Machine, reserve_bytes: int) -> tuple[int | None, list[BudgetLine]]:
    ram = machine.ram
    lines: list[BudgetLine] = []
    bounds: list[tuple[int, str]] = []
    installed = _installed(machine, lines, bounds)
    available = _available(ram, installed, lines, bounds)
    _cgroup(ram, lines, bounds)
    if installed is None and available is None:
        lines.append(BudgetLine(what="usable RAM", size_bytes=None, reason="the RAM's size is unknown"))
        return None, lines
    least, which = min(bounds)
    if reserve_bytes:
        lines.append(BudgetLine(what="RAM reserved by you", size_bytes=-reserve_bytes, reason="as asked"))
    usable = max(0, least - reserve_bytes)
    lines.append(BudgetLine(what="usable RAM", size_bytes=usable, reason=f"{which} binds"))
    lines.extend(_numa(ram))
    if ram.swap_total_bytes:
        lines.append(BudgetLine(what="swap", size_bytes=0, reason=f"{memory(ram.swap_total_bytes)} never count"))
    return usable, lines


def _installed(machine: Machine, lines: list[BudgetLine], bounds: list[tuple[int, str]]) -> int | None:
    ram = machine.ram
    if ram.total_bytes is None:
        lines.append(BudgetLine(what="RAM installed", size_bytes=None, reason="unknown"))
        return None
    installed = _positive(ram.total_bytes)
    if installed is None:
        lines.append(BudgetLine(what="RAM installed", size_bytes=None, reason=f"{ram.total_bytes} bytes is impossible"))
        return None
    keep = min(installed, keep_bytes(installed))
    who = "as the system reports it" if machine.is_this_one else "as the machine's description has it"
    lines.append(BudgetLine(what="RAM installed", size_bytes=installed, reason=who))
    lines.append(BudgetLine(what="kept by the system", size_bytes=-keep, reason="the larger of 4 GiB and 3 %"))
    pool = ram.huge_pages_bytes or 0
    if pool:
        # MemAvailable leaves the pool out already, so it comes off here only.
        lines.append(BudgetLine(what="huge-page pool", size_bytes=-pool, reason="set aside; a model is not put there"))
    bounds.append((max(0, installed - keep - pool), "what is installed less what the system keeps"))
    return installed


def _numa(ram: Ram) -> list[BudgetLine]:
    """The nodes for a reader to see; they bound nothing, since an engine may spread over all of them."""
    nodes = ram.numa or ()
    return [
        BudgetLine(
            what=f"of it on NUMA node {node.index}",
            size_bytes=node.total_bytes if node.free_bytes is None else node.free_bytes,
            reason="installed there" if node.free_bytes is None else "free there now",
        )
        for node in (nodes if len(nodes) > 1 else ())
    ]


def _available(ram: Ram, installed: int | None, lines: list[BudgetLine], bounds: list[tuple[int, str]]) -> int | None:
    available = ram.available_bytes
    if available is None:
        return None
    if available < 0 or (installed is not None and available > installed):
        lines.append(
            BudgetLine(
                what="MemAvailable",
                size_bytes=None,
                reason=f"refused: {available} bytes cannot be available of what is installed",
            )
        )
        return None
    lines.append(BudgetLine(what="MemAvailable", size_bytes=available, reason="free without swapping, as measured now"))
    bounds.append((available, "MemAvailable"))
    return available


def _cgroup(ram: Ram, lines: list[BudgetLine], bounds: list[tuple[int, str]]) -> None:
    limit, allowed = ram.cgroup_limit_bytes, ram.cgroup_available_bytes
    if limit is not None and limit < 0:
        lines.append(BudgetLine(what="cgroup limit", size_bytes=None, reason=f"refused: {limit} bytes is impossible"))
        limit = None
    if allowed is not None and (allowed < 0 or (limit is not None and allowed > limit)):
        lines.append(
            BudgetLine(
                what="cgroup still allows",
                size_bytes=None,
                reason=f"refused: {allowed} bytes cannot be left of the limit",
            )
        )
        allowed = None
    if allowed is not None:
        reason = "the tightest control group above this process, reclaimable page cache credited"
        lines.append(BudgetLine(what="cgroup still allows", size_bytes=allowed, reason=reason))
        bounds.append((allowed, "the control group"))
    elif limit is not None:
        reason = "what is used of it is unknown, so the limit itself is the bound"
        lines.append(BudgetLine(what="cgroup limit", size_bytes=limit, reason=reason))
        bounds.append((limit, "the control group's limit"))


def _unified(name: str, index: int, accelerator: Accelerator, ram_bytes: int | None) -> tuple[DeviceBudget, BudgetLine]:
    limits = (accelerator.total_bytes, accelerator.free_bytes, accelerator.working_set_bytes)
    sizes = [size for size in limits if size is not None and size > 0]
    share = None if ram_bytes is None else min([ram_bytes, *sizes])
    line = BudgetLine(
        what=f"{name} {accelerator.name or ''}".strip(),
        size_bytes=0,
        reason=f"unified memory: the same pool as the RAM, counted once; the GPU may hold {memory(share)} of it",
    )
    return DeviceBudget(
        name=name, usable_bytes=share, unified=True, index=index, total_bytes=_positive(accelerator.total_bytes)
    ), line


def _discrete(
    name: str, index: int, accelerator: Accelerator, reserve_bytes: int
) -> tuple[DeviceBudget, list[BudgetLine]]:
    what = f"{name} {accelerator.name or ''}".strip()
    bound, lines = _device_bound(what, accelerator)
    if bound is None:
        device = DeviceBudget(name=name, usable_bytes=None, unified=False, index=index)
        return device, lines
    lines.append(
        BudgetLine(what=f"{name} context", size_bytes=-GPU_CONTEXT_BYTES, reason="the driver's context and scratch")
    )
    if reserve_bytes:
        lines.append(BudgetLine(what=f"{name} reserved by you", size_bytes=-reserve_bytes, reason="as asked"))
    usable = max(0, bound - GPU_CONTEXT_BYTES - reserve_bytes)
    lines.append(BudgetLine(what=f"usable VRAM of {name}", size_bytes=usable, reason="what is left"))
    device = DeviceBudget(
        name=name,
        usable_bytes=usable,
        unified=False,
        index=index,
        total_bytes=_positive(accelerator.total_bytes),
        reserve_bytes=bound - usable,
    )
    return device, lines


def _device_bound(what: str, accelerator: Accelerator) -> tuple[int | None, list[BudgetLine]]:
    """The lesser of a discrete device's installed and free memory, or None with the reason why neither is believed."""
    total, free = accelerator.total_bytes, accelerator.free_bytes
    reason = None
    if accelerator.memory_kind is None:
        reason = "whether its memory is its own or the host's is unknown, so it is not counted"
    elif total is None and free is None:
        reason = "its memory is unknown"
    elif (total is not None and total <= 0) or (total is None and free == 0):
        reason = f"refused: {total} bytes in all is impossible"
    elif free is not None and free < 0:
        reason = f"refused: {free} bytes free is impossible"
    elif total is not None and free is not None and free > total:
        reason = f"refused: {free} bytes free of {total} is impossible"
    if reason is not None:
        return None, [BudgetLine(what=what, size_bytes=None, reason=reason)]
    if free is not None:
        others = "" if total is None else f"; {memory(total - free)} of {memory(total)} are in use by others"
        return free, [BudgetLine(what=what, size_bytes=free, reason=f"free now{others}")]
    return total, [BudgetLine(what=what, size_bytes=total, reason="installed; what is free was not measured")]
