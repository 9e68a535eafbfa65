"""``kimigguf restart``: the same server once more."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console


@click.command("restart", short_help="Stop a server and start it as it was.")
@click.option("--name", help="Which server; not needed where one runs.")
@output_options
@click.pass_obj
def command(app: App, name: str | None) -> int:
    """Stop a server and start it again in the background with the same arguments.

    \b
    Example:
      kimigguf restart
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli.serve_show import show_doubts
    from kimigguf.engines.background import start_detached
    from kimigguf.engines.registry import entries, restarting, stop
    from kimigguf.engines.session import servers_folder, state_folder

    folder = servers_folder(app.environ)
    name = chosen_server(app, name).name
    with restarting(folder, name):
        entry = chosen_server(app, name)  # as it is now that nobody else starts or restarts it
        if not Path(entry.folder).is_dir():  # while it still serves
            raise UsageError(
                f"{name} was started in {entry.folder}, which is no longer there",
                code="folder-gone",
                hint=shlex.join(["mkdir", "-p", entry.folder]),
            )
        app.show.note(f"stopping {name}")
        stop(entry)
        entries(folder)  # clears what is left of its registration
        logs = state_folder(app.environ) / "logs"
        with app.show.progress() as listen:
            answer = start_detached(
                entry.arguments, app.environ, folder=logs, name=name, listen=listen, working_folder=entry.folder
            )
    ready = answer["state"] == "ready"
    words = f"ready: {answer['base_url']}" if ready else f"it does not fit any more: {answer['reason']}"

    def human(console: "Console") -> None:
        show_doubts(console, answer)
        console.print(words, markup=False)

    app.show.answer(answer, human)
    return ExitCode.DONE if ready else ExitCode.ANSWERED_NO
