"""Reads ``profiles/models`` into the catalogue's types."""

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from kimigguf import profile_files
from kimigguf.catalogue.quants import ModelProfile, Quant
from kimigguf.errors import UsageError

DEFAULT_MODEL: Final = "kimi-k3"


def load_model(name: str = DEFAULT_MODEL, environ: Mapping[str, str] = os.environ) -> ModelProfile:
    """The model profile ``name``, the user's own before the shipped one.

    Raises:
        UsageError: ``unknown-profile`` or ``bad-profile``.
    """
    profile = profile_files.read("models", name, ModelProfile, environ)
    quants = tuple(
        replace(quant, trunk_bytes=quant.size_bytes - quant.expert_bytes)
        if quant.trunk_bytes is None and quant.expert_bytes is not None
        else quant
        for quant in profile.quants
    )
    return replace(profile, quants=quants)


def find_quant(profile: ModelProfile, text: str) -> Quant:
    """The quant a user means by ``text``: its name, in any case, with or without the ``UD-``.

    Raises:
        UsageError: ``unknown-quant`` with the nearest names.
    """
    by_key = {_key(quant.name): quant for quant in profile.quants}
    if found := by_key.get(_key(text)):
        return found
    nearest = [by_key[key].name for key in get_close_matches(_key(text), by_key, n=3, cutoff=0.5)]
    everything = ", ".join(quant.name for quant in profile.quants) or "none"
    raise UsageError(
        f"{profile.title} has no quant {text!r}",
        code="unknown-quant",
        hint=f"nearest: {', '.join(nearest)}" if nearest else f"there are: {everything}",
    )


def _key(name: str) -> str:
    return name.strip().upper().replace("-", "_").removeprefix("UD_")
