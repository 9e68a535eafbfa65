"""``kimigguf doctor``: what ails a server, and what to do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server, key_of, last_log
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.doctor import Finding
    from kimigguf.engines.registry import Entry

_MAX_LOG_BYTES: Final = 64 << 20
NOTHING_FOUND: Final = "none of the known symptoms is in it; that is no proof of health"
NO_LOG: Final = "no line of it is one that llama.cpp writes: this is no log of llama-server"


@click.command("doctor", short_help="Find what ails a server, and what to do about it.")
@click.option("--log", type=click.Path(path_type=Path), help="A llama-server log, also of another machine.")
@click.option("--name", help="Which server; not needed where one runs.")
@output_options
@click.pass_obj
def command(app: App, *, log: Path | None, name: str | None) -> int:
    """Look for every known symptom: in a log, or in a running server and its log.

    It looks at the running server, or at the last log where it has ended. A running one is asked for a rendered
    template and one token. Exit code 1 if something was found, or if FILE is no such log. Nothing found is no proof of
    health.

    \b
    Example:
      kimigguf doctor
      kimigguf doctor --log llama-server.log
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.diagnose import naming
    from kimigguf.engines.doctor import examine_log, in_order, is_server_log

    if log is not None:
        path, entry = log, None
    else:
        path, entry = _subject(app, name)
    text = _read(path)
    called = entry.name if entry else _dead(app, path)
    seen = (replace(one, hint=naming(one.hint, called)) if called else one for one in examine_log(text))
    found = in_order((*seen, *(_running(app, entry, text) if entry else ())))
    # Of a log of its own it knows what that is, however little stands in it yet.
    recognised = log is None or bool(found) or is_server_log(text)
    data = {
        "schema": "kimigguf.doctor/1",
        "log": str(path),
        "recognised": recognised,
        "lines": text.count("\n"),
        "findings": [_record(finding) for finding in found],
    }
    nothing = NOTHING_FOUND if recognised else NO_LOG
    app.show.answer(data, lambda console: _draw(console, path, text.count("\n"), found or nothing))
    return ExitCode.ANSWERED_NO if found or not recognised else ExitCode.DONE


def _subject(app: App, name: str | None) -> "tuple[Path, Entry | None]":
    """The log to read, and the server that writes it if it runs."""
    from kimigguf.engines.registry import entries
    from kimigguf.engines.session import servers_folder

    running = entries(servers_folder(app.environ))
    if any(name in {None, entry.name} for entry in running):
        entry = chosen_server(app, name)
        return Path(entry.log), entry
    log = last_log(app, name)
    if log is None:
        raise UsageError(
            "no server is running, and none has left a log here"
            if name is None
            else f"no server is called {name!r}, and none of that name has left a log here",
            code="no-server",
            hint="name a log: kimigguf doctor --log FILE",
        )
    return log, None


def _dead(app: App, log: Path) -> str | None:
    """The server that died by itself and left this log, if it is remembered."""
    from kimigguf.engines.deaths import deaths
    from kimigguf.engines.session import servers_folder

    return next((death.name for death in deaths(servers_folder(app.environ)) if death.log == str(log)), None)


def _running(app: App, entry: "Entry", log: str) -> "tuple[Finding, ...]":
    """What a running server's own answers, its process and its machine show."""
    from kimigguf.engines.checkup import examine_running
    from kimigguf.engines.doctor import examine_server, serves_k3
    from kimigguf.engines.llama_server import get

    key = key_of(entry)
    answer = get(entry.address, "/props", key=key)
    try:
        props = json.loads(answer[1]) if answer and answer[0] == 200 else {}  # noqa: PLR2004 -- HTTP
    except ValueError:
        props = {}
    is_k3 = serves_k3(log) or "k3" in entry.alias.lower()
    return (*examine_server(props, is_k3=is_k3), *examine_running(entry, key, app.environ, is_k3=is_k3))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read the log {path}", code="log-unreadable", cause=error.strerror) from error


def _record(finding: "Finding") -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": str(finding.severity),
        "message": finding.message,
        "evidence": finding.evidence,
        "times": finding.times,
        "hint": finding.hint,
    }


def _draw(console: "Console", path: Path, lines: int, found: "tuple[Finding, ...] | str") -> None:
    from rich.text import Text

    console.print(f"{path}: {lines:,} lines", markup=False)
    if isinstance(found, str):
        console.print(f"UNKNOWN  {found}", markup=False)
        return
    colours = {"fatal": "bold red", "failing": "red", "worse": "yellow"}
    for finding in found:
        severity = str(finding.severity)
        times = f" ({finding.times} times)" if finding.times > 1 else ""
        console.print(Text.assemble((f"{severity.upper():9}", colours[severity]), finding.message + times))
        console.print(f"         {finding.evidence}", markup=False, style="dim")
        console.print(f"         try: {finding.hint}", markup=False)
