"""What placing a model came to, and what of a ledger must lie where. Types and sums only."""

from dataclasses import dataclass

from kimigguf.memory.layout import HOST, Layout
from kimigguf.memory.ledger import Component, Ledger
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a placement may do to make a model fit.

    ``context_floor_tokens`` is the least context that is still worth serving. ``may_stream`` allows experts that do
    not fit in RAM to be read from the file as tokens need them, which needs a fast local disk.
    """

    context_floor_tokens: int = 8192
    may_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A complete placement. ``settings`` are the ones that fit; ``gave_way`` says what was lowered to get there.

    ``streamed_bytes`` is how much of the host's experts has no room in RAM and is read from the disk again and again.
    """

    settings: Settings
    layout: Layout
    ledger: Ledger
    gave_way: tuple[str, ...] = ()
    streamed_bytes: int = 0
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """It does not fit: what RAM would have to hold beside what devices take, and what it can, in bytes.

    ``resident_bytes`` is the part of the need that can never be left on disk: trunk, cache, buffers.
    """

    need_bytes: int
    have_bytes: int
    resident_bytes: int
    reason: str
    gave_way: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int:
        """How much more RAM would do."""
        return self.need_bytes - self.have_bytes


def resident_bytes(counted: Ledger) -> int:
    """What must stay in RAM: all that the host holds but routed experts, which a token reads a few of at a time."""
    return counted.total_bytes(HOST) - _host_experts(counted)


def device_need_bytes(counted: Ledger, device: int) -> int:
    """What a device must hold beside its driver's context, which the budget has taken off already."""
    context = sum(
        row.size_bytes or 0 for row in counted.rows if row.device == device and row.component is Component.GPU_CONTEXT
    )
    return counted.total_bytes(device) - context


def host_have_bytes(counted: Ledger, budget: Budget) -> int | None:
    """RAM for the host's part: all that is usable, less what devices take of the same pool; None: unknown."""
    if budget.ram_bytes is None:
        return None
    shared = (device_need_bytes(counted, index) for index, device in enumerate(budget.devices) if device.unified)
    return budget.ram_bytes - sum(shared)


def _host_experts(counted: Ledger) -> int:
    return sum(row.size_bytes or 0 for row in counted.rows if row.device is HOST and row.component is Component.EXPERTS)
