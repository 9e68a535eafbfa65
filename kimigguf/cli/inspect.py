"""``kimigguf inspect``: what this machine has, as one screen, as JSON, as a machine file or as a public report."""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf import __version__
from kimigguf.cli.app import App
from kimigguf.cli.show import output_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from kimigguf.catalogue.quants import ModelProfile
    from kimigguf.engines.engine import FoundEngine
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.ollama.server import OllamaServer

SCHEMA: Final = "kimigguf.inspect/1"
WAIT_SECONDS: Final = 1.0
"""How long a probe may take by default, so that the whole stays under 1.5 s whatever hangs."""
_VERDICT_UNTIL_SECONDS: Final = 0.9
"""The verdict takes a third of a second: it is left to `recommend` when something has hung until here."""
_MOST_ROWS: Final = {"GPU": 4, "Disk": 4, "Engine": 3}
_MOST_NOTICES: Final = 2
_SCREEN_LINES: Final = 24
_LABEL_COLUMNS: Final = 9
"""What the grid's first column and the gap behind it take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The machine and the ways to run a model on it. None: not told in time, with the reason in ``problems``."""

    machine: "Machine"
    engines: "tuple[FoundEngine, ...] | None"
    ollama: "OllamaServer | None"
    problems: tuple[str, ...] = ()
    verdict: str | None = None


def look(app: App, wait_seconds: float = WAIT_SECONDS) -> Picture:
    """Ask hardware, engines and Ollama side by side, each with its own limit of ``wait_seconds``."""
    import psutil

    from kimigguf.engines.cross_check import disagreements, remarks
    from kimigguf.engines.discover import discover
    from kimigguf.hardware.detect import detect
    from kimigguf.hardware.measure import with_direct_io
    from kimigguf.hardware.probes import ask_all
    from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Machine
    from kimigguf.ollama.server import look as look_at_ollama

    started = time.monotonic()
    before = frozenset(child.pid for child in psutil.Process().children())
    probes: dict[str, Callable[[], Any]] = {
        "machine": lambda: detect(environ=app.environ, limit_seconds=wait_seconds),
        "models folder": lambda: _try_models_folder(app),
        "engines": lambda: discover(app.environ),
        "ollama": lambda: look_at_ollama(app.environ),
        "verdict": lambda: _judge(app),
    }
    # A moment more than the detectors have, so that what they found in time is not lost.
    answers = ask_all(probes, limit_seconds=wait_seconds + 0.05)
    machine: Machine = answers["machine"].value or Machine(name=THIS_MACHINE, source=DETECTED)
    engines: tuple[FoundEngine, ...] | None = answers["engines"].value
    if (tried := answers["models folder"].value) is not None:
        machine = with_direct_io(machine, *tried)
    if engines is None:
        _end_children(but=before)
        engines = unasked_engines(app.environ) or None
    judge: Callable[[Machine], str] | None = answers["verdict"].value
    silent = [f"{name}: {answer.reason}" for name, answer in answers.items() if answer.reason is not None]
    if any("no answer within" in reason for reason in [*silent, *(one.reason for one in machine.unknown)]):
        silent.append("kimigguf inspect --wait 10 gives what was slow more time")
    in_time = time.monotonic() - started < max(_VERDICT_UNTIL_SECONDS, wait_seconds - 0.1)
    return Picture(
        machine=machine,
        engines=engines,
        ollama=answers["ollama"].value,
        problems=(*silent, *disagreements(machine, engines or ()), *remarks(machine, engines or ())),
        verdict=judge(machine) if judge is not None and in_time else None,
    )


def _try_models_folder(app: App) -> tuple[Path, bool | None]:
    """Where models go (or the nearest folder above it that is there), and whether it takes O_DIRECT."""
    from kimigguf.download.store import models_dir
    from kimigguf.hardware.measure import takes_direct_io

    folder = models_dir(app.environ).resolve()
    present = next((above for above in (folder, *folder.parents) if above.is_dir()), folder)
    return present, takes_direct_io(present)


def _end_children(*, but: frozenset[int]) -> None:
    """End what an unanswered probe has started, so that a hung engine does not outlive the command."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if child.pid not in but:
                for process in (*child.children(recursive=True), child):
                    process.kill()


def unasked_engines(environ: "Mapping[str, str]") -> "tuple[FoundEngine, ...]":
    """The engines that lie where one is looked for, without starting any: one that loads CUDA can take seconds."""
    import shutil

    from kimigguf.engines.discover import ENVIRONMENT_VARIABLE
    from kimigguf.engines.engine import EngineKind, FoundEngine

    named = environ.get(ENVIRONMENT_VARIABLE)
    places = [(EngineKind.LLAMA_SERVER, named, ENVIRONMENT_VARIABLE)] if named else []
    places += [
        (kind, path, "PATH")
        for kind in (EngineKind.LLAMA_SERVER, EngineKind.LLAMA)
        if (path := shutil.which(kind.value, path=environ.get("PATH", ""))) is not None
    ]
    return tuple(
        FoundEngine(
            kind=kind,
            path=path,
            version=None,
            build=None,
            supports_k3=None,
            backends=None,
            reason="it did not answer in time",
            chosen_by=chosen_by,
        )
        for kind, path, chosen_by in places
    )


def _judge(app: App) -> "Callable[[Machine], str]":
    """What says in one line which quant a machine can hold, loaded beside the probes since loading takes longest."""
    from functools import partial

    from kimigguf.catalogue.profiles import load_model
    from kimigguf.placement import recommend  # noqa: F401 -- loaded here, in its thread, for `verdict`

    return partial(verdict, load_model(environ=app.environ))


def verdict(profile: "ModelProfile", machine: "Machine") -> str:
    """One line: the best quant that the machine can hold, by the same rule as ``recommend``."""
    from kimigguf.memory.settings import Settings
    from kimigguf.placement.budget import budget
    from kimigguf.placement.recommend import Prefer, recommend

    answer = recommend(profile, budget(machine), machine.disks, Settings(), Prefer.QUALITY)
    if answer.recommended is None:
        return f"this machine holds no quant of {profile.title}; see kimigguf recommend"
    return f"this machine can hold {answer.recommended}; see kimigguf recommend"


def measured(app: App, picture: Picture, models_dir: Path | None) -> Picture:
    """The picture with measured rates; what cannot be measured is a note, not the end of the command."""
    from dataclasses import replace
    from datetime import UTC, datetime
    from functools import partial

    from kimigguf.download.store import models_dir as models_folder
    from kimigguf.errors import MachineError
    from kimigguf.hardware.host import Host
    from kimigguf.hardware.measure import measure_disk, measure_memory

    machine, problems = picture.machine, list(picture.problems)
    with app.show.progress() as listen:
        for measure in (
            partial(measure_memory, host=Host(environ=app.environ)),
            partial(measure_disk, folder=models_folder(app.environ, models_dir)),
        ):
            try:
                machine = measure(machine, listen=listen)
            except MachineError as error:
                problems.append(f"{error.message}: {error.cause or error.hint}")
    if machine.accelerators:
        problems.append("the GPUs' own rates are not measured: no engine here tells them")
    machine = replace(machine, measured_on=datetime.now(UTC).date().isoformat())
    return replace(picture, machine=machine, problems=tuple(problems))


def to_data(picture: Picture) -> dict[str, Any]:
    """The answer as JSON."""
    from kimigguf.hardware.machines import to_data as machine_data

    return {
        "schema": SCHEMA,
        "machine": machine_data(picture.machine),
        "engines": None if picture.engines is None else [asdict(engine) for engine in picture.engines],
        "ollama": None if picture.ollama is None else asdict(picture.ollama),
        "problems": list(picture.problems),
        "verdict": picture.verdict,
    }


def rows(picture: Picture) -> list[tuple[str, str]]:
    """Everything as (label, text)."""
    from kimigguf.hardware.describe import rows as machine_rows

    found = machine_rows(picture.machine)
    if picture.engines is None:
        found.append(("Engine", "unknown"))
    else:
        lines = [_engine_line(engine) for engine in picture.engines] or ["none found; see kimigguf serve --help"]
        found += [("Engine" if index == 0 else "", line) for index, line in enumerate(lines)]
        found += [("Build", line) for engine in picture.engines if (line := _build_line(engine)) is not None]
    found.append(("Ollama", "unknown" if picture.ollama is None else _ollama_line(picture.ollama)))
    found.append(("Verdict", picture.verdict or "see kimigguf recommend"))
    return found


def _engine_line(engine: "FoundEngine") -> str:
    answer = {True: "K3: yes", False: "K3: no", None: "K3: unknown"}[engine.supports_k3]
    backends = " ".join(engine.backends) if engine.backends is not None else "backends unknown"
    build = f"build {engine.build}" if engine.build is not None else engine.version or "version unknown"
    return " · ".join([engine.kind.value, build, answer, backends, engine.path or ""]).rstrip(" ·")


def _build_line(engine: "FoundEngine") -> str | None:
    built = engine.built
    if built is None:
        return None
    cuda = f"CUDA {built.cuda_version or 'of unknown version'}" if "cuda" in (built.backends or ()) else ""
    parts = (
        engine.kind.value,
        "with " + " ".join(built.backends) if built.backends is not None else "backends unknown",
        cuda,
        "for compute " + " ".join(built.cuda_architectures) if built.cuda_architectures else "",
        f"CPU variant {built.cpu_variant} of {len(built.cpu_variants)}" if built.cpu_variant else "",
        "CPU code: " + (" ".join(built.cpu_extensions) if built.cpu_extensions is not None else "unknown"),
        *(f"{one.what} unknown: {one.reason}" for one in built.unknown),
    )
    return " · ".join(filter(None, parts))


def _ollama_line(ollama: "OllamaServer") -> str:
    if not ollama.reachable:
        return f"not running ({ollama.reason})"
    answer = {True: "K3: yes", False: "K3: no", None: "K3: unknown"}[ollama.supports_k3]
    return f"{ollama.version or 'version unknown'} · {answer} · {ollama.url}"


def draw(picture: Picture, console: "Console", *, verbose: bool) -> None:
    """The first screen: a line per part, notes whole where they fit, at most 24 of 80 columns unless ``verbose``."""
    from rich.table import Table
    from rich.text import Text

    machine = picture.machine
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=7)
    table.add_column(overflow="fold")
    shown = rows(picture) if verbose else _short(rows(picture))
    for label, line in shown:
        text = Text(line) if verbose else Text(line, overflow="ellipsis", no_wrap=True)
        table.add_row(Text(label, style="bold"), text)
    notices = (*machine.notices, *picture.problems)
    told = notices if verbose else notices[:_MOST_NOTICES]
    room = _SCREEN_LINES - len(shown) - len(told) - 1
    for notice in told:
        text = Text(notice)
        more = len(text.wrap(console, console.width - _LABEL_COLUMNS)) - 1
        if verbose or more <= room:
            room -= more
        else:
            text = Text(notice, overflow="ellipsis", no_wrap=True)
        table.add_row(Text("Note", style="bold yellow"), text)
    for one in machine.unknown if verbose else ():
        table.add_row(Text("Unknown", style="dim"), Text(f"{one.what}: {one.reason}"))
    if not verbose and (machine.unknown or len(notices) > _MOST_NOTICES):
        counted = ((len(machine.unknown), "fact unknown", "facts unknown"), (len(notices), "note", "notes"))
        words = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counted if count)
        rest = f"{words}; the whole: kimigguf inspect -v"
        table.add_row("", Text(rest, style="dim"))
    console.print(table)


def _short(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rows with no more GPUs, disks and engines than the screen has room for."""
    kept: list[tuple[str, str]] = []
    label, count, hidden = "", 0, 0
    for row in [*(row for row in found if row[0] != "Build"), ("end", "")]:
        label, count = (row[0], 1) if row[0] else (label, count + 1)
        if row[0] and hidden:
            kept.append(("", f"and {hidden} more; see kimigguf inspect -v"))
            hidden = 0
        if count > _MOST_ROWS.get(label, count):
            hidden += 1
        else:
            kept.append(row)
    return kept[:-1]


def report(picture: Picture) -> str:
    """One Markdown block for a bug report, without host names, serials, user names or addresses."""
    from dataclasses import replace

    from kimigguf.hardware.describe import anonymous, without_personal_details

    machine = without_personal_details(picture.machine)
    lines = [f"**kimigguf {__version__} inspect**", "", "| part | what |", "|---|---|"]
    lines += [
        f"| {label} | {anonymous(text).replace('|', '/')} |" for label, text in rows(replace(picture, machine=machine))
    ]
    lines += [f"| Note | {anonymous(notice).replace('|', '/')} |" for notice in (*machine.notices, *picture.problems)]
    lines += [f"| Unknown | {one.what}: {one.reason.replace('|', '/')} |" for one in machine.unknown]
    return "\n".join(lines)


@click.command("inspect", short_help="Show what this machine has: memory, accelerators, disks, engines.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a machine file.")
@click.option("--force", is_flag=True, help="Let --save write over a file.")
@click.option(
    "--wait",
    type=click.FloatRange(0.05, 60),
    default=WAIT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long anything may take to answer; a sleeping GPU driver needs more.",
)
@click.option("--measure", is_flag=True, help="Measure how fast memory and the models' disk read (about 30 s).")
@click.option("--models-dir", type=click.Path(path_type=Path), help="Folder whose disk --measure reads.")
@click.option("--report", "as_report", is_flag=True, help="Print Markdown for a bug report, without personal details.")
@click.option("-v", "--verbose", is_flag=True, help="Show every fact, and the reason of each that is unknown.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    save: Path | None,
    force: bool,
    wait: float,
    measure: bool,
    models_dir: Path | None,
    as_report: bool,
    verbose: bool,
) -> None:
    """Show what this machine has: memory, accelerators, disks, engines.

    What cannot be told is unknown, with the reason (-v). Without --measure it takes no longer than about a second.

    \b
    Examples:
      kimigguf inspect
      kimigguf inspect --save box.toml && kimigguf recommend --machine box.toml
      kimigguf inspect --report        paste this into a bug report
      kimigguf inspect --measure --save box.toml
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    if save is not None and not force:
        from kimigguf.hardware.machines import refuse_existing

        refuse_existing(save)  # before the half minute that a measurement takes
    picture = look(app, wait)
    if measure:
        picture = measured(app, picture, models_dir)
    if save is not None:
        from kimigguf.hardware.machines import save as save_machine

        save_machine(picture.machine, save, overwrite=force)
        app.show.note(f"wrote {save}")
    if as_report:
        text = report(picture)
        app.show.answer(
            {"schema": "kimigguf.report/1", "markdown": text},
            lambda console: console.print(text, markup=False, soft_wrap=True),
        )
        return
    app.show.answer(to_data(picture), lambda console: draw(picture, console, verbose=verbose))
