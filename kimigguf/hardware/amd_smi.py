"""AMD's own library (amdsmi) as a second source beside /sys, where it is installed; without it, not a word.

Its import prints and raises KeyError where there is no ROCm, so it happens in a process of its own, whose output is
read as JSON. Units as in AMD's Python reference: bandwidth in GB/s, power caps in microwatts (older ones in watts).
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from kimigguf.hardware.host import CommandError, Host
from kimigguf.hardware.snapshot import Accelerator, MemoryKind

_ASK: Final = """
import contextlib, io, json
said = {}
with contextlib.redirect_stdout(io.StringIO()):
    import amdsmi as smi
    smi.amdsmi_init()
    for card in smi.amdsmi_get_processor_handles():
        facts = said.setdefault(smi.amdsmi_get_gpu_device_bdf(card), {})
        for name in ("asic_info", "vram_info", "ecc_enabled"):
            with contextlib.suppress(Exception):
                facts[name] = getattr(smi, "amdsmi_get_gpu_" + name)(card)
        with contextlib.suppress(Exception):
            facts["power"] = smi.amdsmi_get_power_cap_info(card)
print(json.dumps(said, default=str))
"""
ARGV: Final = (sys.executable, "-c", _ASK)
_MOST_WATTS: Final = 10_000


def read_amd_smi(host: Host) -> Mapping[str, Mapping[str, Any]]:
    """What amdsmi says of each card, by its PCI address; empty where it is not installed or does not start."""
    if find_spec("amdsmi") is None:
        return {}
    try:
        return parse_reply(host.run(ARGV))
    except CommandError:
        return {}


def parse_reply(output: str) -> Mapping[str, Mapping[str, Any]]:
    """The last line as JSON; empty for anything else."""
    try:
        said = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    return {str(address).lower(): facts for address, facts in said.items() if isinstance(facts, dict)}


def with_amd_smi(card: Accelerator, facts: Mapping[str, Any]) -> Accelerator:
    """The card of /sys with what only amdsmi tells; where both tell, /sys stays."""
    bandwidth = _number(facts, "vram_info", "vram_max_bandwidth")
    watts = _number(facts, "power", "power_cap")
    if watts is not None and watts > _MOST_WATTS:
        watts /= 1_000_000
    name = facts.get("asic_info", {}).get("market_name") if isinstance(facts.get("asic_info"), dict) else None
    unnamed = card.name is None or card.name.startswith("AMD GPU 0x")
    blocks = facts.get("ecc_enabled")
    return replace(
        card,
        name=name if unnamed and isinstance(name, str) and name not in {"", "N/A"} else card.name,
        ecc=card.ecc if card.ecc is not None or not isinstance(blocks, int) else blocks != 0,
        power_limit_watts=card.power_limit_watts if card.power_limit_watts is not None else watts,
        bandwidth_bytes_per_second=card.bandwidth_bytes_per_second
        or (int(bandwidth * 1e9) if bandwidth and card.memory_kind is MemoryKind.DISCRETE else None),
    )


def _number(facts: Mapping[str, Any], part: str, name: str) -> float | None:
    found = facts.get(part)
    value = found.get(name) if isinstance(found, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
