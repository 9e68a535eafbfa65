"""``kimigguf stop``: end servers, and everything they started."""

from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server
from kimigguf.cli.show import output_options
from kimigguf.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


@click.command("stop", short_help="Stop a running server and everything it started.")
@click.option("--name", help="Which server; not needed where one runs.")
@click.option("--all", "everything", is_flag=True, help="All servers of yours.")
@output_options
@click.pass_obj
def command(app: App, *, name: str | None, everything: bool) -> None:
    """Stop a server: its supervisor first, then whatever is left, also where the supervisor was killed.

    One that died by itself is forgotten: status shows it no more.

    \b
    Example:
      kimigguf stop
      kimigguf stop --all
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.deaths import deaths, forget
    from kimigguf.engines.registry import entries, stop
    from kimigguf.engines.session import servers_folder

    if name and everything:
        raise UsageError("give either --name or --all", code="name-and-all")
    folder = servers_folder(app.environ)
    running = entries(folder)
    living = {entry.name for entry in running}
    dead = [one.name for one in deaths(folder) if one.name not in living and (everything or one.name == name)]
    chosen = running if everything else () if dead else (chosen_server(app, name),)
    for entry in chosen:
        app.show.note(f"stopping {entry.name}")
        stop(entry)
    entries(folder)  # clears what is left of their registration
    for gone in (*dead, *(entry.name for entry in chosen)):  # one that had to be killed counts for none that died
        forget(folder, gone)
    data = {"schema": "kimigguf.stop/1", "stopped": [entry.name for entry in chosen], "forgotten": dead}

    def human(console: "Console") -> None:
        if chosen or not dead:
            console.print(f"stopped: {', '.join(entry.name for entry in chosen) or 'nothing'}", markup=False)
        if dead:
            console.print(f"had died before, and is forgotten: {', '.join(dead)}", markup=False)

    app.show.answer(data, human)
