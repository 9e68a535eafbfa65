"""What a running server says of itself, and what the system says of its process; unknown where neither does."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil

from kimigguf.engines.footprint import Baseline, Held, growth, planned, read_held, read_resident
from kimigguf.engines.llama_server import Address, get, read_slots
from kimigguf.engines.pressure import check_pressure
from kimigguf.engines.registry import Entry
from kimigguf.errors import UsageError
from kimigguf.hardware.pressure import read_pressure, read_processor_stall
from kimigguf.hardware.snapshot import Accelerator
from kimigguf.hardware.usage import accelerators_now
from kimigguf.memory.ledger import Component
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import load_plan

_SETTLE_SECONDS: Final = 2.0


def metrics(text: str) -> Mapping[str, float]:
    """The numbers of a Prometheus page by name, without ``llamacpp:``."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            with suppress(ValueError):
                found[name.partition(":")[2] or name] = float(value)
    return found


def baseline(address: Address, key: str | None, *, pid: int, log: Path) -> Baseline:
    """How a server stands that has just become ready."""
    numbers = _metrics(address, key)
    return Baseline(
        resident=read_resident(pid),
        held=_settled(log),
        prompt_tokens=_whole(numbers.get("prompt_tokens_total")) or 0,
        cached_tokens=_whole(numbers.get("prompt_tokens_cached_total")) or 0,
        generated_tokens=_whole(numbers.get("tokens_predicted_total")) or 0,
        prompt_seconds=numbers.get("prompt_seconds_total", 0.0),
        generated_seconds=numbers.get("tokens_predicted_seconds_total", 0.0),
    )


def _settled(log: Path) -> Held:
    """What the log says once it tells the end of the last request: it is answered before that line is written."""
    until = time.monotonic() + _SETTLE_SECONDS
    while (held := read_held(log)).requests != held.finished and time.monotonic() < until:
        time.sleep(0.02)
    return held


def observe(entry: Entry, key: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the server and its process say of themselves now; None for each thing that they do not.

    Counts begin when the server was ready: the self-test's requests and tokens are not the clients'.
    """
    engine = entry.engine.process()
    resident = None
    if engine is not None:
        with suppress(psutil.Error):
            resident = engine.memory_info().rss
    numbers = _metrics(entry.address, key)
    total, busy = read_slots(entry.address, key)
    was = entry.ready or Baseline(resident=None, held=Held(requests=0, finished=0))
    held = read_held(Path(entry.log))
    plan = _plan(entry)
    prompts = _since(_whole(numbers.get("prompt_tokens_total")), was.prompt_tokens)
    generated = _since(_whole(numbers.get("tokens_predicted_total")), was.generated_tokens)
    return {
        "resident_bytes": resident,
        "planned_bytes": entry.planned_bytes,
        "host_memory": _host_memory(entry, held, plan),
        "devices": []
        if plan is None
        else device_records(plan, accelerators_now(environ) if plan.ledger.devices else ()),
        "memory_pressure": _pressure(entry, plan),
        "processor_wait_percent": None
        if (wait := read_processor_stall(entry.engine.pid)) is None
        else wait.of_60_seconds,
        "slots": total,
        "slots_busy": busy,
        "requests": _since(held.requests, was.held.requests),
        "requests_finished": _since(held.finished, was.held.finished),
        "prompt_tokens": prompts,
        "prompt_tokens_cached": _since(_whole(numbers.get("prompt_tokens_cached_total")), was.cached_tokens),
        "generated_tokens": generated,
        # From the totals: llama-server's own averages begin anew each time that anybody reads them.
        "prompt_tokens_per_second": _rate(prompts, numbers.get("prompt_seconds_total"), was.prompt_seconds),
        "generated_tokens_per_second": _rate(
            generated, numbers.get("tokens_predicted_seconds_total"), was.generated_seconds
        ),
        "requests_waiting": _whole(numbers.get("requests_deferred")),
    }


def _metrics(address: Address, key: str | None) -> Mapping[str, float]:
    page = get(address, "/metrics", key=key, seconds=2.0)
    return metrics(page[1].decode(errors="replace")) if page and page[0] == 200 else {}  # noqa: PLR2004 -- HTTP


def _plan(entry: Entry) -> Plan | None:
    """The plan that the server runs; None where its file is gone or another version's."""
    try:
        return load_plan(Path(entry.plan_file))
    except UsageError:
        return None


def _host_memory(entry: Entry, held: Held, plan: Plan | None) -> dict[str, Any]:
    """The process's own memory, and what of its growth since it was ready is whose."""
    resident = read_resident(entry.engine.pid) if entry.engine.process() is not None else None
    added = growth(entry.ready, resident, held)
    return {
        "planned_bytes": plan.ledger.total_bytes(None) if plan else None,
        "anonymous_bytes": resident.anonymous_bytes if resident else None,
        "file_bytes": resident.file_bytes if resident else None,
        "swapped_bytes": resident.swapped_bytes if resident else None,
        "checkpoint_bytes": held.checkpoint_bytes,
        "checkpoint_planned_bytes": planned(plan.ledger, Component.CHECKPOINTS) if plan else None,
        "prompt_cache_bytes": held.prompt_cache_bytes,
        "prompt_cache_planned_bytes": planned(plan.ledger, Component.PROMPT_CACHE) if plan else None,
        "growth": asdict(added),
    }


def device_records(plan: Plan, found: tuple[Accelerator, ...] | None) -> list[dict[str, Any]]:
    """Each accelerator of the plan: what was planned on it, and what is in use on it now, by whomever.

    They are told apart by name, and those of one name by their order, which is the plan's too.
    """
    left = list(found or ())
    records = []
    for index, device in enumerate(plan.ledger.devices):
        name = plan.machine.device_names[index] if index < len(plan.machine.device_names) else None
        card = next((one for one in left if one.name == name), None)
        if card is not None:
            left.remove(card)
        records.append(
            {
                "device": device,
                "name": name,
                "planned_bytes": plan.ledger.total_bytes(index),
                "used_bytes": _since(card.total_bytes, card.free_bytes) if card else None,
                "total_bytes": card.total_bytes if card else None,
            }
        )
    return records


def _pressure(entry: Entry, plan: Plan | None) -> dict[str, Any]:
    check = check_pressure(read_pressure(entry.engine.pid), streamed_bytes=plan.streamed_bytes if plan else 0)
    return {"state": str(check.state), "evidence": check.evidence, "hint": check.hint}


def _since(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _rate(tokens: int | None, seconds: float | None, before: float) -> float | None:
    """Tokens per second of the time that was spent on them; None before there are any."""
    if not tokens or seconds is None or seconds <= before:
        return None
    return tokens / (seconds - before)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
