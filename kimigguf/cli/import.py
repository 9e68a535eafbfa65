"""``kimigguf import``."""  # noqa: N999 -- the command's own name; loaded by it, never by a statement

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.catalogue.quants import ModelProfile, Quant
    from kimigguf.download.takeover import Takeover


@click.command("import", short_help="Take over shards that are on this machine already.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--quant", "quant_name", help="Which quant; by default the one that the file names tell.")
@click.option("--revision", metavar="COMMIT|BRANCH", help="State of the repository; the catalogue's commit by default.")
@models_option
@click.option("--model", "model_name", default="kimi-k3", show_default=True, help="Model profile.")
@output_options
@click.pass_obj
def command(
    app: App, *, path: Path, quant_name: str | None, revision: str | None, models_dir: Path | None, model_name: str
) -> int:
    """Take over shards that are on this machine already: an HF cache, LM Studio's folder, any other.

    Every file is hashed against the hub's list, then reflinked, hard-linked or copied; the originals stay as they are.
    Exits with 1 if shards are still missing afterwards.

    \b
    Examples:
      kimigguf import ~/.cache/huggingface/hub/models--unsloth--Kimi-K3-GGUF
      kimigguf import /mnt/old/models --quant UD-IQ1_M
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.catalogue.profiles import find_quant, load_model
    from kimigguf.download import disk, store
    from kimigguf.download.bring import needs_room
    from kimigguf.download.obtain import Wish, listed
    from kimigguf.download.place import settle
    from kimigguf.download.takeover import take_over

    profile = load_model(model_name, app.environ)
    quant = find_quant(profile, quant_name) if quant_name else _quant_of(profile, path)
    models = store.models_dir(app.environ, models_dir)
    with app.show.progress() as listen:
        # On the data folder's own disk a link costs nothing; from elsewhere they go where a download would put them.
        if store.named_models_dir(app.environ, models_dir) is None and needs_room(path, disk.existing(models)):
            models = settle(models, quant.size_bytes, listen=listen)
        remote = listed(
            Wish(profile=profile, quant=quant, revision=revision, force=True),
            models,
            environ=app.environ,
            listen=listen,
        )
        taken = take_over(remote, path, store.set_folder(models, remote), listen=listen)
    files = [
        {
            "name": file.name,
            "source": str(file.source) if file.source else None,
            "how": str(file.how) if file.how else None,
            "reason": file.reason,
        }
        for file in taken.files
    ]
    record = {"schema": "kimigguf.import/1", **store.as_json(taken.stored), "imported": files}
    app.show.answer(record, lambda console: _draw(console, taken))
    return ExitCode.DONE if taken.stored.state is store.SetState.WHOLE else ExitCode.ANSWERED_NO


def _quant_of(profile: "ModelProfile", path: Path) -> "Quant":
    """The one quant whose name stands in the names of the GGUF files at ``path``.

    Raises:
        UsageError: ``which-quant`` if there is none, or more than one.
    """
    files = [path] if path.is_file() else list(path.rglob("*.gguf"))
    found = [
        q for q in profile.quants if any(f"-{q.name}-" in file.name or f"-{q.name}." in file.name for file in files)
    ]
    if len(found) == 1:
        return found[0]
    several = ", ".join(quant.name for quant in found)
    raise UsageError(
        f"{path} holds several quants: {several}" if found else f"no file in {path} is named like a quant",
        code="which-quant",
        hint=f"kimigguf import {path} --quant {found[0].name if found else profile.quants[0].name}",
    )


def _draw(console: "Console", taken: "Takeover") -> None:
    for file in taken.files:
        console.print(f"{file.how or '-':<10} {file.name}  {file.reason or ''}", markup=False)
    stored = taken.stored
    have, size = units.storage(stored.done_bytes), units.storage(stored.size_bytes)
    console.print(f"{stored.quant} is {stored.state}: {have} of {size}", markup=False)
    console.print(str(stored.folder), markup=False)
    if stored.done_bytes < stored.size_bytes:
        console.print(f"fetch the rest: kimigguf download {stored.quant}", markup=False)
