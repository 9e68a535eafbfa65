"""``kimigguf memory``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, machine_option
from kimigguf.cli.show import output_options
from kimigguf.errors import MachineError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kimigguf.cli.plan_target import Target
    from kimigguf.memory.flags import Parsed
    from kimigguf.memory.ledger import Column, Ledger, Row

SCHEMA: Final = "kimigguf.memory/1"
_BESIDE: Final[Mapping[str, str]] = {
    "CHECKPOINTS": "checkpoints_bytes",
    "PROMPT_CACHE": "prompt_cache_bytes",
    "REPACKED": "repacked_bytes",
    "GPU_CONTEXT": "gpu_context_bytes",
    "PROJECTOR": "projector_bytes",
}
"""What the engine's report leaves out, under the names of the JSON answer."""


@click.command("memory", short_help="Show the memory ledger of any llama-server command line.")
@click.argument("model", metavar="QUANT|PATH|FOLDER")
@click.argument("flags", metavar="[-- LLAMA_SERVER_FLAGS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpus", type=click.IntRange(0, 64), help="So many equal GPUs, in place of a machine's.")
@machine_option
@click.option("--models-dir", type=click.Path(path_type=Path, file_okay=False), help="Where downloaded quants lie.")
@click.option("--hub", "ask_hub", is_flag=True, help="Read the real headers from the hub (under 10 MB) if need be.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    model: str,
    flags: tuple[str, ...],
    gpus: int | None,
    machine: str | None,
    models_dir: Path | None,
    ask_hub: bool,
) -> None:
    """Show what a llama-server command line takes, per device, before a byte of weights is loaded.

    The first three columns are what the engine's own report (llama-fit-params -fitp on) would say. Beside them stands
    what it leaves out: context checkpoints, the prompt cache, repacked weights, the vision projector and what a driver
    takes on each GPU. Flags that say nothing about memory are listed as ignored; one that
    llama-server (build 11434) does not have is an error.

    \b
    Examples:
      kimigguf memory UD-IQ1_S --gpus 2 -- -c 131072 -ngl 99 -ot exps=CPU -fit off
      kimigguf memory ./Kimi-K3 --machine box.toml --json -- -c 32768 -cmoe
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from dataclasses import replace

    from kimigguf.cli.plan_target import resolve
    from kimigguf.memory.flags import parse
    from kimigguf.memory.ledger import ledger

    if gpus is not None and machine is not None:
        raise UsageError("--gpus and --machine both say which GPUs there are", code="two-machines", hint="give one")
    with app.show.progress() as listen:
        target = resolve(app, model, models_dir=models_dir, ask_hub=ask_hub, listen=listen)
    devices, free, note = (gpus, (), None) if gpus is not None else _devices(app, machine)
    # Unnamed GPUs are counted as the engine's report counts its RPC stand-ins; a machine's own also take over work.
    parsed = parse(flags, target.spec, devices=devices, weights=free, takes_over=gpus is None)
    parsed = replace(parsed, notes=(*parsed.notes, note)) if note else parsed
    settings = replace(parsed.settings, projector_bytes=_projector_bytes(parsed.projector))
    counted = ledger(target.spec, settings, parsed.layout)
    app.show.answer(_record(target, parsed, counted), lambda console: _draw(console, target, parsed, counted))


def _devices(app: App, machine: str | None) -> tuple[int, tuple[int, ...], str | None]:
    """How many accelerators there are, the free bytes of each where all are known, and a note on their order."""
    from dataclasses import replace

    from kimigguf.engines.choose import choose
    from kimigguf.engines.sight import seen_by

    chosen, note = chosen_machine(app, machine), None
    if chosen.is_this_one and len(chosen.accelerators or ()) > 1:
        # Flags name devices by the engine's numbers, and CUDA's are not the driver's.
        try:
            seen = seen_by(chosen, choose(app.environ))
        except MachineError:
            seen = replace(chosen, accelerators=())
        if len(seen.accelerators or ()) == len(chosen.accelerators or ()):
            chosen = seen
        else:
            note = "GPUs are in their driver's order: no engine found here sees all of them and tells its own"
    accelerators = chosen.accelerators or ()
    free = [a.free_bytes if a.free_bytes is not None else a.total_bytes for a in accelerators]
    known = tuple(size for size in free if size is not None) if None not in free else ()
    return len(accelerators), known, note


def _projector_bytes(path: str | None) -> int:
    if path is None:
        return 0
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read the projector {path}", code="no-such-file", cause=error.strerror) from error


def _known(counted: "Ledger", device: int | None, column: "Column") -> int | None:
    """The sum of a column on one device; None if a row of it is unknown."""
    if any(row.device == device and row.column is column for row in counted.unknown):
        return None
    return counted.total_bytes(device, column=column)


def _places(counted: "Ledger") -> list[tuple[str, int | None]]:
    return [*((name, index) for index, name in enumerate(counted.devices)), ("host", None)]


def _record(target: "Target", parsed: "Parsed", counted: "Ledger") -> dict[str, Any]:
    from kimigguf.memory.ledger import Column, Component

    def beside(component: Component) -> int | None:
        sizes = [row.size_bytes for row in counted.rows if row.component is component]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    settings = parsed.settings
    return {
        "schema": SCHEMA,
        "model": target.model.quant or target.model.folder,
        "architecture": target.spec.architecture,
        "source": target.source,
        "settings": {
            "context_tokens": settings.context_tokens,
            "slots": settings.slots,
            "tokens_per_slot": settings.stream_tokens,
            "batch_tokens": settings.batch_tokens,
            "ubatch_tokens": settings.ubatch_tokens,
            "kv_type": str(settings.kv_type),
            "flash_attention": settings.flash_attention,
            "offload_operations": settings.offload_operations,
        },
        "devices": [
            {
                "name": name,
                "model_bytes": _known(counted, device, Column.MODEL),
                "context_bytes": _known(counted, device, Column.CONTEXT),
                "compute_bytes": _known(counted, device, Column.COMPUTE),
            }
            for name, device in _places(counted)
        ],
        "beside_the_engine": {key: beside(Component[name]) for name, key in _BESIDE.items()},
        "total_bytes": sum(counted.total_bytes(device) for _, device in _places(counted)),
        "total_is_lower_bound": bool(counted.unknown),
        "rows": [_row(row, counted) for row in counted.rows],
        "ignored_flags": list(parsed.ignored),
        "notes": list(parsed.notes),
    }


def _row(row: "Row", counted: "Ledger") -> dict[str, Any]:
    return {
        "component": str(row.component),
        "device": "host" if row.device is None else counted.devices[row.device],
        "size_bytes": row.size_bytes,
        "source": str(row.source),
        "column": str(row.column),
        "note": row.note,
    }


def _draw(console: "Console", target: "Target", parsed: "Parsed", counted: "Ledger") -> None:
    from kimigguf.units import memory

    settings = parsed.settings
    console.print(
        f"{target.model.quant or target.model.folder}: {settings.context_tokens:,} tokens,"
        f" {settings.slots} slot{'s' if settings.slots > 1 else ''}, {settings.kv_type} cache, flash attention"
        f" {'on' if settings.flash_attention else 'off'}; from {target.source}",
        markup=False,
    )
    console.print(_columns(counted))
    console.print(_rows(counted))
    total = sum(counted.total_bytes(device) for _, device in _places(counted))
    console.print(f"in all {'at least ' if counted.unknown else ''}{memory(total)}")
    for note in parsed.notes:
        console.print(f"note: {note}", markup=False)
    if parsed.ignored:
        console.print(f"ignored, says nothing about memory: {', '.join(parsed.ignored)}", markup=False)


def _columns(counted: "Ledger") -> "Table":
    """The engine's report and, behind it, what it leaves out: a line per device."""
    from rich import box
    from rich.table import Table

    from kimigguf.memory.ledger import Column
    from kimigguf.units import memory

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in Column:
        table.add_column(str(column), justify="right")
    for name, device in _places(counted):
        table.add_row(name, *(memory(_known(counted, device, column)) for column in Column))
    return table


def _rows(counted: "Ledger") -> "Table":
    from rich import box
    from rich.table import Table

    from kimigguf.units import memory

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("where", "what", "size", "known from", "note"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for name, device in _places(counted):
        for row in counted.rows:
            if row.device == device:
                table.add_row(name, str(row.component), memory(row.size_bytes), str(row.source), row.note or "")
    return table
