"""Memory as a ledger, not a number: rows of component, place, bytes and source; every total is their sum."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kimigguf.gguf_file.types import type_name
from kimigguf.memory.compute import compute_bytes
from kimigguf.memory.layout import HOST, Layout
from kimigguf.memory.model import Layer, ModelSpec, Part, Source
from kimigguf.memory.settings import Settings
from kimigguf.units import MIB


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


_GPU_CONTEXT_BYTES: Final = 512 * MIB
"""What a driver's context takes on each GPU; 0.3 to 0.7 GiB were seen on CUDA."""


def ledger(spec: ModelSpec, settings: Settings, layout: Layout) -> Ledger:
    """What a run needs, row by row: a pure function of the model, the settings and the placement.

    Weights are the files' bytes; padding of tensors to an engine's alignment (under 0.1 MiB per device) is left out.
    """
    return Ledger(
        devices=layout.devices,
        rows=(
            *_weights(spec, settings, layout),
            *_context(spec, settings, layout),
            *_compute(spec, settings, layout),
            *_beside(spec, settings, layout),
        ),
    )


_REPACKABLE: Final = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
"""Types that llama.cpp's CPU backend rearranges on AVX2 (``ggml_repack_get_optimal_repack_type``). AVX-512 adds Q2_K,
ARM most others."""
_REPACK_ROWS: Final = 8
"""Rows that are interleaved; a matrix whose rows are no multiple of it stays as it is."""


def _weights(spec: ModelSpec, settings: Settings, layout: Layout) -> Iterator[Row]:
    sums = _weight_sums(spec, layout)
    repacked = 0
    if settings.repack:
        for component, size in _repacked(spec, layout):
            sums[HOST, component] -= size
            repacked += size
    for device in (*range(len(layout.devices)), HOST):
        for component in (Component.EMBEDDING, Component.HEAD, Component.TRUNK, Component.EXPERTS):
            if total := sums.get((device, component)):
                yield Row(component=component, device=device, size_bytes=total, source=spec.source, column=Column.MODEL)
    if repacked:
        yield Row(
            component=Component.REPACKED,
            device=HOST,
            size_bytes=repacked,
            source=spec.source,
            column=Column.BESIDE,
            note="copied out of the files, and not in the engine's report; --no-repack keeps them in the page cache",
        )


def _weight_sums(spec: ModelSpec, layout: Layout) -> defaultdict[tuple[int | None, Component], int]:
    """Bytes by place and component."""
    sums: defaultdict[tuple[int | None, Component], int] = defaultdict(int)
    sums[HOST, Component.EMBEDDING] = spec.embedding_bytes
    sums[layout.head, Component.HEAD] = spec.head_bytes
    if spec.is_tied and layout.head is not HOST:  # the head is then a second copy of the embedding
        sums[layout.head, Component.HEAD] += spec.embedding_bytes
    for layer, place in zip(spec.layers, layout.layers, strict=True):
        sums[place.trunk, Component.TRUNK] += layer.trunk_bytes
        sums[place.experts, Component.EXPERTS] += layer.expert_bytes
    moved = dict(layout.moved)
    for weight in spec.weights if moved else ():
        if weight.name in moved:
            component, usual = _usual(weight.part, weight.layer, layout)
            sums[usual, component] -= weight.size_bytes
            sums[moved[weight.name], component] += weight.size_bytes
    return sums


def _repacked(spec: ModelSpec, layout: Layout) -> Iterator[tuple[Component, int]]:
    """Component and bytes of each host matrix that the engine copies into a layout of its own."""
    moved = dict(layout.moved)
    for weight in spec.weights:
        if weight.ggml_type is None or weight.part is Part.EMBEDDING or type_name(weight.ggml_type) not in _REPACKABLE:
            continue
        component, usual = _usual(weight.part, weight.layer, layout)
        dimensions = 3 if weight.part is Part.EXPERTS else 2
        if (
            moved.get(weight.name, usual) is HOST
            and len(weight.shape) == dimensions
            and weight.shape[1] % _REPACK_ROWS == 0
        ):
            yield component, weight.size_bytes


def _usual(part: Part, layer: int | None, layout: Layout) -> tuple[Component, int | None]:
    """The component a weight belongs to, and where it lies unless it is moved by name."""
    match part:
        case Part.EXPERTS if layer is not None:
            return Component.EXPERTS, layout.layers[layer].experts
        case Part.TRUNK if layer is not None:
            return Component.TRUNK, layout.layers[layer].trunk
        case Part.HEAD:
            return Component.HEAD, layout.head
        case _:
            return Component.EMBEDDING, HOST


def _context(spec: ModelSpec, settings: Settings, layout: Layout) -> Iterator[Row]:
    """KV cache and recurrent state lie with their layer's trunk, or all on the host without offload."""
    cache: defaultdict[int | None, int] = defaultdict(int)
    state: defaultdict[int | None, int] = defaultdict(int)
    unknown: set[int | None] = set()
    for layer, place in zip(spec.layers, layout.layers, strict=True):
        device = place.trunk if settings.kv_offload else HOST
        token = _token_bytes(layer, settings)
        if token is None or layer.state_bytes is None:
            unknown.add(device)
            continue
        cache[device] += token * settings.stream_tokens * settings.streams
        state[device] += layer.state_bytes * settings.slots
    for device in (*range(len(layout.devices)), HOST):
        for component, sums in ((Component.KV_CACHE, cache), (Component.RECURRENT_STATE, state)):
            if size := sums.get(device):
                yield Row(
                    component=component, device=device, size_bytes=size, source=spec.source, column=Column.CONTEXT
                )
        if device in unknown:
            yield Row(
                component=Component.KV_CACHE,
                device=device,
                size_bytes=None,
                source=spec.source,
                column=Column.CONTEXT,
                note=f"how layers of {spec.architecture!r} cache is not known here",
            )


def _token_bytes(layer: Layer, settings: Settings) -> int | None:
    if layer.key_width is None or layer.value_width is None:
        return None
    return settings.kv_type.row_bytes(layer.key_width) + settings.kv_type.row_bytes(layer.value_width)


def _compute(spec: ModelSpec, settings: Settings, layout: Layout) -> Iterator[Row]:
    sizes = compute_bytes(spec, settings, layout)
    first = (
        "with a copy of each host weight in turn, for large batches; --no-op-offload does without"
        if settings.offload_operations
        else None
    )
    for index, device in enumerate((*range(len(layout.devices)), HOST)):
        yield Row(
            component=Component.COMPUTE,
            device=device,
            size_bytes=None if sizes is None else sizes[index],
            source=spec.source,
            column=Column.COMPUTE,
            note=f"the graph of {spec.architecture!r} is not known here" if sizes is None else first,
        )
        first = None


def _beside(spec: ModelSpec, settings: Settings, layout: Layout) -> Iterator[Row]:
    """What the engine's own accounting leaves out."""
    state = sum(layer.state_bytes or 0 for layer in spec.layers)
    each = f"{settings.checkpoints} x {settings.slots} slots, made as a conversation grows"
    cap = "a cap, filled as it is used" if settings.prompt_cache_is_capped else "--cache-ram -1 sets no limit"
    rows: list[tuple[Component, int | None, int | None, Source, str | None]] = [
        (Component.CHECKPOINTS, HOST, state * settings.checkpoints * settings.slots, spec.source, each),
        (
            Component.PROMPT_CACHE,
            HOST,
            settings.prompt_cache_bytes if settings.prompt_cache_is_capped else None,
            Source.ASSUMED,
            cap,
        ),
        (Component.PROJECTOR, 0 if layout.devices else HOST, settings.projector_bytes, Source.HEADER, None),
    ]
    rows += [
        (Component.GPU_CONTEXT, device, _GPU_CONTEXT_BYTES, Source.ASSUMED, "0.3 to 0.7 GiB, by driver")
        for device in range(len(layout.devices))
    ]
    for component, device, size, source, note in rows:
        if size != 0:
            yield Row(
                component=component, device=device, size_bytes=size, source=source, column=Column.BESIDE, note=note
            )


__all__ = ["Column", "Component", "Ledger", "Row", "Source", "ledger"]
