"""``kimigguf list``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kimigguf.download.store import StoredSet

_COLOURS = {"whole": "green", "partial": "yellow", "unverified": "yellow", "damaged": "bold red", "foreign": "dim"}


@click.command("list", short_help="Show the quants on this machine and their state.")
@click.option("--newest", is_flag=True, help="Ask the hub whether the repositories have moved on.")
@models_option
@output_options
@click.pass_obj
def command(app: App, *, newest: bool, models_dir: Path | None) -> int:
    """Show the quants on this machine: whole, partial, unverified, damaged, or foreign (not fetched by kimigguf).

    \b
    Examples:
      kimigguf list
      kimigguf list --newest --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.download import store

    models = store.models_dir(app.environ, models_dir)
    sets = (*store.managed_sets(models), *store.foreign_sets(models))
    heads = _heads(app, sets) if newest else {}
    app.show.answer(_record(models, sets, heads), lambda console: _draw(console, models, sets, heads))
    return ExitCode.DONE


def _heads(app: App, sets: "tuple[StoredSet, ...]") -> dict[str, str]:
    """The newest commit of each repository."""
    from kimigguf.catalogue.hub import resolve

    repositories = sorted({stored.manifest.repository for stored in sets if stored.manifest})
    return {name: resolve(name, revision="main", environ=app.environ) for name in repositories}


def _record(models: Path, sets: "tuple[StoredSet, ...]", heads: dict[str, str]) -> dict[str, Any]:
    from kimigguf.download.store import as_json

    return {
        "schema": "kimigguf.list/1",
        "models_dir": str(models),
        "sets": [
            as_json(stored) | {"newest_commit": heads.get(stored.manifest.repository) if stored.manifest else None}
            for stored in sets
        ],
    }


def _draw(console: "Console", models: Path, sets: "tuple[StoredSet, ...]", heads: dict[str, str]) -> None:
    from rich.table import Table

    console.print(f"in {models}", markup=False)
    if not sets:
        console.print("nothing yet; which quant fits: kimigguf recommend", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("quant", "state", "size", "commit", *(["newest"] if heads else []), "folder"):
        right, fold = heading == "size", heading == "folder"
        table.add_column(heading, justify="right" if right else "left", no_wrap=not fold, overflow="fold")
    for stored in sets:
        table.add_row(*_cells(stored, models, heads))
    console.print(table)


def _cells(stored: "StoredSet", models: Path, heads: dict[str, str]) -> "list[str | Text]":
    from rich.text import Text

    state, manifest = str(stored.state), stored.manifest
    if state == "partial":
        state = f"partial {100 * stored.done_bytes // max(1, stored.size_bytes)} %"
    newest = heads.get(manifest.repository, "") if manifest else ""
    return [
        stored.quant or stored.files[0].name,
        Text(state, style=_COLOURS[stored.state]),
        units.storage(stored.size_bytes),
        manifest.commit[:12] if manifest else "",
        *([("same" if manifest and newest == manifest.commit else newest[:12])] if heads else []),
        str(stored.folder.relative_to(models) if stored.folder.is_relative_to(models) else stored.folder),
    ]
