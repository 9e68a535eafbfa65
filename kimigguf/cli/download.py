"""``kimigguf download``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf import units
from kimigguf.cli.app import App
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.download.obtain import FetchPlan, Wish
    from kimigguf.download.store import StoredSet


@click.command("download", short_help="Fetch a quant: pinned, checked, resumable, hashed.")
@click.argument("quant")
@click.option("--revision", metavar="COMMIT|BRANCH", help="State of the repository; the catalogue's commit by default.")
@models_option
@click.option("--parallel", type=click.IntRange(1, 64), default=8, show_default=True, help="Requests in flight.")
@click.option("--limit-rate", metavar="SIZE", help="Bytes per second at most, such as 50MB.")
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, and whether it fits; exits with 1 if not.")
@click.option("--keep-previous", is_flag=True, help="Keep an older revision when the new one is verified.")
@click.option(
    "--mmproj", type=click.Choice(["BF16", "F16", "F32"]), help="Fetch the vision projector of this type as well."
)
@click.option("--no-wait", is_flag=True, help="Fail if another process works on this set, rather than wait for it.")
@click.option("--force", is_flag=True, help="Fetch even what no mainline engine can load.")
@click.option("--model", "model_name", default="kimi-k3", show_default=True, help="Model profile.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    quant: str,
    revision: str | None,
    models_dir: Path | None,
    parallel: int,
    limit_rate: str | None,
    dry_run: bool,
    keep_previous: bool,
    mmproj: str | None,
    no_wait: bool,
    force: bool,
    model_name: str,
) -> int:
    """Fetch a quant: pinned to one commit, checked before the first weight, resumable, every shard hashed.

    Interrupted at any moment, the same command continues. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the proxy
    variables are honoured.

    \b
    Examples:
      kimigguf download UD-IQ1_M
      kimigguf download UD-IQ1_M --dry-run
      kimigguf download UD-Q2_K_XL --models-dir /mnt/nvme/models --limit-rate 50MB
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.catalogue.profiles import find_quant, load_model
    from kimigguf.download.obtain import Wish, make_plan, obtain, obtain_projector, refuse_unreadable
    from kimigguf.download.place import settle
    from kimigguf.download.policy import Policy
    from kimigguf.download.store import models_dir as models_folder
    from kimigguf.download.store import named_models_dir

    profile = load_model(model_name, app.environ)
    wish = Wish(profile=profile, quant=find_quant(profile, quant), revision=revision, force=force)
    models = models_folder(app.environ, models_dir)
    told = named_models_dir(app.environ, models_dir) is not None
    rate = max(1, units.parse_size(limit_rate)) if limit_rate else None
    if dry_run:
        refuse_unreadable(wish)
        with app.show.progress() as listen:
            if not told:
                models = settle(models, wish.quant.size_bytes, remember=False, listen=listen)
            plan = make_plan(wish, models, environ=app.environ, listen=listen)
        app.show.answer(_plan_record(wish, plan), lambda console: _draw_plan(console, wish, plan))
        return ExitCode.DONE if plan.fits else ExitCode.ANSWERED_NO
    policy = Policy(connections=parallel, bytes_per_second=rate)
    projector = None
    with app.show.progress() as listen:
        stored = obtain(
            wish,
            models,
            environ=app.environ,
            listen=listen,
            policy=policy,
            keep_previous=keep_previous,
            wait=not no_wait,
            told=told,
        )
        if mmproj is not None:
            models = models_folder(app.environ, models_dir)  # the set may have been the first, and its disk chosen
            projector = obtain_projector(
                wish, mmproj, models, environ=app.environ, listen=listen, policy=policy, wait=not no_wait
            )
    app.show.answer(_record(stored, projector), lambda console: _draw(console, stored, projector))
    return ExitCode.DONE


def _record(stored: "StoredSet", projector: "StoredSet | None") -> dict[str, Any]:
    from kimigguf.download.store import as_json

    vision = str(projector.first) if projector else None
    return {"schema": "kimigguf.download/1", "first": str(stored.first), "mmproj": vision, **as_json(stored)}


def _draw(console: "Console", stored: "StoredSet", projector: "StoredSet | None") -> None:
    size = units.storage(stored.size_bytes)
    console.print(f"{stored.quant} is whole and verified: {size} in {len(stored.files)} shards", markup=False)
    console.print(str(stored.folder), markup=False)
    if projector is not None:
        console.print(f"vision projector: {projector.first}", markup=False)
    console.print(f"next: kimigguf serve {stored.quant}", markup=False)


def _plan_record(wish: "Wish", plan: "FetchPlan") -> dict[str, Any]:
    here = {file.name: file for file in plan.stored.files} if plan.stored else {}
    licence = wish.profile.licence
    return {
        "schema": "kimigguf.download-plan/1",
        "repository": plan.remote.repository,
        "commit": plan.remote.commit,
        "quant": plan.remote.quant,
        "folder": str(plan.folder),
        "licence": {"name": licence.name, "url": licence.url} if licence else None,
        "size_bytes": plan.remote.size_bytes,
        "remaining_bytes": plan.remaining_bytes,
        "need_bytes": plan.need_bytes,
        "free_bytes": plan.free_bytes,
        "fits": plan.fits,
        "files": [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "done_bytes": here[file.name].done_bytes if file.name in here else 0,
                "state": str(here[file.name].state) if file.name in here else "missing",
                "reused_from": str(plan.reusable[file.name]) if file.name in plan.reusable else None,
            }
            for file in plan.remote.files
        ],
        "previous": [{"folder": str(old.folder), "size_bytes": old.done_bytes} for old in plan.previous],
    }


def _draw_plan(console: "Console", wish: "Wish", plan: "FetchPlan") -> None:
    from rich.table import Table

    record = _plan_record(wish, plan)
    table = Table(box=None, pad_edge=False)
    table.add_column("shard")
    table.add_column("size", justify="right")
    table.add_column("here", justify="right")
    for file in record["files"]:
        here = "linked" if file["reused_from"] else units.storage(file["done_bytes"])
        table.add_row(file["name"], units.storage(file["size_bytes"]), here)
    console.print(table)
    console.print(f"{plan.remote.repository} at {plan.remote.commit}", markup=False)
    console.print(f"into {plan.folder}", markup=False)
    console.print(
        f"to fetch {units.storage(plan.remaining_bytes)} of {units.storage(plan.remote.size_bytes)}; "
        f"needs {units.storage(plan.need_bytes)} free, {units.storage(plan.free_bytes)} are: "
        + ("fits" if plan.fits else "does not fit"),
        markup=False,
    )
    for old in plan.previous:
        size = units.storage(old.done_bytes)
        console.print(f"removed once the new one is verified: {old.folder} ({size})", markup=False)
    if (licence := wish.profile.licence) is not None:
        console.print(f"licence: {licence.name} {licence.url or ''}", markup=False)
