"""``kimigguf ollama-register``."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, KimiggufError, UsageError
from kimigguf.units import storage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from kimigguf.ollama.evidence import Check
    from kimigguf.ollama.proof import Proof
    from kimigguf.ollama.registration import Registration
    from kimigguf.ollama.source import Source

_COLOURS = {"passed": "green", "failed": "bold red", "unknown": "yellow"}


@click.command("ollama-register", short_help="Register a quant with Ollama, if that is a good idea.")
@click.argument("what", metavar="[QUANT|PATH]", required=False)
@click.option("--name", help="The model's name in Ollama.  [default: kimi-k3:<quant>]")
@click.option("--context", "context_tokens", type=int, default=32768, show_default=True, help="Tokens of context.")
@click.option("--dry-run", is_flag=True, help="Look and plan; write nothing.")
@click.option("--force", is_flag=True, help="Replace a model of that name; go on where the disk cannot be seen.")
@click.option("--copy", is_flag=True, help="Send copies even where files could be linked into Ollama's folder.")
@click.option("--models-dir", type=click.Path(path_type=Path), help="Where the downloaded quants lie.")
@click.option("--check", "checked", metavar="NAME", help="Only prove again that a registered model answers.")
@click.option("--remove", "removed", metavar="NAME", help="Only remove a registered model.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    what: str | None,
    name: str | None,
    context_tokens: int,
    dry_run: bool,
    force: bool,
    copy: bool,
    models_dir: Path | None,
    checked: str | None,
    removed: str | None,
) -> int:
    """Register a quant with Ollama, after a look at whether that is a good idea.

    Ollama before 0.32.15 cannot load K3; before 0.35 it merges shards itself, at three times their size on its disk, so
    they are merged here first where that takes less; and it has no setting for expert offload. All of that is looked
    at before anything is written. `kimigguf serve --ollama-api` costs no disk.

    \b
    Examples:
      kimigguf ollama-register UD-IQ1_S --dry-run
      kimigguf ollama-register UD-IQ1_S --name kimi-k3:small
      kimigguf ollama-register --check kimi-k3:ud-iq1_s
      kimigguf ollama-register --remove kimi-k3:ud-iq1_s
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    if sum(value is not None for value in (what, checked, removed)) != 1:
        raise UsageError(
            "give one of: a quant or a path, --check NAME, --remove NAME",
            code="bad-arguments",
            hint="kimigguf ollama-register UD-IQ1_S --dry-run",
        )
    if checked is not None:
        return _check(app, checked)
    if removed is not None:
        return _remove(app, removed)
    from kimigguf.catalogue.profiles import load_model
    from kimigguf.memory.settings import Settings
    from kimigguf.ollama.find import find_source
    from kimigguf.ollama.registration import plan
    from kimigguf.placement.plan import check_context

    profile = load_model(environ=app.environ)
    check_context(context_tokens, profile.context_max_tokens)
    source = find_source(what or "", app.environ, models_dir)
    registration = plan(
        source,
        app.environ,
        name=name,
        force=force,
        copy=copy,
        settings=Settings(context_tokens=context_tokens),
        experts_on_host=_experts_on_host(app, source),
        licence=f"{profile.licence.name}: {profile.licence.url}" if profile.licence else None,
    )
    return _answer_plan(app, registration) if dry_run else _register(app, registration)


def _experts_on_host(app: App, source: "Source") -> bool | None:
    """Whether the GPUs here need the experts elsewhere: False without one or where all fits, None if unknown."""
    from kimigguf.placement.budget import budget

    try:
        machine = chosen_machine(app, None)
    except KimiggufError:
        return None
    if machine.accelerators is None:
        return None
    return 0 < budget(machine).vram_bytes < source.size_bytes


def _answer_plan(app: App, registration: "Registration") -> int:
    app.show.answer(_record(registration, None), lambda console: _draw_plan(console, registration))
    return ExitCode.DONE if registration.blocking is None else ExitCode.ANSWERED_NO


def _register(app: App, registration: "Registration") -> int:
    from kimigguf.ollama.proof import prove
    from kimigguf.ollama.registration import register
    from kimigguf.ollama.session import open_session

    for check in registration.checks:
        app.show.note(_line(check))
    with app.show.progress() as listen:
        register(registration, listen, environ=app.environ)
        with open_session(registration.server, load_minutes=registration.load_minutes) as session:
            proof = prove(session, registration.name, listen)
    app.show.answer(_record(registration, proof), lambda console: _draw_done(console, registration, proof))
    return ExitCode.DONE if proof.holds else ExitCode.ANSWERED_NO


def _check(app: App, name: str) -> int:
    from kimigguf.ollama.modelfile import load_timeout_minutes
    from kimigguf.ollama.proof import prove
    from kimigguf.ollama.registration import reachable_server, registered_bytes
    from kimigguf.ollama.session import open_session

    server = reachable_server(app.environ)
    minutes = load_timeout_minutes(registered_bytes(server, name))
    with app.show.progress() as listen, open_session(server, load_minutes=minutes) as session:
        proof = prove(session, name, listen)
    app.show.answer(
        {"schema": "kimigguf.ollama-check/1", "name": name, "proof": asdict(proof)},
        lambda console: _draw_proof(console, proof),
    )
    return ExitCode.DONE if proof.holds else ExitCode.ANSWERED_NO


def _remove(app: App, name: str) -> int:
    from kimigguf.ollama.registration import reachable_server, remove

    server = reachable_server(app.environ)
    freed = remove(server, name)
    app.show.answer(
        {"schema": "kimigguf.ollama-remove/1", "name": name, "size_bytes": freed},
        lambda console: console.print(f"removed {name} ({storage(freed)}) from Ollama", markup=False),
    )
    return ExitCode.DONE


def _record(registration: "Registration", proof: "Proof | None") -> dict[str, Any]:
    from kimigguf.ollama.modelfile import launchctl_lines, shell_lines, systemd_drop_in

    folder, source = registration.folder, registration.source
    return {
        "schema": "kimigguf.ollama-register/1",
        "name": registration.name,
        "quant": source.quant.name if source.quant else None,
        "size_bytes": source.size_bytes,
        "files": [str(file.path) for file in source.files],
        "server": asdict(registration.server),
        "models_folder": None
        if folder is None
        else {
            "path": str(folder.path),
            "source": folder.source,
            "confirmed": folder.confirmed,
            "free_bytes": folder.free_bytes,
        },
        "disk": asdict(registration.need),
        "way": None if registration.chosen.fits is False else registration.chosen.route,
        "way_reason": registration.survey.reason,
        "ways": [asdict(way) | {"fits": way.fits} for way in registration.survey.candidates],
        "link": registration.link,
        "merge_folder": _merge_folder(registration),
        "already_registered": registration.already,
        "checks": [asdict(check) for check in registration.checks],
        "blocking": None if registration.blocking is None else registration.blocking.code,
        "parameters": dict(registration.parameters),
        "modelfile": registration.modelfile,
        "environment": [asdict(variable) for variable in registration.environment],
        "snippets": {
            "systemd": systemd_drop_in(registration.environment),
            "launchd": launchctl_lines(registration.environment),
            "shell": shell_lines(registration.environment),
        },
        "registered": proof is not None,
        "proof": None if proof is None else asdict(proof),
        "run": f"ollama run {registration.name}",
    }


def _merge_folder(registration: "Registration") -> dict[str, Any] | None:
    work = registration.survey.work
    return None if work is None else asdict(work) | {"folder": str(work.folder)}


def _line(check: "Check") -> str:
    return f"{check.state.upper():<8} {check.what:<14} {check.evidence}"


def _draw_checks(console: "Console", checks: "Iterable[Check]") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.state.upper(), style=_COLOURS[check.state]), check.what, Text(check.evidence))
        if check.hint and check.state != "passed":
            table.add_row("", "", Text.assemble(("try: ", "bold green"), check.hint))
    console.print(table)


def _draw_plan(console: "Console", registration: "Registration") -> None:
    _draw_checks(console, registration.checks)
    _draw_ways(console, registration)
    _draw_disk(console, registration)
    console.print("Modelfile", style="bold")
    console.print(registration.modelfile, markup=False, soft_wrap=True)
    _draw_environment(console, registration)
    console.print(
        f"nothing was written; it would be refused: {registration.blocking.evidence}"
        if registration.blocking
        else "nothing was written; the same command without --dry-run registers it",
        markup=False,
    )


def _draw_ways(console: "Console", registration: "Registration") -> None:
    from rich import box
    from rich.table import Table

    chosen, source = registration.chosen, registration.source
    console.print("Ways", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("", overflow="fold")
    for heading in ("peak", "kept", "room"):
        table.add_column(heading, justify="right", no_wrap=True)
    for letter, way in zip("ab", registration.survey.candidates, strict=False):
        room = {True: "yes", False: "no", None: "unknown"}[way.fits]
        style = "bold" if way is chosen and way.fits is not False else None
        peak = storage(way.need.peak_bytes + way.need.work_bytes)
        table.add_row(letter, way.how, peak, storage(way.need.settled_bytes), room, style=style)
    beside = f"beside Ollama: kimigguf serve {source.pasted} --ollama-api"
    table.add_row("c", beside, storage(0), storage(0), "yes", style="bold" if chosen.fits is False else None)
    console.print(table)
    if chosen.fits is False:
        console.print("way c: there is no room for another\n")
    else:
        letter = "ab"[registration.survey.candidates.index(chosen)]
        console.print(f"way {letter}: {registration.survey.reason}\n", markup=False)


def _draw_disk(console: "Console", registration: "Registration") -> None:
    from rich import box
    from rich.table import Table

    need, folder, work = registration.need, registration.folder, registration.survey.work
    console.print("Disk of Ollama's models folder", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("", "taken on top", "free"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    free = folder.free_bytes if folder else None
    rows: tuple[tuple[str, int], ...] = (
        ("now", 0),
        ("at the peak", need.peak_bytes),
        ("when registered", need.after_bytes),
        ("after a restart of Ollama, an hour later", need.settled_bytes),
    )
    if need.way != "merge" or need.present_bytes:
        rows = rows[:3]  # nothing is left to be cleared away, or not all of it is new
    for moment, taken in rows:
        left = None if free is None else free - taken
        short = left is not None and left < 0
        table.add_row(moment, storage(taken), f"{storage(-(left or 0))} short" if short else storage(left))
    console.print(table)
    if need.work_bytes and work is not None:
        console.print(
            f"and {storage(need.work_bytes)} for a while in {work.folder}, where {storage(work.free_bytes)} are free\n",
            markup=False,
        )


def _draw_environment(console: "Console", registration: "Registration") -> None:
    import sys

    from kimigguf.ollama.modelfile import launchctl_lines, shell_lines, systemd_drop_in

    console.print("Environment for Ollama's server", style="bold")
    console.print(
        "LLAMA_ARG_* are no options of Ollama: its llama-server inherits them from the environment of `ollama serve`."
    )
    for variable in registration.environment:
        console.print(f"  {variable.name}={variable.value}  {variable.reason}", markup=False)
    if sys.platform == "darwin":
        how, text = "for the application (start it again afterwards):", launchctl_lines(registration.environment)
    else:
        how, text = "with systemd (sudo systemctl edit ollama):", systemd_drop_in(registration.environment)
    # Plain lines, never wrapped: they are there to be pasted.
    for line in ("", how, text, "or by hand:", shell_lines(registration.environment)):
        console.print(line, markup=False, soft_wrap=True)


def _draw_proof(console: "Console", proof: "Proof") -> None:
    _draw_checks(console, proof.checks)


def _draw_done(console: "Console", registration: "Registration", proof: "Proof") -> None:
    _draw_proof(console, proof)
    _draw_environment(console, registration)
    console.print(f"registered; talk to it with: ollama run {registration.name}", markup=False)
