"""``kimigguf verify``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.chosen_set import DEFAULT_MODEL, Wanted, chosen_set
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.download.store import StoredSet
    from kimigguf.download.verify import Verification

_COLOURS = {"ok": "green", "unknown": "yellow"}


@click.command("verify", short_help="Re-hash a downloaded quant and name every bad shard.")
@click.argument("quant_or_path", metavar="QUANT|PATH")
@click.option("--quick", is_flag=True, help="Sizes, headers, first and last MiB only; seconds instead of minutes.")
@models_option
@click.option("--model", "model_name", default=DEFAULT_MODEL, show_default=True, help="Model profile.")
@output_options
@click.pass_obj
def command(app: App, *, quant_or_path: str, quick: bool, models_dir: Path | None, model_name: str) -> int:
    """Re-hash a downloaded quant, on all cores, and name every bad shard (with the range, where it is known).

    Exits with 0 only if every shard is proved right: with 5 if one is damaged or missing, and with 1 if one can be
    neither proved nor refuted, because nobody has said what its hash should be or --quick did not hash it. An engine
    would load a damaged shard without a word.

    \b
    Examples:
      kimigguf verify UD-IQ1_M
      kimigguf verify --quick ~/models/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.download.verify import check_belonging, verify

    wanted = Wanted(text=quant_or_path, models_dir=models_dir, model_name=model_name)
    stored = chosen_set(app, wanted)
    check_belonging(stored)
    with app.show.progress() as listen:
        verification = verify(stored, quick=quick, listen=listen)
    app.show.answer(_record(stored, verification), lambda console: _draw(console, wanted, stored, verification))
    if verification.bad:
        return ExitCode.INTEGRITY
    return ExitCode.ANSWERED_NO if _unproved(verification) else ExitCode.DONE


def _unproved(verification: "Verification") -> int:
    """How many files can be called neither right nor wrong."""
    from kimigguf.download.verify import Verdict

    return sum(file.verdict is Verdict.UNKNOWN for file in verification.files)


def _record(stored: "StoredSet", verification: "Verification") -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "schema": "kimigguf.verify/1",
        "folder": str(stored.folder),
        "repository": manifest.repository if manifest else None,
        "commit": manifest.commit if manifest else None,
        "quant": stored.quant,
        "quick": verification.quick,
        "good": False if verification.bad else None if _unproved(verification) else True,
        "hashed_bytes": verification.hashed_bytes,
        "seconds": round(verification.seconds, 3),
        "files": [
            {
                "name": file.name,
                "verdict": str(file.verdict),
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "bad_from_bytes": file.bad_from_bytes,
                "bad_to_bytes": file.bad_to_bytes,
                "reason": file.reason,
            }
            for file in verification.files
        ],
    }


def _draw(console: "Console", wanted: Wanted, stored: "StoredSet", verification: "Verification") -> None:
    from rich.text import Text

    for file in verification.files:
        line = Text.assemble(
            (f"{file.verdict:<10}", _COLOURS.get(file.verdict, "bold red")),
            f" {file.name}  {units.storage(file.size_bytes)}",
        )
        console.print(line)
        if file.reason:
            console.print(f"           {file.reason}", markup=False)
    if verification.hashed_bytes and verification.seconds > 0:
        rate = units.rate(verification.hashed_bytes / verification.seconds)
        size, seconds = units.storage(verification.hashed_bytes), units.duration(verification.seconds)
        console.print(f"hashed {size} in {seconds} ({rate})", markup=False)
    if verification.bad:
        console.print(f"{len(verification.bad)} of {len(verification.files)} shards are bad", style="bold red")
        if stored.manifest:
            console.print(f"fetch what is bad: {wanted.again('repair')}", markup=False)
    elif unproved := _unproved(verification):
        of = f"{unproved} of {len(verification.files)} shards"
        why = (
            f"{of} were not hashed; without --quick they are"
            if verification.quick and stored.manifest
            else f"nobody has said what the hash of {of} should be"
        )
        console.print(f"NOT VERIFIED: {why}", style="bold yellow", markup=False)
