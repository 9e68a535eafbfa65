"""What an engine says that it took, read from its log after the load, to stand beside the plan's ledger."""

import re
from collections.abc import Sequence
from typing import Final

from kimigguf.engines.report import Columns, Comparison, compare
from kimigguf.placement.plan import Plan
from kimigguf.units import MIB

_HOST: Final = "Host"
_BUFFER: Final = re.compile(r"(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
"""Lines of llama.cpp's load_tensors, llama_kv_cache, llama_memory_recurrent, llama_context and sched_reserve, printed
at log level 4 (build 11434). RS is the recurrent state, KDA's."""


_HOST_BUFFER: Final = re.compile(r"(CPU|AMX|BLAS).*|.*_Host")
"""Buffers in main memory: plain, mapped, repacked, and those that a device's driver pinned."""


def devices_in(log: str) -> tuple[str, ...]:
    """The devices that the log's buffers lie on, in the order in which it names them."""
    names = (re.split(r"[\[ ]", name, maxsplit=1)[0] for name, _, _ in _BUFFER.findall(log))
    return tuple(dict.fromkeys(name for name in names if not _HOST_BUFFER.fullmatch(name)))


def parse_log(log: str, engine_names: Sequence[str]) -> dict[str, Columns] | None:
    """The buffers per device, every one that is none of ``engine_names`` on the host; None if the log shows none.

    Where a line stands more than once for a device, as for the files of a mapped model, they add up; compute buffers
    are printed at every reservation, of which the last one counts.
    """
    model: dict[str, float] = {}
    context: dict[str, float] = {}
    compute: dict[str, float] = {}
    for name, kind, mebibytes in _BUFFER.findall(log):
        device = _device(name, engine_names)
        if kind == "compute":
            compute[name] = float(mebibytes)
        else:
            column = model if kind == "model" else context if kind in {"KV", "RS"} else compute
            key = device if kind != "output" else f"{name} output"
            column[key] = float(mebibytes) + (column.get(key, 0.0) if kind != "output" else 0.0)
    if not model:
        return None
    return {
        device: Columns(
            model_bytes=round(model.get(device, 0.0) * MIB),
            context_bytes=round(context.get(device, 0.0) * MIB),
            compute_bytes=round(sum(v for k, v in compute.items() if _device(k, engine_names) == device) * MIB),
        )
        for device in (*engine_names, _HOST)
    }


def _device(buffer: str, engine_names: Sequence[str]) -> str:
    """The device a buffer lies on: ``CUDA0`` and ``RPC0[host:port]`` are devices, ``CUDA_Host`` is main memory."""
    name = re.split(r"[\[ ]", buffer, maxsplit=1)[0]
    return name if name in engine_names else _HOST


def compare_loaded(plan: Plan, log: str, engine_names: Sequence[str]) -> Comparison:
    """The plan's ledger beside what the engine reports; without devices, and why, where the log does not say."""
    report = parse_log(log, engine_names)
    if report is None:
        return Comparison(reason="the engine's log does not name its buffers")
    return compare(plan.ledger, report, engine_names)
