"""``kimigguf stop``: end servers, and everything they started."""

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server
from kimigguf.cli.show import output_options
from kimigguf.errors import UsageError


@click.command("stop", short_help="Stop a running server and everything it started.")
@click.option("--name", help="Which server; not needed where one runs.")
@click.option("--all", "everything", is_flag=True, help="All servers of yours.")
@output_options
@click.pass_obj
def command(app: App, *, name: str | None, everything: bool) -> None:
    """Stop a server: its supervisor first, then whatever is left, also where the supervisor was killed.

    \b
    Example:
      kimigguf stop
      kimigguf stop --all
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.registry import entries, stop
    from kimigguf.engines.session import servers_folder

    if name and everything:
        raise UsageError("give either --name or --all", code="name-and-all")
    folder = servers_folder(app.environ)
    chosen = entries(folder) if everything else (chosen_server(app, name),)
    for entry in chosen:
        app.show.note(f"stopping {entry.name}")
        stop(entry)
    entries(folder)  # clears what is left of their registration
    data = {"schema": "kimigguf.stop/1", "stopped": [entry.name for entry in chosen]}
    words = ", ".join(entry.name for entry in chosen)
    app.show.answer(data, lambda console: console.print(f"stopped: {words or 'nothing'}", markup=False))
