"""Where the parts of a model lie. Made by ``placement``, counted by the ledger, spoken to an engine by ``engines``."""

from dataclasses import dataclass

HOST = None
"""The device index of main memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Device index of a layer's trunk (with its cache and state) and of its routed experts; None is the host."""

    trunk: int | None
    experts: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A complete placement: every tensor of the model has exactly one place.

    ``devices`` names the accelerators in the engine's order (``gpu0``, ...); indices in ``layers`` and ``head`` point
    into it. The token embedding always stays on the host, as llama.cpp keeps it. ``head`` is the output matrix with
    the final norms. ``moved`` lists single tensors that lie elsewhere than their part does, by name.
    """

    devices: tuple[str, ...]
    layers: tuple[LayerPlace, ...]
    head: int | None
    moved: tuple[tuple[str, int | None], ...] = ()
    overridden: bool | None = None
    """Whether the command line names tensors (``-ot``, ``-cmoe``, ``-ncmoe``), which switches pipelining off. None:
    whenever experts lie apart from their layer, or single tensors do."""

    @property
    def is_overridden(self) -> bool:
        """Whether any tensor is placed by name rather than with its layer."""
        if self.overridden is not None:
            return self.overridden
        return bool(self.moved) or any(place.experts != place.trunk for place in self.layers)

    @classmethod
    def on_host(cls, layer_count: int) -> "Layout":
        """Everything in main memory."""
        return cls(devices=(), layers=(LayerPlace(trunk=HOST, experts=HOST),) * layer_count, head=HOST)
