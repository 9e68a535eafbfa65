"""``kimigguf logs``: what a server's engine says."""

import sys
import time
from pathlib import Path
from typing import Final

import click

from kimigguf.cli.app import App
from kimigguf.errors import MachineError

_POLL_SECONDS: Final = 0.2


@click.command("logs", short_help="Show what a server's engine says.")
@click.option("--name", help="Which server; not needed where one runs.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the server ends, or Ctrl-C.")
@click.pass_obj
def command(app: App, *, name: str | None, follow: bool) -> None:
    """Print the log of a server's engine.

    \b
    Example:
      kimigguf logs
      kimigguf logs --name kimi-k3-8080 -f
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.registry import find
    from kimigguf.engines.session import servers_folder

    entry = find(servers_folder(app.environ), name)
    try:
        with Path(entry.log).open(encoding="utf-8", errors="replace") as log:
            while True:
                alive = entry.engine.process() is not None
                while text := log.read(1 << 16):
                    sys.stdout.write(text)
                sys.stdout.flush()
                if not follow or not alive:
                    return
                time.sleep(_POLL_SECONDS)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise MachineError(f"cannot read {entry.log}", code="log-unreadable", cause=error.strerror) from error
