"""Which device each tensor gets: llama.cpp's own rules for ``-ngl``, ``-ts``, ``--device`` and ``-ot``."""

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kimigguf.errors import UsageError
from kimigguf.memory.layout import HOST, Layout
from kimigguf.memory.model import ModelSpec, Part

_DEVICE: Final = re.compile(r"[A-Za-z]+(\d+)(?:\[([^\]]*)\])?")
"""A device's or its memory's name: ``CUDA0``, or ``RPC0[127.0.0.1:50052]``, where the address tells servers apart."""


def chosen(text: str, devices: int) -> list[int]:
    """The devices that ``--device`` names, of so many.

    Raises:
        UsageError: ``bad-flag`` for one that is not there.
    """
    numbers = []
    for name in text.split(",") if text != "none" else ():
        match = _DEVICE.fullmatch(name)
        if match is None or int(match[1]) >= devices:
            raise UsageError(f"--device {name!r}: there are {devices} devices", code="bad-flag")
        numbers.append(int(match[1]))
    return numbers


def _single(value: float) -> float:
    """Rounded to 32 bits, as llama.cpp's split points are."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def deal(
    layers: int, devices: int, free: Sequence[int], *, gpu_layers: int, shares: Sequence[float]
) -> list[int | None]:
    """The device of every layer and, last, of the head (``llama_model_base::load_tensors``).

    The last ``gpu_layers`` (negative: all) of layers and head go to devices, in contiguous runs in proportion to the
    ``shares``, or to the ``free`` bytes where those are all zero.
    """
    wanted = layers + 1 if gpu_layers < 0 else gpu_layers
    first, count = max(layers + 1 - wanted, 0), min(wanted, layers + 1)
    if not devices or count == 0:
        return [HOST] * (layers + 1)
    split = [*shares[:devices], *[0.0] * (devices - len(shares))]
    if not any(split):
        split = [float(size) for size in free] if any(free) else [1.0] * devices
    total, sums = 0.0, []
    for share in split:
        total = _single(total + _single(share))
        sums.append(total)
    points = [_single(part / total) for part in sums]
    places: list[int | None] = [HOST] * first
    for index in range(layers + 1 - first):
        position = _single(index / count)
        places.append(next((i for i, point in enumerate(points) if point > position), devices - 1))
    return places


def overridden(layout: Layout, spec: ModelSpec, overrides: Sequence[tuple[str, str]], servers: Sequence[str]) -> Layout:
    """The layout after ``-ot`` and its kin: for each tensor the first pattern that is found in its name decides."""
    rules = [(re.compile(pattern), _target(target, layout.devices, servers)) for pattern, target in overrides]
    moved: dict[str, int | None] = {}
    for weight in spec.weights:
        for pattern, device in rules:
            if pattern.search(weight.name):
                moved[weight.name] = device
                break
    places = list(layout.layers)
    groups: dict[int, list[str]] = {}
    for weight in spec.weights:
        if weight.part is Part.EXPERTS and weight.layer is not None:
            groups.setdefault(weight.layer, []).append(weight.name)
    for layer, names in groups.items():
        targets = {moved.get(name, places[layer].trunk) for name in names}
        if len(targets) == 1:  # all experts of the layer go together: that is what a layer's place can say
            places[layer] = replace(places[layer], experts=targets.pop())
            for name in names:
                moved.pop(name, None)
    usual = {
        weight.name: places[weight.layer].trunk
        if weight.layer is not None
        else (layout.head if weight.part is Part.HEAD else HOST)
        for weight in spec.weights
        if weight.part is not Part.EXPERTS
    }
    rest = {name: device for name, device in moved.items() if name not in usual or usual[name] != device}
    return replace(layout, layers=tuple(places), moved=tuple(rest.items()))


def _target(name: str, devices: Sequence[str], servers: Sequence[str]) -> int | None:
    if name.upper() in {"CPU", "CPU_REPACK"} or name.endswith("_Host"):
        return HOST
    match = _DEVICE.fullmatch(name)
    number = -1 if match is None else servers.index(match[2]) if match[2] in servers else int(match[1])
    if f"gpu{number}" not in devices:
        raise UsageError(
            f"-ot names the buffer type {name!r}, but there are {len(devices)} devices",
            code="bad-flag",
            hint="use CPU, or a device's name and number such as CUDA0; --gpus says how many there are",
        )
    return list(devices).index(f"gpu{number}")
