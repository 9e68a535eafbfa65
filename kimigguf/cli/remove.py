"""``kimigguf remove``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.chosen_set import DEFAULT_MODEL, Wanted, chosen_set
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kimigguf.download.store import StoredSet


@click.command("remove", short_help="Delete a downloaded quant, after showing what goes.")
@click.argument("quant_or_path", metavar="QUANT|PATH")
@click.option("--yes", is_flag=True, help="Do not ask.")
@models_option
@click.option("--model", "model_name", default=DEFAULT_MODEL, show_default=True, help="Model profile.")
@output_options
@click.pass_obj
def command(app: App, *, quant_or_path: str, yes: bool, models_dir: Path | None, model_name: str) -> int:
    """Delete a downloaded quant: all its revisions by name, or exactly one by its folder. Shows what goes, and asks.

    Only files that kimigguf fetched or imported are deleted; imported originals stay where they were.

    \b
    Examples:
      kimigguf remove UD-IQ1_M
      kimigguf remove --yes ~/models/unsloth--Kimi-K3-GGUF/UD-IQ1_M/a0836360ce58
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.download.obtain import remove

    wanted = Wanted(text=quant_or_path, models_dir=models_dir, model_name=model_name)
    going = _sets(app, wanted)
    for stored in going:
        _refuse_foreign(stored)
    for stored in going:
        app.show.note(f"{stored.folder}: {stored.state}, {len(stored.files)} files, {units.storage(stored.done_bytes)}")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody is there to be asked", code="not-confirmed", hint=wanted.again("remove", "--yes"))
        if not click.confirm("delete this?", err=True):
            return ExitCode.ANSWERED_NO
    freed = sum(stored.done_bytes for stored in going)
    for stored in going:
        for name in remove(stored, wait=False):
            app.show.note(f"{stored.folder / name} is not ours, and stays")
    record = {
        "schema": "kimigguf.remove/1",
        "removed": [{"folder": str(stored.folder), "size_bytes": stored.done_bytes} for stored in going],
        "freed_bytes": freed,
    }
    app.show.answer(record, lambda console: console.print(f"{units.storage(freed)} deleted", markup=False))
    return ExitCode.DONE


def _refuse_foreign(stored: "StoredSet") -> None:
    """Say at once, before anybody is asked, that a set of somebody else's is not deleted here.

    Raises:
        UsageError: ``foreign-set``; the hint names this set's files alone, for its folder may hold more than them.
    """
    if stored.manifest is None:
        raise UsageError(
            f"{stored.first} was neither fetched nor imported by kimigguf",
            code="foreign-set",
            cause="kimigguf deletes only what it has written; the files of this set are yours to delete",
            hint=shlex.join(["rm", "--", *(str(file.path) for file in stored.files)]),
        )


def _sets(app: App, wanted: Wanted) -> "tuple[StoredSet, ...]":
    """Every revision of a quant, or the one set at a path."""
    from kimigguf.download import store

    one, path = chosen_set(app, wanted, fetch=False), Path(wanted.text).resolve()
    if one.manifest is None or one.folder.resolve() in {path, path.parent}:
        return (one,)
    manifest = one.manifest
    return tuple(
        stored
        for stored in store.managed_sets(store.models_dir(app.environ, wanted.models_dir))
        if stored.manifest is not None
        and (stored.manifest.repository, stored.manifest.quant) == (manifest.repository, manifest.quant)
    )
