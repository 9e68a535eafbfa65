"""The command ``kimigguf``: built once, commands loaded when called, failures turned into exit codes here only."""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from kimigguf import __version__
from kimigguf.cli.show import Show, drop_stdout
from kimigguf.errors import ExitCode, KimiggufError, UsageError

_BURST_SECONDS: Final = 1.0

_COMMANDS: Final[Mapping[str, str]] = {
    "inspect": "Show what this machine has: memory, accelerators, disks, engines.",
    "recommend": "Say which quant of Kimi K3 this machine can run, and why.",
    "plan": "Show where every byte of a quant would go, and the exact command line.",
    "memory": "Show the memory ledger of any llama-server command line.",
    "download": "Fetch a quant: pinned, checked, resumable, hashed.",
    "verify": "Re-hash a downloaded quant and name every bad shard.",
    "repair": "Fetch again only what is bad of a downloaded quant.",
    "list": "Show the quants on this machine and their state.",
    "import": "Take over shards that are on this machine already.",
    "remove": "Delete a downloaded quant, after showing what goes.",
    "serve": "Serve a quant on an OpenAI-compatible endpoint.",
    "status": "Show the servers that run on this machine.",
    "logs": "Show what a server's engine says.",
    "stop": "Stop a running server and everything it started.",
    "restart": "Stop a server and start it as it was.",
    "bench": "Measure how fast a running server is.",
    "doctor": "Find what ails a server, and what to do about it.",
    "chat": "Talk to a running server.",
    "ollama-register": "Register a quant with Ollama, if that is a good idea.",
    "quality-probe": "Compare a running quant with a reference endpoint.",
    "machine": "List, show and check machine files.",
}
"""Name and one line of help. `kimigguf --help` must not import a single command; a test holds these to the commands."""


class App:
    """What every command is given: where to show, and the environment it may read."""

    # A plain class: importing `dataclasses` alone would cost a tenth of the start-up.
    __slots__ = ("environ", "show")

    def __init__(self, *, show: Show, environ: Mapping[str, str] | None = None) -> None:
        self.show = show
        self.environ: Mapping[str, str] = os.environ if environ is None else environ


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- click's signature
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"kimigguf.cli.{cmd_name.replace('-', '_')}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name} is no command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            nearest = get_close_matches(args[0], _COMMANDS, n=2, cutoff=0.5)
            ctx.fail(f"no such command {args[0]!r}." + (f" Did you mean {' or '.join(nearest)}?" if nearest else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kimigguf")
def cli() -> None:
    """Run a quantized Kimi K3 on the machine you have, and prove that it is still K3.

    \b
    Start with:
      kimigguf recommend           which quant fits this machine
      kimigguf serve UD-IQ1_M      download, verify, plan, serve
      kimigguf ollama-register     or hand it to Ollama
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped


def run(argv: list[str] | None = None, app: App | None = None) -> int:
    """Run one command and return its exit code; everything expected ends here, anything else is a bug (70)."""
    app = app or App(show=Show())
    try:
        result: Any = cli.main(args=argv, prog_name="kimigguf", standalone_mode=False, obj=app)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 -- the last line of defence: whatever comes, it is shown and has a code
        return _ended_by(error, app.show)
    return result if isinstance(result, int) else ExitCode.DONE


def _ended_by(error: BaseException, show: Show) -> int:
    match error:
        case KimiggufError():
            show.error(error)
            return error.exit_code
        case click.Abort() | KeyboardInterrupt():  # Ctrl-C, at a prompt or elsewhere
            show.note("interrupted")
            return ExitCode.INTERRUPTED
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return ExitCode.USAGE
        case click.ClickException():
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "kimigguf"
            show.error(UsageError(error.format_message(), code="usage", hint=f"{path} --help"))
            return ExitCode.USAGE
        case BrokenPipeError():  # the reader of our output has gone (`| head`); that is its right
            drop_stdout()
            return ExitCode.DONE
        case SystemExit():
            raise error
        case _:
            show.bug(error)
            return ExitCode.BUG


def main() -> NoReturn:
    """Entry point of the console script."""
    # A supervisor's stop and a closed terminal are what a Ctrl-C is: the same clean-up runs, the exit code is the same.
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    stops = [number for name in names if (number := getattr(signal, name, None)) is not None]
    interrupt = _Interrupt()
    for number in stops:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` in a script, stay honoured
            signal.signal(number, interrupt)
    code = run()
    for number in stops:  # nothing is left to interrupt but the interpreter's own end
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


class _Interrupt:
    """Raises KeyboardInterrupt, not by way of SIGINT, which a shell ignores for whatever a script starts with `&`.

    A burst of signals is one: a Ctrl-C held down, or a supervisor that signals the whole group, does not break the
    clean-up that the first one started. A second one after a moment does: its user is impatient.
    """

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, _number: int, _frame: object) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before > _BURST_SECONDS:
            raise KeyboardInterrupt
