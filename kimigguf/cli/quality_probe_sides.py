"""What the commands of ``kimigguf quality-probe`` share: whom they ask where nobody is named, and leave to spend."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kimigguf.errors import UsageError

if TYPE_CHECKING:
    from kimigguf.cli.app import App
    from kimigguf.cli.show import Show


def candidate_of(app: "App", given: str | None) -> tuple[str, Mapping[str, str]]:
    """The address to judge, and the environment with its key: the one given, else the one server that this user runs.

    Raises:
        UsageError: ``no-server``, or ``which-server`` where there are several.
    """
    if given is not None:
        return given, app.environ
    from kimigguf.engines.keys import read_keys
    from kimigguf.engines.registry import entries, find
    from kimigguf.engines.session import servers_folder
    from kimigguf.probe.client import KEY_VARIABLES

    folder = servers_folder(app.environ)
    running = entries(folder)
    if len(running) > 1:
        raise UsageError(
            f"{len(running)} servers are running",
            code="which-server",
            hint="name one: " + " or ".join(f"--candidate {entry.address.url}" for entry in running),
        )
    entry, variable = find(folder, None), KEY_VARIABLES["candidate"]
    if entry.api_key_file is None or app.environ.get(variable):
        return entry.address.url, app.environ
    from pathlib import Path

    return entry.address.url, {**app.environ, variable: read_keys(Path(entry.api_key_file))[0]}


def agreed(show: "Show", usd: float | None, who: str) -> bool:
    """Ask whoever sits at the terminal; nobody there is a no. ``who`` is paid."""
    cost = f"Nobody has written down what {who} charges." if usd is None else f"{who} may charge up to ${usd:.2f}."
    question = f"{cost} Go on? [y/N]"
    if not sys.stdin.isatty():
        return False
    with show.asking():
        return click.confirm(question, show_default=False, prompt_suffix=" ", err=True)
