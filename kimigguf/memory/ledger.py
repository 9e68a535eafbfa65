"""Memory as a ledger, not a number: rows of component, place, bytes and source; every total is their sum."""

from dataclasses import dataclass
from enum import StrEnum


class Component(StrEnum):
    """What the bytes are for."""

    EMBEDDING = "token embedding"
    HEAD = "output head"
    TRUNK = "trunk"
    EXPERTS = "experts"
    KV_CACHE = "KV cache"
    RECURRENT_STATE = "KDA state"
    COMPUTE = "compute buffer"
    CHECKPOINTS = "context checkpoints"
    PROMPT_CACHE = "prompt cache"
    REPACKED = "repacked experts"
    GPU_CONTEXT = "GPU context"
    PROJECTOR = "vision projector"


class Source(StrEnum):
    """Where a number comes from."""

    HEADER = "header"
    PROFILE = "profile"
    MEASURED = "measured"
    ASSUMED = "assumed"


class Column(StrEnum):
    """Which column of the engine's own memory report a row belongs to."""

    MODEL = "model"
    CONTEXT = "context"
    COMPUTE = "compute"
    BESIDE = "beside the engine"
    """In none: the engine's accounting leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``size_bytes`` None is an honest unknown, and makes every total that contains it a lower bound."""

    component: Component
    device: int | None
    size_bytes: int | None
    source: Source
    column: Column
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    devices: tuple[str, ...]
    rows: tuple[Row, ...]

    def total_bytes(self, device: int | None, *, column: Column | None = None) -> int:
        """Sum of the known rows of one device (None: host), of one column or of all."""
        return sum(
            row.size_bytes or 0
            for row in self.rows
            if row.device == device and (column is None or row.column is column)
        )

    @property
    def unknown(self) -> tuple[Row, ...]:
        """The rows whose size nobody knows."""
        return tuple(row for row in self.rows if row.size_bytes is None)
