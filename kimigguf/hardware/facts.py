"""What one probe contributes to the picture of the machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from kimigguf.hardware.snapshot import Accelerator, Cpu, Disk, Driver, Ram, Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Parts of a ``Machine``; None or empty where a probe has nothing to say on them."""

    system: str | None = None
    cpu: Cpu | None = None
    ram: Ram | None = None
    accelerators: tuple[Accelerator, ...] | None = None
    disks: tuple[Disk, ...] | None = None
    drivers: tuple[Driver, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notices: tuple[str, ...] = ()


def unknowns(pairs: Iterable[tuple[str, object, str]]) -> tuple[Unknown, ...]:
    """``Unknown`` for each (what, value, reason) whose value is None."""
    return tuple(Unknown(what=what, reason=reason) for what, value, reason in pairs if value is None)
