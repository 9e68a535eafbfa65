"""What llama.cpp's own --fit makes of K3 on stand-in devices, to hold kimigguf's placements against."""

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rpc_devices import RpcDevices

from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind, Ram
from kimigguf.memory.ledger import Component, Ledger
from kimigguf.memory.model import ModelSpec, Part
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import GPU_CONTEXT_BYTES
from kimigguf.placement.plan import Plan
from kimigguf.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a placement leaves: expert bytes on devices, trunks in RAM, and what one token reads from RAM, in bytes.

    A token reads all of a trunk and ``expert_used_count`` of ``expert_count`` experts (16 of 896 in K3).
    """

    expert_bytes: int
    host_trunks: int
    ram_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """llama.cpp's answer: what it keeps, the targets in bytes that it filled its devices to, and its seconds."""

    kept: Kept
    targets_bytes: tuple[int, ...]
    seconds: float


def stand_in_machine(usable_bytes: Sequence[int]) -> Machine:
    """A machine of ample RAM whose accelerators have so much left after their driver's context."""
    accelerators = tuple(
        Accelerator(name="stand-in", memory_kind=MemoryKind.DISCRETE, total_bytes=size + GPU_CONTEXT_BYTES)
        for size in usable_bytes
    )
    return Machine(name="bench", source="bench", ram=Ram(total_bytes=4096 * GIB), accelerators=accelerators)


def kept_by_plan(plan: Plan, spec: ModelSpec) -> Kept:
    """What kimigguf's placement keeps, from its ledger."""
    trunks = sum(place.trunk is None for place in plan.layout.layers)
    on_devices = sum(size for device, size in _experts(plan.ledger) if device is not None)
    return _kept(spec, on_devices, trunks)


def fit(devices: RpcDevices, first: Path, spec: ModelSpec, sizes_gib: tuple[int, ...], wanted: Settings) -> Fit:
    """Let llama.cpp fit, with a margin per device that plays a GPU with ``sizes_gib`` usable, be it negative.

    Raises:
        RuntimeError: it gave up.
    """
    # An RPC server reports the host's memory; the first run tells how much that is.
    names = ",".join(f"RPC{index}" for index in range(len(sizes_gib)))
    listing = subprocess.run(
        [devices.folder / "llama-fit-params", "--rpc", devices.addresses(len(sizes_gib)), "--list-devices"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    free = [int(mib) for mib in re.findall(r"RPC\d+: .*?, (\d+) MiB free\)", listing.stdout + listing.stderr)]
    margins = ",".join(str(have - size * 1024) for have, size in zip(free, sizes_gib, strict=True))
    argv: list[str | Path] = [
        devices.folder / "llama-fit-params", "--rpc", devices.addresses(len(sizes_gib)), "--device", names, "-m", first,
        "-c", str(wanted.context_tokens), "-np", str(wanted.slots), "-b", str(wanted.batch_tokens),
        "-ub", str(wanted.ubatch_tokens), "-ctk", wanted.kv_type, "-ctv", wanted.kv_type, "-fa", "on", "--no-repack",
        "--fit-target", margins, "-lv", "5",
    ]  # fmt: skip
    start = time.monotonic()
    # The log goes to a file: at this level it is long, and only the targets are wanted.
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        seconds = time.monotonic() - start
        log.seek(0)
        targets = dict(re.findall(r"id=(\d+), target=\s*(-?\d+) MiB", log.read()))
    if done.returncode != 0 or "-ngl" not in done.stdout:
        raise RuntimeError(f"llama-fit-params gave up: {done.stdout[-300:]}")
    filled = (int(targets[str(index)]) * MIB if targets else sizes_gib[index] * GIB for index in range(len(sizes_gib)))
    return Fit(kept=kept_by_arguments(done.stdout, spec), targets_bytes=tuple(filled), seconds=seconds)


def kept_by_arguments(printed: str, spec: ModelSpec) -> Kept:
    """What llama.cpp keeps under the arguments that it printed: the last layers, less what its rules move."""
    first = _first_on_device(printed, spec)
    rules = re.search(r'-ot "([^"]*)"', printed)
    patterns = [rule.rpartition("=") for rule in rules[1].split(",")] if rules else []
    compiled = [(re.compile(pattern), place) for pattern, _, place in patterns]
    on_devices = 0
    for weight in spec.weights:
        if weight.part is Part.EXPERTS and weight.layer is not None:
            place = next((place for pattern, place in compiled if pattern.search(weight.name)), None)
            is_on_device = weight.layer >= first if place is None else place != "CPU"
            on_devices += weight.size_bytes if is_on_device else 0
    return _kept(spec, on_devices, first)


def _first_on_device(printed: str, spec: ModelSpec) -> int:
    match = re.search(r"-ngl (-?\d+)", printed)
    layers = int(match[1]) if match else 0
    return 0 if layers < 0 else max(0, len(spec.layers) + 1 - layers)


def _kept(spec: ModelSpec, expert_bytes: int, host_trunks: int) -> Kept:
    """Both sides leave the first layers' trunks in RAM, if any: llama.cpp knows no other order."""
    trunks = sum(layer.trunk_bytes for layer in spec.layers[:host_trunks])
    experts = sum(layer.expert_bytes for layer in spec.layers) - expert_bytes
    used, count = (spec.metadata[f"{spec.architecture}.expert_{key}"] for key in ("used_count", "count"))
    if not isinstance(used, int) or not isinstance(count, int):
        raise TypeError(f"{spec.architecture} names no number of experts")
    return Kept(
        expert_bytes=expert_bytes, host_trunks=host_trunks, ram_bytes_per_token=trunks + experts * used // count
    )


def _experts(counted: Ledger) -> list[tuple[int | None, int]]:
    return [(row.device, row.size_bytes or 0) for row in counted.rows if row.component is Component.EXPERTS]
