"""What was really measured of a quant on such a machine, as ``recommend`` and ``plan`` show it; never a guess."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from kimigguf.cli.app import App

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.hardware.snapshot import Machine
    from kimigguf.speed.measured import Told

Measured: TypeAlias = "Mapping[str, tuple[Told, ...]]"


def measured_runs(app: App, machine: "Machine", sizes: Mapping[str, int]) -> Measured:
    """The measurements by quant, of those that ``sizes`` names with the bytes of their files. Bad files are noted."""
    from kimigguf.hardware.fingerprint import fingerprint
    from kimigguf.speed.measured import load_runs, matching

    loaded = load_runs(app.environ)
    for problem in loaded.problems:
        app.show.note(f"warning: left out: {problem}")
    here = fingerprint(machine)
    found = {
        quant: matching(loaded.runs, here, quant, size, is_this_one=machine.is_this_one)
        for quant, size in sizes.items()
    }
    return {quant: told for quant, told in found.items() if told}


def record(told: "Told") -> dict[str, Any]:
    """One measurement as JSON values, null for unknown."""
    run = told.run
    return {
        "where": told.where,
        "file": told.file,
        "source": run.source,
        "date": run.date,
        "engine": run.engine,
        "settings": asdict(run.settings),
        "speeds": [asdict(speed) for speed in run.speeds],
        "note": run.note,
    }


def draw(console: "Console", measured: Measured) -> None:
    """A line per measurement, with its note: a report may say "about", or mean something else by "cold"."""
    from kimigguf.speed.measured import in_words

    for quant, runs in measured.items():
        for told in runs:
            note = f"; {told.run.note}" if told.run.note else ""
            console.print(f"measured {told.where}: {quant}: {in_words(told.run)}{note}", markup=False, style="cyan")
