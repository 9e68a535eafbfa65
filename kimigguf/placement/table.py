"""The model as elements to pack and the budget as capacities, and the search for the best packing with its buffers."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kimigguf.memory.compute import is_known, is_pipelined
from kimigguf.memory.layout import HOST, LayerPlace, Layout
from kimigguf.memory.ledger import Component, Ledger, ledger
from kimigguf.memory.model import Layer, LayerKind, ModelSpec, Part
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import Budget
from kimigguf.placement.pack import Element, Packing, pack, stretched
from kimigguf.placement.placed import Placed, device_need_bytes, host_have_bytes
from kimigguf.units import MIB

_ROUNDS: Final = 12
"""Buffers depend on the split and the split on the buffers; two rounds settle it, the rest is for odd machines."""
_PATIENCE: Final = 3
"""Rounds before reserves are made equal."""
_NEAR_MISSES: Final = 4
"""How many better packings may turn out too large before the best one so far is taken."""
_OPTIMISM: Final = 8
"""One part in so many of the buffers is left out when a better packing is looked for."""
_EXPERT_PART: Final = re.compile(r"ffn_(up|down|gate|gate_up)_(?:ch|)exps")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A packing with what its devices hold beside it, in bytes; ``shared`` is the part of that which it foresaw."""

    packing: Packing
    placed: Placed
    used: tuple[int, ...]
    shared: tuple[int, ...]
    overhead: tuple[int, ...]

    def fits(self, capacities: Sequence[int]) -> bool:
        """Whether every device that takes anything holds it and what comes with it."""
        return all(
            used + overhead <= capacity
            for used, overhead, capacity in zip(self.used, self.overhead, capacities, strict=True)
            if used
        )

    def reserve(self, before: Sequence[int]) -> list[int]:
        """What to keep for buffers when packing again; as before on devices that took nothing, and so told nothing."""
        return [
            overhead - shared if used else kept
            for used, shared, overhead, kept in zip(self.used, self.shared, self.overhead, before, strict=True)
        ]


class Table:
    """The model as elements to pack and the budget as capacities; computed once for all settings that are tried."""

    def __init__(self, spec: ModelSpec, budget: Budget) -> None:
        self.spec = spec
        self.budget = budget
        self.experts = _expert_groups(spec)
        discrete = any(not device.unified and device.usable_bytes for device in budget.devices)
        # An integrated GPU beside real ones would only add its slowness and a transfer.
        self.capacities = [0 if device.unified and discrete else device.usable_bytes or 0 for device in budget.devices]
        self.unified = [device.unified and not discrete for device in budget.devices]

    def host_have(self, placed: Placed) -> int:
        """RAM for the host's part: all that is usable, less what devices take of the same pool."""
        left = host_have_bytes(placed.ledger, self.budget)
        return placed.ledger.total_bytes(HOST) if left is None else left

    def place(self, settings: Settings, *, experts_stay_pageable: bool = False) -> Placed:
        """The best placement of these settings, whether or not the host's part fits in RAM."""
        if max(self.capacities, default=0) <= 0:
            return self._on_host(settings)
        capacities = list(self.capacities)
        if any(self.unified) and self.budget.ram_bytes is not None:
            # One pool: what only the host can hold comes off what the GPU may take of it.
            left = self.budget.ram_bytes - _host_only_bytes(self._on_host(settings).ledger)
            capacities = [min(c, left) if u else c for c, u in zip(capacities, self.unified, strict=True)]
        elements = self._elements(settings, without_experts=experts_stay_pageable and any(self.unified))
        return (
            self._everything(settings, elements, capacities)
            or self._settle(settings, elements, capacities)
            or self._on_host(settings)
        )

    def _on_host(self, settings: Settings) -> Placed:
        return self._count(settings, Layout.on_host(len(self.spec.layers)))

    def _names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.budget.devices)

    def _count(self, settings: Settings, layout: Layout) -> Placed:
        return Placed(settings=settings, layout=layout, ledger=ledger(self.spec, settings, layout))

    def _elements(self, settings: Settings, *, without_experts: bool) -> list[Element]:
        layers = [
            Element(
                trunk_bytes=layer.trunk_bytes + _kept_bytes(layer, settings),
                shared_bytes=0 if layer.kind is LayerKind.KDA else _mask_bytes(settings),
                experts=() if without_experts else tuple(size for _, size in self.experts[layer.index]),
            )
            for layer in self.spec.layers
        ]
        return [*layers, Element(trunk_bytes=self.spec.head_bytes)]

    def _everything(self, settings: Settings, elements: Sequence[Element], capacities: Sequence[int]) -> Placed | None:
        """All of it on devices with room for four copies of what passes between them, so that llama.cpp pipelines."""
        reserve = [_expected_buffer_bytes(settings)] * len(capacities)
        whole = sum(element.trunk_bytes + element.expert_bytes for element in elements)
        for _ in range(_PATIENCE):
            room = _less(capacities, reserve)
            if sum(room) < whole:
                break
            packing = pack(elements, room)
            if not packing.holds_all:
                break
            layout = self._layout(packing)
            if len(layout.devices) > 1 and not is_pipelined(settings, layout):
                break  # experts apart from their trunk, for want of room for copies that are then not made
            counted = self._counted(settings, packing, elements, layout)
            if counted.fits(capacities):
                return counted.placed
            reserve = counted.reserve(reserve)
        return None

    def _settle(self, settings: Settings, elements: Sequence[Element], capacities: Sequence[int]) -> Placed | None:
        """Pack, count the buffers that this packing needs, and pack again until both agree; None if nothing fits.

        Nothing is pipelined here, not even where all is on devices: its copies would come and go with the last tensor.
        """
        reserve = [_expected_buffer_bytes(settings)] * len(capacities)
        best: _Counted | None = None
        misses = 0
        for _ in range(_ROUNDS):
            packing = pack(elements, _less(capacities, reserve))
            if best is not None and _rank(packing, elements) <= _rank(best.packing, elements):
                break  # nothing is to be gained from counting this one, which costs more than packing it
            counted = self._counted(settings, packing, elements, self._unpipelined(settings, self._layout(packing)))
            if counted.fits(capacities):
                best, misses = counted, 0
                # Another split may get by with smaller buffers; it is counted before it is believed.
                reserve = [size - size // _OPTIMISM for size in counted.reserve(reserve)]
                continue
            misses += 1
            if best is not None and misses > _NEAR_MISSES:
                break
            reserve = [max(pair) for pair in zip(counted.reserve(reserve), reserve, strict=True)]
            if misses > _PATIENCE:
                # Runs of odd lengths chase each other's buffers: the largest seen anywhere is enough everywhere.
                reserve = [max(reserve)] * len(reserve)
        if best is None or not any(device is not None for device in best.packing.device):
            return None
        return self._stretched(settings, elements, capacities, best).placed

    def _stretched(
        self, settings: Settings, elements: Sequence[Element], capacities: Sequence[int], best: _Counted
    ) -> _Counted:
        """The same with trunks that the search, which moves by whole reserves, has left on the host for nothing."""
        tried: _Counted | None = best
        while tried is not None:
            best, tried = tried, None
            room = _less(capacities, best.overhead)
            left = [space - used for space, used in zip(room, best.used, strict=True)]
            for device in sorted(range(len(room)), key=lambda d: -left[d]):
                packing = stretched(elements, room, best.packing, device)
                if packing is None:
                    continue
                counted = self._counted(settings, packing, elements, self._layout(packing))
                if counted.fits(capacities):
                    tried = counted
                    break
        return best

    def _counted(self, settings: Settings, packing: Packing, elements: Sequence[Element], layout: Layout) -> "_Counted":
        placed = self._count(settings, layout)
        devices = range(len(layout.devices))
        used = tuple(packing.used_bytes(elements, device) for device in devices)
        return _Counted(
            packing=packing,
            placed=placed,
            used=used,
            shared=tuple(packing.shared_bytes(elements, device) for device in devices),
            overhead=tuple(_overhead_bytes(placed, device, used[device]) for device in devices),
        )

    def _unpipelined(self, settings: Settings, layout: Layout) -> Layout:
        """The layout with pipelining switched off where it is on, and where that changes what is known to be needed."""
        return replace(layout, overridden=True) if is_known(self.spec) and is_pipelined(settings, layout) else layout

    def _layout(self, packing: Packing) -> Layout:
        places: list[LayerPlace] = []
        moved: list[tuple[str, int | None]] = []
        for layer, device, experts in zip(self.spec.layers, packing.device, packing.experts, strict=False):
            groups = self.experts[layer.index]
            where = experts or (HOST,) * len(groups)  # experts that were not packed stay pageable
            usual = _usual_place(device, where, [size for _, size in groups])
            places.append(LayerPlace(trunk=device, experts=usual))
            for (names, _), place in zip(groups, where, strict=True):
                if place != usual:
                    moved.extend((name, place) for name in names)
        return Layout(devices=self._names(), layers=tuple(places), head=packing.device[-1], moved=tuple(moved))


def _usual_place(trunk: int | None, experts: Sequence[int | None], sizes: Sequence[int]) -> int | None:
    """Where most of a layer's expert bytes lie; with its trunk where it has none, or as much lies there."""
    held: defaultdict[int | None, int] = defaultdict(int)
    for place, size in zip(experts, sizes, strict=True):
        held[place] += size
    return max(held, key=lambda place: (held[place], place == trunk, place is not None), default=trunk)


def _less(capacities: Sequence[int], reserve: Sequence[int]) -> list[int]:
    return [capacity - kept for capacity, kept in zip(capacities, reserve, strict=True)]


def _rank(packing: Packing, elements: Sequence[Element]) -> tuple[int, int]:
    """Higher is better: fewer trunks on the host, then more experts on devices."""
    return -packing.device.count(None), packing.worth(elements)


def _expected_buffer_bytes(settings: Settings) -> int:
    """A first guess at a device's compute buffer: activations of one physical batch. Replaced once counted."""
    return settings.effective_ubatch_tokens * MIB


def _mask_bytes(settings: Settings) -> int:
    """The attention mask of one physical batch, which every device needs that has an attention layer.

    In f16 with flash attention and in f32 without, as ``k3_graph`` has it from llama.cpp.
    """
    return settings.effective_ubatch_tokens * settings.stream_tokens * (2 if settings.flash_attention else 4)


def _overhead_bytes(placed: Placed, device: int, packed_bytes: int) -> int:
    """What a device holds beside what was packed: its buffers, or a guess where nobody knows them."""
    counted = device_need_bytes(placed.ledger, device) - packed_bytes
    is_unknown = any(row.device == device and row.component is Component.COMPUTE for row in placed.ledger.unknown)
    guess = _expected_buffer_bytes(placed.settings) + _mask_bytes(placed.settings)
    return counted + (guess if is_unknown else 0)


def _host_only_bytes(counted: Ledger) -> int:
    """What no device can take: the embedding, the host's buffer, and what lies beside the engine."""
    movable = (Component.TRUNK, Component.EXPERTS, Component.HEAD, Component.KV_CACHE, Component.RECURRENT_STATE)
    return sum(row.size_bytes or 0 for row in counted.rows if row.component not in movable)


def _kept_bytes(layer: Layer, settings: Settings) -> int:
    """Cache and state of one layer, which lie with its trunk; 0 where unknown (the ledger says so)."""
    if not settings.kv_offload or layer.key_width is None or layer.value_width is None:
        return 0
    token = settings.kv_type.row_bytes(layer.key_width) + settings.kv_type.row_bytes(layer.value_width)
    return token * settings.stream_tokens * settings.streams + (layer.state_bytes or 0) * settings.slots


def _expert_groups(spec: ModelSpec) -> list[list[tuple[tuple[str, ...], int]]]:
    """Per layer, its expert matrices: the names that belong together (weight, bias) and their bytes."""
    groups: list[defaultdict[str, list[tuple[str, int]]]] = [defaultdict(list) for _ in spec.layers]
    for weight in spec.weights:
        if weight.part is Part.EXPERTS and weight.layer is not None:
            match = _EXPERT_PART.search(weight.name)
            groups[weight.layer][match[1] if match else weight.name].append((weight.name, weight.size_bytes))
    return [
        [(tuple(name for name, _ in group), sum(size for _, size in group)) for group in layer.values()]
        for layer in groups
    ]
