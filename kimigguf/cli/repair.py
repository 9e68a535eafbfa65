"""``kimigguf repair``."""

from pathlib import Path

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.chosen_set import DEFAULT_MODEL, Wanted, chosen_set
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError


@click.command("repair", short_help="Fetch again only what is bad of a downloaded quant.")
@click.argument("quant_or_path", metavar="QUANT|PATH")
@models_option
@click.option("--model", "model_name", default=DEFAULT_MODEL, show_default=True, help="Model profile.")
@output_options
@click.pass_obj
def command(app: App, *, quant_or_path: str, models_dir: Path | None, model_name: str) -> int:
    """Hash a downloaded quant and fetch again only what is bad: missing shards, and of damaged ones the bad 64 MiB.

    \b
    Example:
      kimigguf repair UD-IQ1_M
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.download.repair import repair
    from kimigguf.download.store import as_json

    wanted = Wanted(text=quant_or_path, models_dir=models_dir, model_name=model_name)
    stored = chosen_set(app, wanted)
    if stored.manifest is None:
        raise UsageError(
            f"nobody has said what the files of {stored.first} should be",
            code="foreign-set",
            cause="kimigguf did not fetch them; import hashes them against the hub and takes over what is right",
            hint=wanted.command("import", about=stored.folder),
        )
    with app.show.progress() as listen:
        done = repair(stored, environ=app.environ, listen=listen)
    bad = [{"name": file.name, "verdict": str(file.verdict), "reason": file.reason} for file in done.found.bad]
    app.show.answer(
        {"schema": "kimigguf.repair/1", "repaired": bad, **as_json(done.stored)},
        lambda console: console.print(
            f"{len(bad)} of {len(done.stored.files)} shards were bad; "
            f"{done.stored.quant} ({units.storage(done.stored.size_bytes)}) is {done.stored.state} now",
            markup=False,
        ),
    )
    return ExitCode.DONE
