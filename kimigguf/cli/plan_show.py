"""How ``kimigguf plan`` shows a plan: as JSON, as bars and a ledger, and in words for a colleague."""

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kimigguf.cli import measured_show
from kimigguf.units import GIB, memory, storage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kimigguf.cli.plan import Answer, Refusal
    from kimigguf.engines.command import Command
    from kimigguf.engines.report import Columns, Comparison
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.memory.ledger import Row

_BAR_WIDTH: Final = 26
_WIDE: Final = 100
"""GiB from which one decimal is enough."""


def record(answer: "Answer") -> dict[str, Any]:
    """The plan file, with the command line and the comparison beside it; a replay reads the plan alone."""
    from kimigguf.placement.plan_file import plan_record

    data = plan_record(answer.plan)
    data["facts_from"] = answer.target.source
    data["warnings"] = list(answer.warnings)
    data["command"] = _command_record(answer)
    data["measured"] = [measured_show.record(told) for runs in answer.measured.values() for told in runs]
    if answer.comparison is not None:
        data["verification"] = _comparison_record(answer.comparison)
    return data


def _command_record(answer: "Answer") -> dict[str, Any] | None:
    if answer.command is None:
        return None
    engine = answer.engine
    return {
        "engine": engine.kind.value,
        "engine_version": engine.version,
        "argv": list(answer.command.argv),
        # A file that argv reads: this answer, once it is written there.
        "plan_file": "plan.json" if "--plan" in answer.command.argv else None,
        "left_out": list(answer.command.left_out),
    }


def _comparison_record(comparison: "Comparison") -> dict[str, Any]:
    def columns(side: "Columns") -> dict[str, int]:
        return {
            "model_bytes": side.model_bytes,
            "context_bytes": side.context_bytes,
            "compute_bytes": side.compute_bytes,
        }

    return {
        "agrees": comparison.agrees,
        "reason": comparison.why_unknown if comparison.agrees is None else None,
        "argv": list(comparison.argv),
        "devices": [
            {
                "name": device.name,
                "engine_name": device.engine_name,
                "agrees": device.agrees,
                "ledger": columns(device.ledger),
                "engine": columns(device.engine),
            }
            for device in comparison.devices
        ],
    }


def refusal_record(refusal: "Refusal") -> dict[str, Any]:
    """A plan that cannot be: what is missing, and the ways out."""
    shortfall = refusal.shortfall
    return {
        "schema": "kimigguf.shortfall/1",
        "quant": refusal.target.model.quant,
        "machine": refusal.machine.name,
        "need_bytes": shortfall.need_bytes,
        "have_bytes": shortfall.have_bytes,
        "missing_bytes": shortfall.missing_bytes,
        "resident_bytes": shortfall.resident_bytes,
        "reason": shortfall.reason,
        "gave_way": list(shortfall.gave_way),
        "ways_out": list(_ways_out(refusal)),
        "warnings": list(refusal.warnings),
    }


def draw_refusal(console: "Console", refusal: "Refusal") -> None:
    """Say that it does not fit, by how much, and what would help."""
    model = refusal.target.model
    name = model.quant or model.folder or model.architecture
    console.print(f"{name} does not fit {_where(refusal.machine)}", style="bold red", markup=False)
    console.print(f"  {refusal.shortfall.reason}", markup=False)
    for words in refusal.shortfall.gave_way:
        console.print(f"  even with {words}", markup=False)
    for words in refusal.warnings:
        console.print(f"note: {words}", style="yellow", markup=False)
    for way in _ways_out(refusal):
        console.print(f"  - {way}", markup=False)


def _where(machine: "Machine") -> str:
    """A machine's name in a sentence; a what-if's begins with that of the machine it changes."""
    from kimigguf.hardware.snapshot import THIS_MACHINE

    rest = machine.name.removeprefix(THIS_MACHINE)
    return machine.name if rest == machine.name else f"this machine{rest}"


def _ways_out(refusal: "Refusal") -> Iterator[str]:
    shortfall = refusal.shortfall
    yield f"{memory(shortfall.missing_bytes)} more RAM would hold it"
    if shortfall.resident_bytes <= shortfall.have_bytes:
        yield "on a local NVMe with room for the files it could stream its experts from there: it answers, slowly"
    yield f"{refusal.compare} compares all quants with it"


def draw(console: "Console", answer: "Answer", *, explain: bool, verbose: bool) -> None:
    """Bars, ledger, placement in a line, what gave way, the command line; words and sources on request."""
    from rich.text import Text

    plan, settings = answer.plan, answer.plan.settings
    name = plan.model.quant or plan.model.folder or plan.model.architecture
    console.print(
        Text.assemble(
            (name, "bold"),
            f" on {_where(answer.machine)}: context {settings.context_tokens:,}, slots {settings.slots},"
            f" KV {settings.kv_type}, ubatch {settings.ubatch_tokens}",
        )
    )
    console.print(f"from {answer.target.source}", style="dim", markup=False)
    for bar in _bars(answer):
        console.print(bar)
    console.print(_ledger_table(answer, console))
    for words in (*_ram_lines(answer), *_beside_lines(answer), _placement_line(answer)):
        console.print(words, markup=False)
    for words in plan.gave_way:
        console.print(f"gave way: {words}", style="yellow", markup=False)
    for words in (*plan.notices, *answer.warnings):
        console.print(f"note: {words}", style="yellow", markup=False)
    measured_show.draw(console, answer.measured)
    if answer.comparison is not None:
        _draw_comparison(console, answer.comparison)
    if explain:
        from kimigguf.cli.plan_explain import explanation

        for paragraph in explanation(answer):
            console.print()
            console.print(paragraph, markup=False)
    if verbose:
        _draw_sources(console, answer)
    if answer.command is not None:
        _draw_command(console, answer.command, answer.replay)


def _bars(answer: "Answer") -> Iterator["Text"]:
    from kimigguf.memory.layout import HOST
    from kimigguf.placement.placed import device_need_bytes

    plan, have = answer.plan, answer.have
    used_of = dict.fromkeys(range(len(have.devices)), 0)
    for index in range(len(plan.layout.devices)):
        used_of[index] = device_need_bytes(plan.ledger, index)
    shared = 0
    for index, device in enumerate(have.devices):
        used = used_of[index]
        shared += used if device.unified else 0
        yield _bar(device.name, used, device.usable_bytes, device.total_bytes)
    in_ram = plan.ledger.total_bytes(HOST) - plan.streamed_bytes + shared
    yield _bar("RAM", in_ram, have.ram_bytes, have.ram_total_bytes)


def _bar(name: str, used: int, usable: int | None, total: int | None) -> "Text":
    """One line: used, free, and what is kept back, to scale."""
    from rich.text import Text

    if usable is None:
        return Text(f"{name:<5} memory unknown; {memory(used)} planned")
    total = max(total or usable, usable, 1)
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * used / total))
    kept = min(_BAR_WIDTH - filled, round(_BAR_WIDTH * (total - usable) / total))
    return Text.assemble(
        f"{name:<5} ",
        ("█" * filled, "cyan"),
        ("░" * (_BAR_WIDTH - filled - kept), "dim"),
        ("▒" * kept, "yellow"),
        f" {used / GIB:,.1f} used, {(usable - used) / GIB:,.1f} free, {(total - usable) / GIB:,.1f} reserve GiB",
    )


def _ledger_table(answer: "Answer", console: "Console") -> "Table":
    """A row per place, a column per kind of memory that anything takes, in GiB.

    A driver's context is not among them: the budget keeps it back, so that a total is what the bar calls used.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    from kimigguf.memory.ledger import Column, Component

    ledger = answer.plan.ledger
    kinds = {
        Component.EMBEDDING: "embed",
        Component.HEAD: "head",
        Component.TRUNK: "trunk",
        Component.EXPERTS: "experts",
        Component.KV_CACHE: "KV",
        Component.RECURRENT_STATE: "state",
        Component.COMPUTE: "compute",
    }
    counted = [row for row in ledger.rows if row.component is not Component.GPU_CONTEXT]
    columns: dict[str, list[Row]] = {
        name: [row for row in counted if row.component is kind] for kind, name in kinds.items()
    }
    columns["beside"] = [row for row in counted if row.column is Column.BESIDE]
    columns = {name: rows for name, rows in columns.items() if any(row.size_bytes != 0 for row in rows)}
    columns["total"] = counted

    def cell(rows: "list[Row]", device: int | None) -> str:
        here = [row for row in rows if row.device == device]
        size = sum(row.size_bytes or 0 for row in here) / GIB
        mark = "?" if any(row.size_bytes is None for row in here) else ""
        return "" if not here else f"{size:,.{1 if size >= _WIDE else 2}f}{mark}"

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("GiB", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    places: list[tuple[str, int | None]] = [
        *((name, index) for index, name in enumerate(ledger.devices)),
        ("host", None),
    ]
    for name, device in places:
        table.add_row(name, *(cell(rows, device) for rows in columns.values()))
    unlimited = console.options.update(max_width=1000)
    if Measurement.get(console, unlimited, table).maximum > console.width:
        table.padding = 0
    return table


def _ram_lines(answer: "Answer") -> Iterator[str]:
    """Why the bars and the table differ: memory that is shared, kept back or left on disk."""
    from kimigguf.memory.layout import HOST
    from kimigguf.memory.ledger import Component
    from kimigguf.placement.placed import device_need_bytes

    plan = answer.plan
    alone = host = f"RAM used: the host's {plan.ledger.total_bytes(HOST) / GIB:,.1f}"
    for index, device in enumerate(answer.have.devices):
        if device.unified and (taken := device_need_bytes(plan.ledger, index)):
            host += f", and the {taken / GIB:,.1f} of {device.name}, which works in it"
    if plan.streamed_bytes:
        host += f", less {plan.streamed_bytes / GIB:,.1f} of experts that stay on disk"
    if host != alone:
        yield host
    if any(row.component is Component.GPU_CONTEXT for row in plan.ledger.rows):
        yield "a driver's context on a GPU is part of the reserve"


def _beside_lines(answer: "Answer") -> Iterator[str]:
    """What the engine's own accounting leaves out, by name."""
    from kimigguf.memory.ledger import Column

    rows = [row for row in answer.plan.ledger.rows if row.column is Column.BESIDE and row.device is None]
    parts = ", ".join(f"{row.component} {memory(row.size_bytes)}" for row in rows)
    if parts:
        yield f"beside the engine's own accounting: {parts}"


def _placement_line(answer: "Answer") -> str:
    from kimigguf.memory.model import Part

    layout = answer.plan.layout
    if not layout.devices or (all(place.trunk is None for place in layout.layers) and layout.head is None):
        return f"all {len(layout.layers)} layers in RAM"
    parts = []
    on_host = sum(place.trunk is None for place in layout.layers)
    if on_host:
        parts.append(f"RAM: layers 0-{on_host - 1}")
    for index, name in enumerate(layout.devices):
        run = [number for number, place in enumerate(layout.layers) if place.trunk == index]
        if run:
            held = {weight.layer for weight in answer.target.spec.weights if weight.part is Part.EXPERTS}
            experts = sum(place.experts == index for number, place in enumerate(layout.layers) if number in held)
            parts.append(f"{name}: layers {run[0]}-{run[-1]}, experts of {experts}")
    for where, count in sorted(Counter(device for _, device in layout.moved).items(), key=str):
        parts.append(f"{count} single expert tensor(s) {'in RAM' if where is None else f'on {layout.devices[where]}'}")
    return "; ".join(parts)


def _draw_comparison(console: "Console", comparison: "Comparison") -> None:
    from rich import box
    from rich.table import Table

    from kimigguf.engines.report import TOLERANCE_FLOOR_BYTES, TOLERANCE_PERCENT

    unknown = f"verification: unknown, because {comparison.why_unknown}" if comparison.agrees is None else None
    if not comparison.devices:
        console.print(unknown, style="yellow", markup=False)
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), title="MiB: ledger / engine", title_justify="left"
    )
    for head in ("", "model", "context", "compute", "total", "difference", ""):
        table.add_column(head, justify="left" if head.startswith("MiB") else "right")
    for device in comparison.devices:
        ours, theirs = device.ledger, device.engine
        pairs = (
            (ours.model_bytes, theirs.model_bytes),
            (ours.context_bytes, theirs.context_bytes),
            (ours.compute_bytes, theirs.compute_bytes),
            (ours.total_bytes, theirs.total_bytes),
        )
        share = 100 * device.difference_bytes / theirs.total_bytes if theirs.total_bytes else 0.0
        table.add_row(
            f"{device.name} ({device.engine_name})",
            *(f"{ours_bytes / 2**20:,.0f} / {theirs_bytes / 2**20:,.0f}" for ours_bytes, theirs_bytes in pairs),
            f"{share:+.2f} %",
            {True: "agrees", False: "DIFFERS", None: "unknown"}[device.agrees],
        )
    console.print(table)
    if unknown is not None:
        console.print(unknown, style="yellow", markup=False)
        return
    style = "green" if comparison.agrees else "bold red"
    within = f"{TOLERANCE_PERCENT} % or {memory(TOLERANCE_FLOOR_BYTES)}, whichever is more"
    words = "agrees with the engine, within" if comparison.agrees else "differs from the engine by over"
    console.print(f"verification: {words} {within}", style=style)


def _draw_sources(console: "Console", answer: "Answer") -> None:
    console.print("\nWhat may be used:", style="bold")
    for line in answer.have.lines:
        console.print(f"  {line.what}: {memory(line.size_bytes)}  ({line.reason})", markup=False)
    console.print("\nWhere the numbers come from:", style="bold")
    ledger = answer.plan.ledger
    for row in ledger.rows:
        place = "host" if row.device is None else ledger.devices[row.device]
        note = f"; {row.note}" if row.note else ""
        text = f"  {place} {row.component}: {memory(row.size_bytes)}  ({row.source}; {row.column}{note})"
        console.print(text, markup=False)
    console.print(f"  weights in all: {storage(answer.target.spec.weight_bytes)}", markup=False)


def _draw_command(console: "Console", command: "Command", replay: str) -> None:
    """The command line, ready to paste: a flag and its value a line, never wrapped.

    An engine that reads the plan from a file has no line that works before there is one; kimigguf's own writes it.
    """
    console.print("\nThe command:", style="bold")
    if "--plan" in command.argv:
        console.print(replay.replace(" && ", " && \\\n  "), markup=False, soft_wrap=True)
        return
    lines: list[list[str]] = [[]]
    for word in command.argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    text = " \\\n  ".join(" ".join(line) for line in lines)
    console.print(text, markup=False, soft_wrap=True)
    for name in command.left_out:
        console.print(f"note: left out, because this engine does not know it: {name}", style="yellow", markup=False)
