"""Which server is measured: what it says of itself, and, where it runs here, its process, its log and its plan."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from kimigguf.engines.bench_client import BenchClient
from kimigguf.engines.command import is_loopback
from kimigguf.engines.endpoint import build_in
from kimigguf.engines.registry import Entry
from kimigguf.errors import UsageError
from kimigguf.gguf_file.names import ShardName
from kimigguf.memory.layout import Layout
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import load_plan
from kimigguf.speed.measured import MeasuredModel, MeasuredSettings

_ENGINE_WORD: Final = "llama"
"""In the name of every llama.cpp program. Another process on the port (ssh -L) forwards to who knows where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server as far as it is known. None is unknown.

    ``is_native``: it has llama-server's own endpoints, so that prompts can be counted in tokens. ``context_tokens`` is
    what one slot holds. ``pid`` is its engine on this machine, ``log`` what that writes; ``elsewhere`` is why it cannot
    be told to run on this machine, None if it does.
    """

    url: str
    model_name: str
    is_native: bool
    name: str | None = None
    context_tokens: int | None = None
    slots: int | None = None
    engine: str | None = None
    model: MeasuredModel
    settings: MeasuredSettings
    pid: int | None = None
    log: Path | None = None
    elsewhere: str | None = None


def look_at(client: BenchClient, entry: Entry | None, quants: Iterable[str]) -> Target:
    """Ask the server what it is; ``entry`` is what the registry knows of it, ``quants`` the names that files may carry.

    Raises:
        NetworkError, ServerError: As ``BenchClient`` has it; ``no-model`` for a server that lists none.
    """
    props, listed = _table(client.look("/props")), _table(client.look("/v1/models"))
    models = listed.get("data")
    first = _table(models[0]) if isinstance(models, list) and models else {}
    meta = _table(first.get("meta"))
    defaults = _table(props.get("default_generation_settings"))
    native = bool(defaults) and client.post("/tokenize", {"content": "a"}) is not None
    context = _count(defaults.get("n_ctx")) or _count(meta.get("n_ctx")) or _count(first.get("max_model_len"))
    plan = _plan_of(entry)
    pid, elsewhere = _process(client.root, entry)
    path = props.get("model_path")
    return Target(
        url=client.root,
        model_name=str(first.get("id") or props.get("model_alias") or "default"),
        is_native=native,
        name=entry.name if entry else None,
        context_tokens=context,
        slots=_count(props.get("total_slots")),
        engine=None if props.get("build_info") is None else f"llama.cpp {build_in(props) or '(build unknown)'}",
        model=_model(entry, plan, meta, path if isinstance(path, str) else None, quants),
        settings=_settings(plan, context, _count(props.get("total_slots"))),
        pid=pid,
        log=Path(entry.log) if entry else None,
        elsewhere=elsewhere,
    )


def _model(
    entry: Entry | None, plan: Plan | None, meta: Mapping[str, Any], path: str | None, quants: Iterable[str]
) -> MeasuredModel:
    files = sum(file.size_bytes for file in plan.model.files) if plan else 0
    return MeasuredModel(
        quant=(entry.quant if entry else None) or quant_in(path, quants),
        architecture=plan.model.architecture if plan else None,
        size_bytes=files or _count(meta.get("size")),
        parameters=_count(meta.get("n_params")),
    )


def quant_in(path: str | None, quants: Iterable[str]) -> str | None:
    """The quant that a file's name ends with: ``Kimi-K3-UD-IQ1_M-00001-of-00015.gguf``, or without a shard's number."""
    if path is None:
        return None
    name = PurePosixPath(path.replace("\\", "/")).name
    shard = ShardName.of(name)
    stem = shard.prefix if shard else name.removesuffix(".gguf")
    return next((quant for quant in quants if stem == quant or stem.endswith(f"-{quant}")), None)


def _settings(plan: Plan | None, context: int | None, slots: int | None) -> MeasuredSettings:
    if plan is None:
        return MeasuredSettings(context_tokens=context, slots=slots)
    return MeasuredSettings(
        context_tokens=context or plan.settings.context_tokens,
        slots=slots or plan.settings.slots,
        ubatch_tokens=plan.settings.effective_ubatch_tokens,
        kv_type=str(plan.settings.kv_type),
        placement=placement_in_words(plan.layout),
    )


def placement_in_words(layout: Layout) -> str:
    """How many layers' trunks and experts lie where: ``trunk: 93 gpu0; experts: 30 gpu0, 63 host``."""

    def told(places: Iterable[int | None]) -> str:
        names = ("host" if place is None else layout.devices[place] for place in places)
        return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))

    trunk, experts = ([getattr(layer, part) for layer in layout.layers] for part in ("trunk", "experts"))
    return f"trunk: {told(trunk)}; experts: {told(experts)}"


def _plan_of(entry: Entry | None) -> Plan | None:
    try:
        return load_plan(Path(entry.plan_file)) if entry else None
    except UsageError:  # gone or of another version: what it would tell stays unknown
        return None


def _process(url: str, entry: Entry | None) -> tuple[int | None, str | None]:
    """The engine's process here, or why there is none."""
    if entry is not None:
        return entry.engine.pid, None
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or ""):
        return None, "it is asked over a network"
    pid = _listener(parts.port or {"https": 443}.get(parts.scheme, 80))
    if pid is None:
        return None, "the process that listens there cannot be seen"
    try:
        process = psutil.Process(pid)
        names = [Path(word).name for word in (process.name(), *process.cmdline()[:1])]
    except psutil.Error:
        return None, "the process that listens there cannot be asked"
    if not any(_ENGINE_WORD in name.lower() for name in names):
        return None, f"{names[0]} listens there, which may forward to another machine"
    return pid, None


def _listener(port: int) -> int | None:
    try:
        found = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    here = (one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port)
    return next((pid for pid in here if pid is not None), None)


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
