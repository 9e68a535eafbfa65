"""``kimigguf logs``: what a server's engine says."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server, last_log
from kimigguf.errors import MachineError, UsageError

if TYPE_CHECKING:
    from kimigguf.engines.registry import Entry

_POLL_SECONDS: Final = 0.2


@click.command("logs", short_help="Show what a server's engine says.")
@click.option("--name", help="Which server; not needed where one runs.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the server ends, or Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), metavar="N", help="Only the last N lines.  [default: all]")
@click.pass_obj
def command(app: App, *, name: str | None, follow: bool, lines: int | None) -> None:
    """Print the log of a server's engine; of one that has ended, its last log.

    \b
    Example:
      kimigguf logs
      kimigguf logs -n 40
      kimigguf logs --name kimi-k3-8080 -f -n 0
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    entry, path = _subject(app, name)
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            if lines is not None:
                sys.stdout.writelines(deque(log, maxlen=lines))
            while True:
                alive = entry is not None and entry.engine.process() is not None
                while text := log.read(1 << 16):
                    sys.stdout.write(text)
                sys.stdout.flush()
                if not follow or not alive:
                    return
                time.sleep(_POLL_SECONDS)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise MachineError(f"cannot read {path}", code="log-unreadable", cause=error.strerror) from error


def _subject(app: App, name: str | None) -> "tuple[Entry | None, Path]":
    """The server, None if it has ended, and its log.

    Raises:
        UsageError: ``no-server`` if none has left a log either; ``which-server``.
    """
    try:
        entry = chosen_server(app, name)
    except UsageError as error:
        log = last_log(app, name) if error.code == "no-server" else None
        if log is None:
            raise
        app.show.note(f"{name or 'the last server'} has ended; this is its last log: {log}")
        return None, log
    return entry, Path(entry.log)
