"""The memory modules, as udev has decoded the firmware's table: readable without root, where dmidecode is not.

systemd's ``dmi_memory_id`` (since 248) keeps MEMORY_DEVICE_<n>_* properties in udev's database.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kimigguf.hardware.host import Host
from kimigguf.units import GIB

UDEV_FILE: Final = "run/udev/data/+dmi:id"
_CHANNEL_BYTES: Final = 8
"""A channel of DDR4, and the two halves of one of DDR5 together, is 64 bits wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module that is there. ``channel`` names socket and channel where the board's labels do."""

    size_bytes: int
    kind: str | None
    transfers_per_second: int | None
    channel: str | None


def parse_udev(text: str) -> tuple[Module, ...]:
    """The modules in udev's properties; an empty slot is none."""
    slots: dict[int, dict[str, str]] = {}
    for match in re.finditer(r"^E: ?MEMORY_DEVICE_(\d{1,4})_(\w+)=(.*)$", text, re.MULTILINE):
        slots.setdefault(int(match[1]), {})[match[2]] = match[3].strip()
    return tuple(module for _, slot in sorted(slots.items()) if (module := _module(slot)) is not None)


def _module(slot: dict[str, str]) -> Module | None:
    size = _number(slot.get("SIZE"))
    if slot.get("PRESENT") == "0" or not size:
        return None
    speed = _number(slot.get("CONFIGURED_SPEED_MTS")) or _number(slot.get("SPEED_MTS"))
    label = re.search(r"(P\d+ ?)?CHANNEL ?[A-Z0-9]+", slot.get("BANK_LOCATOR", ""), re.IGNORECASE)
    kind = slot.get("TYPE")
    return Module(
        size_bytes=size,
        kind=None if kind in {None, "Unknown", "Other"} else kind,
        transfers_per_second=None if speed is None else speed * 1_000_000,
        channel=label[0].upper() if label else None,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,18}", text) else None


def describe(modules: Sequence[Module]) -> str | None:
    """In words: ``24 x 32 GiB DDR5-4800``; None without modules."""
    groups = Counter((m.size_bytes, m.kind, m.transfers_per_second) for m in modules)
    words = []
    for (size, kind, transfers), count in groups.items():
        speed = "" if transfers is None else f"-{transfers // 1_000_000}"
        words.append(f"{count} x {size / GIB:g} GiB {kind or 'memory'}{speed}")
    return ", ".join(words) or None


def rated_bytes_per_second(modules: Sequence[Module]) -> int | None:
    """What all channels carry together at the slowest module's speed.

    None unless every module tells its speed, its channel and that it is DDR4 or DDR5: how many channels are in use
    cannot be had from the number of modules, since two may share one.
    """
    channels = {module.channel for module in modules}
    speeds = [module.transfers_per_second for module in modules if module.transfers_per_second is not None]
    if not modules or None in channels or len(speeds) != len(modules):
        return None
    if any(module.kind not in {"DDR4", "DDR5"} for module in modules):
        return None
    return len(channels) * _CHANNEL_BYTES * min(speeds)


def read_modules(host: Host) -> tuple[Module, ...]:
    """The modules of a Linux machine; none where udev tells of none (virtual machines, containers, old systemd)."""
    return parse_udev(host.text(UDEV_FILE) or "")
