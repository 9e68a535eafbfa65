"""The plan: everything ``serve`` needs to do the same thing again, as one value and one file."""

from dataclasses import dataclass
from typing import Final, Literal

from kimigguf.memory.layout import Layout
from kimigguf.memory.ledger import Ledger
from kimigguf.memory.settings import Settings

SCHEMA: Final = "kimigguf.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One shard: its name, size and, where known, SHA-256 (lower-case hex)."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Which files. ``folder`` is absolute, None while they are not on this machine. The first file is the one loaded."""

    architecture: str
    quant: str | None
    repository: str | None
    commit: str | None
    folder: str | None
    files: tuple[PlannedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """The machine that the plan was made for, as far as a replay must match it."""

    name: str
    ram_bytes: int | None
    device_names: tuple[str | None, ...]
    device_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``gave_way`` lists, in order, the settings that were lowered to make it fit, in words."""

    schema: Literal["kimigguf.plan/1"] = SCHEMA
    model: PlannedModel
    machine: PlannedMachine
    settings: Settings
    layout: Layout
    ledger: Ledger
    gave_way: tuple[str, ...] = ()
