"""A catalogue of one's own, for a hub that holds a tiny model under a real quant's name."""

import re
from pathlib import Path

from kimigguf.profile_files import find


def without_facts(folder: Path) -> dict[str, str]:
    """The environment in which Kimi K3's profile has no facts about memory: only the headers on the hub tell.

    With them a tiny stand-in would be refused wherever the real one does not fit.
    """
    text = find("models", "kimi-k3", {}).read_text(encoding="utf-8")
    profile = folder / "profiles" / "models" / "kimi-k3.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text(re.sub(r"(?ms)^\[metadata\]$.*?(?=^\[)", "", text), encoding="utf-8")
    return {"KIMIGGUF_PROFILES": str(folder / "profiles")}
