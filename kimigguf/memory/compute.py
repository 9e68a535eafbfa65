"""The compute buffers of a run, by working through the engine's own scheduling and allocation of K3's graph."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from kimigguf.memory import k3_graph, scheduler
from kimigguf.memory.graph import Id
from kimigguf.memory.kimi_k3 import ARCHITECTURE
from kimigguf.memory.layout import HOST, Layout
from kimigguf.memory.model import ModelSpec, Part
from kimigguf.memory.settings import Settings

Buffers: TypeAlias = tuple[int, ...]
"""Bytes per device and, last, of the host."""


def is_known(spec: ModelSpec) -> bool:
    """Whether the compute buffers of such a model can be told."""
    return spec.architecture == ARCHITECTURE


def compute_bytes(spec: ModelSpec, settings: Settings, layout: Layout) -> Buffers | None:
    """Bytes of each device's and, last, the host's compute buffer; None for an architecture whose graph is not known.

    Takes about 50 ms, and no time when the same question was asked lately.

    Raises:
        IntegrityError: ``missing-key`` for a K3 header that lacks dimensions.
    """
    if not is_known(spec):
        return None
    if settings.offload_operations:
        return _counted(_sizes(spec), _deciding(settings), layout, {w.name: w.size_bytes for w in spec.weights})
    return _k3(_sizes(spec), _deciding(settings), layout)


def _sizes(spec: ModelSpec) -> k3_graph.Sizes:
    embedding = next((weight for weight in spec.weights if weight.part is Part.EMBEDDING), None)
    vocabulary = embedding.shape[1] if embedding is not None and len(embedding.shape) > 1 else 0
    return k3_graph.Sizes.of(spec.metadata, vocabulary)


def _deciding(settings: Settings) -> Settings:
    """The settings without those that no compute buffer depends on, so that answers can be remembered."""
    plain = Settings()
    return replace(
        settings,
        checkpoints=plain.checkpoints,
        prompt_cache_bytes=plain.prompt_cache_bytes,
        prompt_cache_is_capped=plain.prompt_cache_is_capped,
        repack=plain.repack,
        projector_bytes=plain.projector_bytes,
    )


@lru_cache(maxsize=256)
def _k3(sizes: k3_graph.Sizes, settings: Settings, layout: Layout) -> Buffers:
    return _counted(sizes, settings, layout, {})


def _counted(sizes: k3_graph.Sizes, settings: Settings, layout: Layout, weight_bytes: Mapping[str, int]) -> Buffers:
    program = k3_graph.build(sizes, settings)
    graph = program.graph
    moved = dict(layout.moved)

    def where(tensor: Id) -> int | None:
        if (name := graph.weight.get(tensor)) is not None:
            return moved[name] if name in moved else _usual(name, layout)
        return layout.layers[graph.cache[tensor]].trunk if settings.kv_offload else HOST

    return scheduler.compute_bytes(
        program,
        devices=len(layout.devices),
        where=where,
        pipelined=is_pipelined(settings, layout),
        offloaded_bytes=(lambda weight: weight_bytes[graph.weight[weight]]) if weight_bytes else None,
    )


def is_pipelined(settings: Settings, layout: Layout) -> bool:
    """Whether llama.cpp overlaps batches over devices, which keeps four copies of all that passes between them."""
    return (
        len(layout.devices) > 1
        and layout.head is not HOST
        and all(place.trunk is not HOST for place in layout.layers)
        and settings.kv_offload
        and not layout.is_overridden
    )


def _usual(name: str, layout: Layout) -> int | None:
    if name.startswith("blk."):
        place = layout.layers[int(name.split(".", 2)[1])]
        return place.experts if "_exps." in name else place.trunk
    return HOST if name.startswith("token_embd") else layout.head
