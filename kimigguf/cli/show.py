"""The one place that writes: answers to stdout (for people, as JSON, or quiet), everything else to stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kimigguf import __version__
from kimigguf.errors import KimiggufError, MachineError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kimigguf.events import Advance, Event, Listener

# `kimigguf --help` imports this module: whatever only an answer needs is imported where it is used.

F = TypeVar("F", bound=Callable[..., Any])
_LINE_EVERY_SECONDS: Final = 10.0


class Mode(StrEnum):
    """How answers are shown."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Show:
    """Output of one run of the command."""

    def __init__(self, mode: Mode = Mode.HUMAN) -> None:
        self.mode = mode
        self._progress: Progress | None = None

    @property
    def out(self) -> "Console":
        """Console on stdout, for answers."""
        from kimigguf.cli.lines import LineConsole

        class Answer(LineConsole):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich would exit with 1, which here means "answered: no"

        return Answer(highlight=False)

    @property
    def err(self) -> "Console":
        """Console on stderr, for everything that is not the answer."""
        from kimigguf.cli.lines import LineConsole

        return LineConsole(stderr=True, highlight=False)

    def answer(self, data: Mapping[str, Any], human: Callable[["Console"], None]) -> None:
        """Show an answer: ``data`` (with its ``schema``) as JSON, or ``human`` drawn for a person."""
        if not str(data.get("schema", "")).startswith("kimigguf."):
            raise ValueError("every JSON answer carries its schema")
        try:
            if self.mode is Mode.JSON:
                import json

                sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
                sys.stdout.flush()
            elif self.mode is Mode.HUMAN:
                human(self.out)
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            drop_stdout()
            raise MachineError("cannot write the answer", code="cannot-write", cause=error.strerror) from error

    def note(self, text: str) -> None:
        """One line on stderr, unless quiet."""
        if self.mode is not Mode.QUIET:
            self.err.print(text, markup=False)

    def error(self, error: KimiggufError) -> None:
        """Show a failure: what happened, why, what to do; one JSON object on stderr under ``--json``."""
        if self.mode is Mode.JSON:
            import json

            record = {
                "schema": "kimigguf.error/1",
                "code": error.code,
                "message": error.message,
                "cause": error.cause,
                "hint": error.hint,
                "exit_code": int(error.exit_code),
            }
            sys.stderr.write(json.dumps(record, ensure_ascii=False) + "\n")
            return
        from rich.text import Text

        console = self.err
        lines = [Text.assemble(("error: ", "bold red"), error.message, (f"  [{error.code}]", "dim"))]
        if error.cause:
            lines.append(Text.assemble(("because: ", "bold"), error.cause))
        if error.hint:
            lines.append(Text.assemble(("try: ", "bold green"), error.hint))
        for line in lines:
            console.print(line)

    def bug(self, error: BaseException) -> None:
        """Show an unexpected exception for what it is."""
        import traceback

        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.write(f"\nThis is a bug in kimigguf {__version__}. Please report it with the text above.\n")

    @contextmanager
    def progress(self) -> Iterator["Listener"]:
        """Draw events: bars on a terminal, a line per 10 s elsewhere, NDJSON on stderr under ``--json``."""
        if self.mode is Mode.JSON:
            yield _write_ndjson
        elif self.mode is Mode.QUIET:
            yield lambda _event: None
        elif sys.stderr.isatty():
            try:
                with _bars(self.err) as (self._progress, listener):
                    yield listener
            finally:
                self._progress = None
        else:
            yield _Lines()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Leave the terminal to a question: bars would draw over it, hide the cursor, and read [y/N] as markup."""
        bars = self._progress
        if bars is None:
            yield
            return
        bars.stop()
        try:
            yield
        finally:
            bars.start()


def drop_stdout() -> None:
    """Let what is still buffered for a closed or full stdout go nowhere, or the interpreter trips over it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_ndjson(event: "Event") -> None:
    import json

    record: dict[str, Any] = {"schema": "kimigguf.event/1", "event": type(event).__name__.lower()}
    record |= {name: getattr(event, name) for name in type(event).__slots__}  # type: ignore[attr-defined, unused-ignore]  # slots dataclasses have it; mypy does not model that
    sys.stderr.write(json.dumps(record) + "\n")
    sys.stderr.flush()


class _Lines:
    """Plain lines for logs: steps and notices at once, progress every ten seconds and at its end.

    Where an activity has a total, that is the line; its items are only told when they are done.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def __call__(self, event: "Event") -> None:
        from kimigguf.events import Notice, Step

        line = event.text if isinstance(event, Step | Notice) else self._advance(event)
        if line is None:
            return
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _advance(self, event: "Advance") -> str | None:
        from kimigguf import units

        now, done = time.monotonic(), event.done_bytes == event.total_bytes
        key = f"{event.activity} {event.item}"
        began, before = self._first.setdefault(key, (now, event.done_bytes))
        if not done:
            if event.item != "total" and f"{event.activity} total" in self._first:
                return None
            if now - self._last.setdefault(key, now) < _LINE_EVERY_SECONDS:
                return None
        self._last[key] = now
        line = f"{key}: {units.storage(event.done_bytes)} of {units.storage(event.total_bytes)}"
        speed = (event.done_bytes - before) / (now - began) if now > began else 0.0
        if done or speed <= 0:
            return line
        left = None if event.total_bytes is None else (event.total_bytes - event.done_bytes) / speed
        return f"{line}, {units.rate(speed)}, {units.duration(left)} left"


@contextmanager
def _bars(console: "Console") -> Iterator[tuple["Progress", "Listener"]]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from kimigguf.events import Advance, Notice, Step

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def listen(event: "Event") -> None:
            match event:
                case Step(text=text) | Notice(text=text):
                    progress.console.print(text, markup=False)
                case Advance():
                    key = f"{event.activity} {event.item}"
                    if key not in tasks:
                        tasks[key] = progress.add_task(key, total=event.total_bytes)
                    progress.update(tasks[key], completed=event.done_bytes, total=event.total_bytes)
                    if event.done_bytes == event.total_bytes and event.item != "total":
                        progress.remove_task(tasks.pop(key))

        yield progress, listen


def output_options(function: F) -> F:
    """Give a command ``--json`` and ``--quiet``; they set the mode of the injected ``Show``."""

    def choose(mode: Mode) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(ctx: click.Context, _parameter: click.Parameter, chosen: bool) -> None:  # noqa: FBT001 -- click calls it by position
            if chosen:
                ctx.obj.show.mode = mode

        return callback

    for flag, mode, text in (
        ("--quiet", Mode.QUIET, "Print nothing but errors; the exit code answers."),
        ("--json", Mode.JSON, "Print the answer as JSON on stdout."),
    ):
        option = click.option(flag, is_flag=True, is_eager=True, expose_value=False, callback=choose(mode), help=text)
        function = option(function)
    return function
