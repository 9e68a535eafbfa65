"""``kimigguf machine``: the machine files, shipped and a user's own."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, set_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError
from kimigguf.units import memory

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.hardware.snapshot import Machine

LIST_SCHEMA: Final = "kimigguf.machines/1"
SHOW_SCHEMA: Final = "kimigguf.machine/1"
_TELLS_NOTHING: Final = re.compile(
    r"\b(NVIDIA|GeForce|AMD|Generation|Edition|Blackwell|Workstation|Server|80GB)\b ?|-SXM4-80GB"
)
_SIZE_WIDTH: Final = len("1,024.0 GiB")
CHECK_SCHEMA: Final = "kimigguf.machine-check/1"


@click.group("machine", short_help="List, show and check machine files.")
def command() -> None:
    """List, show and check machine files: what `--machine` takes and `inspect --save` writes.

    A file is TOML. A key that is not there is unknown, an empty list means that there is none, sizes are bytes or
    text such as "768GiB", and an accelerator may carry a count. Your own go to profiles/machines in kimigguf's
    configuration folder, or into the folder that KIMIGGUF_PROFILES names.

    \b
    Examples:
      kimigguf machine list
      kimigguf machine show epyc-768g-rtx-pro-6000 --set ram=1536GiB
      kimigguf machine check box.toml
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped


def _own_bytes(machine: "Machine") -> int | None:
    """Memory of all discrete accelerators, None where one's is unknown."""
    from kimigguf.hardware.snapshot import MemoryKind

    if machine.accelerators is None:
        return None
    sizes = [card.total_bytes for card in machine.accelerators if card.memory_kind is not MemoryKind.UNIFIED]
    return None if None in sizes else sum(size for size in sizes if size is not None)


@command.command("list", short_help="List the named machines.")
@output_options
@click.pass_obj
def list_command(app: App) -> None:
    """List the named machines with what they have.

    \b
    Example:
      kimigguf machine list --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.hardware.machines import load_machine, machine_names

    machines: list[Machine] = []
    problems: list[str] = []
    for name in machine_names(app.environ):
        try:
            machines.append(load_machine(name, app.environ))
        except UsageError as error:
            problems.append(f"{error.message}: {error.cause}" if error.cause else error.message)
    entries = [
        {
            "name": machine.name,
            "ram_bytes": machine.ram.total_bytes,
            "vram_bytes": _own_bytes(machine),
            "unified": machine.is_unified,
            "note": machine.note,
            "source": machine.source,
        }
        for machine in machines
    ]
    for problem in problems:
        app.show.note(problem)
    data = {"schema": LIST_SCHEMA, "machines": entries, "problems": problems}
    app.show.answer(data, lambda console: _draw_list(console, machines))


def _draw_list(console: "Console", machines: "list[Machine]") -> None:
    from rich.table import Table
    from rich.text import Text

    names = max((len(machine.name) for machine in machines), default=0)
    room = console.width - names - 2 * _SIZE_WIDTH - 3 * 2
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Machine", no_wrap=True, min_width=names)
    table.add_column("RAM", justify="right", no_wrap=True, min_width=_SIZE_WIDTH)
    table.add_column("VRAM", justify="right", no_wrap=True, min_width=_SIZE_WIDTH)
    table.add_column("GPU", no_wrap=True)
    for machine in machines:
        own = "shared" if machine.is_unified else memory(_own_bytes(machine)) if machine.accelerators else "-"
        cards = Text(_cards(machine))
        cards.truncate(max(room, 1), overflow="ellipsis")
        table.add_row(Text(machine.name), memory(machine.ram.total_bytes), own, cards)
    console.print(table)


def _cards(machine: "Machine") -> str:
    """The accelerators in few words: without what tells no two of them apart that differ in speed or memory."""
    from collections import Counter

    if machine.accelerators is None:
        return "unknown"
    names = (card.name or "unnamed" for card in machine.accelerators)
    counts = Counter(_TELLS_NOTHING.sub("", name).strip() for name in names)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or "none"


@command.command("show", short_help="Show one machine.")
@click.argument("machine", metavar="NAME|FILE")
@set_option
@output_options
@click.pass_obj
def show_command(app: App, *, machine: str) -> None:
    """Show one machine, with changes if any are wanted.

    \b
    Example:
      kimigguf machine show mac-studio-512g
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.hardware.machines import to_data

    chosen = chosen_machine(app, machine)
    app.show.answer({"schema": SHOW_SCHEMA, "machine": to_data(chosen)}, lambda console: _draw(console, chosen))


def _draw(console: "Console", machine: "Machine") -> None:
    from rich.table import Table
    from rich.text import Text

    from kimigguf.hardware.describe import rows

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=7)
    table.add_column(overflow="fold")
    table.add_row(Text("Machine", style="bold"), Text(machine.name))
    for label, line in rows(machine):
        table.add_row(Text(label, style="bold"), Text(line))
    if machine.note:
        table.add_row(Text("Note", style="bold"), Text(machine.note))
    table.add_row(Text("Source", style="dim"), Text(machine.source))
    console.print(table)


@command.command("check", short_help="Check a machine file.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@output_options
@click.pass_obj
def check_command(app: App, *, file: Path) -> int:
    """Check a machine file: exit code 0 when it is valid, 2 with the bad keys when it is not.

    \b
    Example:
      kimigguf machine check box.toml
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.hardware.machines import load_file

    machine = load_file(file)
    missing = _gaps(machine)
    data: dict[str, Any] = {"schema": CHECK_SCHEMA, "file": str(file), "name": machine.name, "unknown": missing}
    text = f"{file} is a valid machine file" + (f"; verdicts would miss: {', '.join(missing)}" if missing else "")
    app.show.answer(data, lambda console: console.print(text, markup=False))
    return ExitCode.DONE


def _gaps(machine: "Machine") -> list[str]:
    """The unknown facts without which a verdict is unknown too."""
    found = ["ram.total_bytes"] if machine.ram.total_bytes is None else []
    found += ["accelerators"] if machine.accelerators is None else []
    found += ["disks"] if machine.disks is None else []
    for index, card in enumerate(machine.accelerators or ()):
        found += [f"accelerators.{index}.{key}" for key in ("memory_kind", "total_bytes") if getattr(card, key) is None]
    for index, disk in enumerate(machine.disks or ()):
        found += [f"disks.{index}.{key}" for key in ("kind", "free_bytes") if getattr(disk, key) is None]
    return found
