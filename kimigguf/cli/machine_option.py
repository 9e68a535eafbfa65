"""``--machine`` and ``--set``: how every command chooses between this machine, a described one and a what-if."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kimigguf.cli.app import App

if TYPE_CHECKING:
    from kimigguf.hardware.snapshot import Machine

F = TypeVar("F", bound=Callable[..., Any])
_CHANGES: Final = "kimigguf.machine.changes"


def machine_option(function: F) -> F:
    """Add ``--machine NAME|FILE`` to a command, as its parameter ``machine``, and ``--set`` for ``chosen_machine``."""
    return click.option(
        "--machine",
        metavar="NAME|FILE",
        help="A named machine (profiles/machines) or a file written by `inspect --save`; this one by default.",
    )(set_option(function))


def set_option(function: F) -> F:
    """Add ``--set CHANGE``, which ``chosen_machine`` reads; the command itself has no parameter for it."""
    return click.option(
        "--set",
        multiple=True,
        metavar="CHANGE",
        expose_value=False,
        callback=_remember_changes,
        help="Change the machine: ram=1536GiB, ram+=256GiB, gpu=none, gpu+=2xrtx-pro-6000, gpu+=24GiB, disk+=4TB.",
    )(function)


def _remember_changes(ctx: click.Context, _parameter: click.Parameter, changes: tuple[str, ...]) -> None:
    ctx.meta[_CHANGES] = changes


def machine_words() -> tuple[str, ...]:
    """The options of the command at hand that mean its machine again: ``--machine`` and ``--set`` as given."""
    ctx = click.get_current_context()
    machine = ctx.params.get("machine")
    changes: tuple[str, ...] = ctx.meta.get(_CHANGES, ())
    return (*(("--machine", str(machine)) if machine else ()), *(word for one in changes for word in ("--set", one)))


def chosen_machine(app: App, machine: str | None) -> "Machine":
    """The described machine, or this one as detected now, with the changes of ``--set``.

    Raises:
        UsageError: The name or file is none, or a change makes no sense.
    """
    if machine is not None:
        from kimigguf.hardware.machines import load_machine

        chosen = load_machine(machine, app.environ)
    else:
        from kimigguf.hardware.detect import PATIENT_LIMIT_SECONDS, detect

        chosen = detect(environ=app.environ, limit_seconds=PATIENT_LIMIT_SECONDS)
    ctx = click.get_current_context(silent=True)
    changes: tuple[str, ...] = ctx.meta.get(_CHANGES, ()) if ctx is not None else ()
    if not changes:
        return chosen
    from kimigguf.hardware.machines import known_accelerators
    from kimigguf.hardware.what_if import change

    return change(chosen, changes, known_accelerators(app.environ))
