"""PCI devices from /sys: names from the system's pci.ids, link speeds, and which cards are graphics."""

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kimigguf.hardware.host import Host
from kimigguf.hardware.snapshot import PcieLink

_ID_FILES: Final = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids", "usr/share/pci.ids")
_GENERATIONS: Final = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""Gigatransfers per second as /sys writes them, and the PCI Express generation that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphicsCard:
    """One card under /sys/class/drm: ``folder`` is its PCI device's, ``card`` its own."""

    card: str
    folder: str
    vendor: int
    device: int


def graphics_cards(host: Host, vendor: int) -> Iterator[GraphicsCard]:
    """The cards of one PCI vendor, in the kernel's order."""
    names = [name for name in host.names("sys/class/drm") if re.fullmatch(r"card\d+", name)]
    for name in sorted(names, key=lambda text: int(text[4:])):
        card = f"/sys/class/drm/{name}"
        folder = host.real(f"{card}/device") or f"{card}/device"
        if host.number(f"{folder}/vendor") == vendor:
            yield GraphicsCard(card=card, folder=folder, vendor=vendor, device=host.number(f"{folder}/device") or 0)


def parse_ids(text: str, vendor: int, device: int) -> str | None:
    """A device's name in pci.ids: the marketing name in brackets where there is one."""
    block = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n|\n)*)", text + "\n", re.MULTILINE)
    line = re.search(rf"^\t{device:04x}  (.+)$", block[1], re.MULTILINE) if block else None
    if line is None:
        return None
    marketing = re.search(r"\[(.+)\]", line[1])
    return marketing[1] if marketing else line[1]


def device_name(host: Host, vendor: int, device: int) -> str | None:
    """What the system's pci.ids calls a device; None where there is no such file or entry."""
    for file in _ID_FILES:
        text = host.text(file)
        if text is not None:
            return parse_ids(text, vendor, device)
    return None


def parse_generation(text: str | None) -> int | None:
    """The generation of a speed such as ``32.0 GT/s PCIe``."""
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text or "")
    return _GENERATIONS.get(f"{float(match[1]):.1f}") if match else None


def link(host: Host, folder: str) -> PcieLink | None:
    """The link of a PCI device folder, None where /sys shows none."""
    found = PcieLink(
        generation=parse_generation(host.text(f"{folder}/current_link_speed")),
        width=host.number(f"{folder}/current_link_width") or None,
        max_generation=parse_generation(host.text(f"{folder}/max_link_speed")),
        max_width=host.number(f"{folder}/max_link_width") or None,
    )
    return None if found == PcieLink() else found


def link_above(host: Host, folder: str) -> PcieLink | None:
    """The link of the nearest PCI device at or above a resolved /sys folder (a drive's, a port's)."""
    while folder.startswith("/sys/devices/"):
        if found := link(host, folder):
            return found
        folder = posixpath.dirname(folder)
    return None
