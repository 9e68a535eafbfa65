"""Says a layout in llama.cpp's words: how many layers on devices, how they are split, which experts lie elsewhere.

llama.cpp gives the *last* ``gpu_layers`` of (layers + output head) to the devices, in order, by the proportions of
``split``. Whole counts as proportions land exactly: both sides of its comparison divide the same small integers.
Source: ``llama_model_base::load_tensors`` in llama.cpp's src/llama-model.cpp, build 11434.
"""

import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from kimigguf.errors import UsageError
from kimigguf.memory.layout import HOST, Layout

_EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The routed experts' tensors of one layer, as llama.cpp's own LLM_FFN_EXPS_REGEX names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Tensors whose name matches ``pattern`` lie on ``device`` (index into the layout's devices, None: host)."""

    pattern: str
    device: int | None


_NOT_PIPELINED: Final = Override(pattern="^pipelining-off$", device=HOST)
"""It names no tensor. llama.cpp has no flag against pipelining, and does without where there is a rule for tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """A complete placement for llama.cpp. ``split`` counts layers per device and is empty for fewer than two."""

    gpu_layers: int
    split: tuple[int, ...]
    overrides: tuple[Override, ...]


def offload(layout: Layout) -> Offload:
    """The layout in llama.cpp's words.

    Raises:
        UsageError: ``layout-not-expressible`` for a trunk that llama.cpp cannot be told: its host layers must come
            first and its devices follow each other in order.
    """
    trunk = [place.trunk for place in layout.layers]
    _check(layout, trunk)
    # The head is counted as one more layer after the last; where the layout has it elsewhere, a rule moves it.
    last = trunk[-1] if trunk else HOST
    follows = last is HOST or (layout.head is not HOST and layout.head >= last)
    head = layout.head if follows else last
    sequence = [place for place in (*trunk, head) if place is not HOST]
    counts = tuple(sequence.count(device) for device in range(len(layout.devices)))
    head_rule = () if follows else (Override(pattern="^output", device=layout.head),)
    # The engine takes the first rule that matches, so single tensors stand before their kind.
    overrides = (*_moved_overrides(layout), *_expert_overrides(layout), *head_rule)
    if layout.overridden and not overrides:
        overrides = (_NOT_PIPELINED,)
    return Offload(
        gpu_layers=len(sequence),
        split=counts if len(layout.devices) > 1 and sequence else (),
        overrides=overrides,
    )


def _check(layout: Layout, trunk: list[int | None]) -> None:
    places = [*trunk, layout.head, *(place.experts for place in layout.layers), *(place for _, place in layout.moved)]
    if any(place is not HOST and not 0 <= place < len(layout.devices) for place in places):
        raise UsageError("the layout names a device that it does not list", code="layout-not-expressible")
    ranks = [_rank(place) for place in trunk]
    for index, (before, after) in enumerate(pairwise(ranks)):
        if after < before:
            raise UsageError(
                f"llama.cpp cannot place layer {index + 1}'s trunk before that of layer {index}",
                code="layout-not-expressible",
                cause="it fills the host first and then each device in order",
                hint="make the plan again with: kimigguf plan",
            )


def _moved_overrides(layout: Layout) -> tuple[Override, ...]:
    """One rule per place that holds single tensors apart from their part, naming each exactly."""
    ordered = sorted(layout.moved, key=lambda item: _rank(item[1]))
    return tuple(
        Override(pattern=f"^({'|'.join(re.escape(name) for name, _ in group)})$", device=device)
        for device, group in groupby(ordered, key=lambda item: item[1])
    )


def _rank(place: int | None) -> int:
    """Orders places, the host first."""
    return -1 if place is HOST else place


def _expert_overrides(layout: Layout) -> tuple[Override, ...]:
    """One rule per place that holds experts apart from their trunk; the layers are named unless it is all of them."""
    apart = [(place.experts, index) for index, place in enumerate(layout.layers) if place.experts != place.trunk]
    ordered = sorted(apart, key=lambda item: (_rank(item[0]), item[1]))
    rules = []
    for device, group in groupby(ordered, key=lambda item: item[0]):
        indices = [index for _, index in group]
        everything = len(indices) == len(layout.layers)
        layers = "" if everything else rf"^blk\.({'|'.join(map(str, indices))})"
        rules.append(Override(pattern=layers + _EXPERTS, device=device))
    return tuple(rules)
