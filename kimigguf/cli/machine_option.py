"""``--machine``: the one way every command chooses between this machine and a described one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kimigguf.cli.app import App

if TYPE_CHECKING:
    from kimigguf.hardware.snapshot import Machine

F = TypeVar("F", bound=Callable[..., Any])


def machine_option(function: F) -> F:
    """Add ``--machine NAME|FILE`` to a command, as its parameter ``machine``."""
    return click.option(
        "--machine",
        metavar="NAME|FILE",
        help="A named machine (profiles/machines) or a file written by `inspect --save`; this one by default.",
    )(function)


def chosen_machine(app: App, machine: str | None) -> "Machine":
    """The described machine, or this one as detected now.

    Raises:
        UsageError: The name or file is none.
    """
    if machine is not None:
        from kimigguf.hardware.machines import load_machine

        return load_machine(machine, app.environ)
    from kimigguf.hardware.detect import detect

    return detect(environ=app.environ)
