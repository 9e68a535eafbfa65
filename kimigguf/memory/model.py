"""A model as its memory sees it: layers with a kind, each with the bytes of its parts."""

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """What a layer keeps per sequence."""

    KDA = "kda"
    """Kimi Delta Attention: a recurrent state of fixed size per slot."""
    MLA = "mla"
    """Multi-head latent attention: a latent K cache that grows with the context; V is a view of it."""
    ATTENTION = "attention"
    """Ordinary (grouped-query) attention: K and V caches that grow with the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block. ``trunk_bytes`` is everything in it but the routed experts, ``expert_bytes`` those."""

    index: int
    kind: LayerKind | None
    trunk_bytes: int
    expert_bytes: int
