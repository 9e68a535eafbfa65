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

    from kimigguf.engines.deaths import Death
    from kimigguf.engines.registry import Entry


@click.command("restart", short_help="Stop a server and start it as it was.")
@click.option("--name", help="Which server; not needed where one runs.")
@output_options
@click.pass_obj
def command(app: App, name: str | None) -> int:
    """Stop a server and start it again in the background with the same arguments; also one that died by itself.

    \b
    Example:
      kimigguf restart
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli.serve_show import show_doubts
    from kimigguf.engines.background import start_detached
    from kimigguf.engines.deaths import forget
    from kimigguf.engines.registry import Entry, entries, restarting, stop
    from kimigguf.engines.session import servers_folder, state_folder

    folder = servers_folder(app.environ)
    name = _again(app, name).name
    with restarting(folder, name):
        chosen = _again(app, name)  # as it is now that nobody else starts or restarts it
        if not Path(chosen.folder).is_dir():  # while it still serves
            raise UsageError(
                f"{name} was started in {chosen.folder}, which is no longer there",
                code="folder-gone",
                hint=shlex.join(["mkdir", "-p", chosen.folder]),
            )
        if isinstance(chosen, Entry):
            app.show.note(f"stopping {name}")
            stop(chosen)
            entries(folder)  # clears what is left of its registration
            forget(folder, name)  # had it to be killed, it did not die by itself
        logs = state_folder(app.environ) / "logs"
        with app.show.progress() as listen:
            answer = start_detached(
                chosen.arguments, app.environ, folder=logs, name=name, listen=listen, working_folder=chosen.folder
            )
    ready = answer["state"] == "ready"
    words = f"ready: {answer['base_url']}" if ready else f"it does not fit any more: {answer['reason']}"

    def human(console: "Console") -> None:
        show_doubts(console, answer)
        console.print(words, markup=False)

    app.show.answer(answer, human)
    return ExitCode.DONE if ready else ExitCode.ANSWERED_NO


def _again(app: App, name: str | None) -> "Entry | Death":
    """The server of that name, or the only one; of a name that runs no more, the one that died by itself.

    Raises:
        UsageError: ``no-server``, ``which-server``.
    """
    from kimigguf.engines.deaths import death_of
    from kimigguf.engines.session import servers_folder

    try:
        return chosen_server(app, name)
    except UsageError as error:
        dead = death_of(servers_folder(app.environ), name) if name and error.code == "no-server" else None
        if dead is None:
            raise
        return dead
