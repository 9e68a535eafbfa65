"""``--models-dir``, and how commands find a set that is on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kimigguf.cli.app import App
from kimigguf.errors import UsageError

if TYPE_CHECKING:
    from kimigguf.download.store import StoredSet

F = TypeVar("F", bound=Callable[..., Any])


def models_option(function: F) -> F:
    """Add ``--models-dir DIR`` to a command, as its parameter ``models_dir``."""
    return click.option(
        "--models-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder that holds all sets (or KIMIGGUF_MODELS, or models_dir in config.toml).",
    )(function)


def stored_set(app: App, text: str, models_dir: Path | None, model_name: str) -> "StoredSet":
    """The set that a user means by a quant's name or a path; any shard of a set, or its folder, means the set.

    Raises:
        UsageError: ``unknown-quant``, ``not-downloaded``, or what is wrong with the path.
        IntegrityError: ``bad-manifest``, or the files are no set.
    """
    from kimigguf.catalogue.profiles import find_quant, load_model
    from kimigguf.download import store

    profile = load_model(model_name, app.environ)
    try:
        quant = find_quant(profile, text)
    except UsageError:
        if Path(text).exists():  # a folder that is named like a quant is written ./UD-IQ1_M
            return store.stored_at(Path(text))
        raise
    models = store.models_dir(app.environ, models_dir)
    stored = store.locate(models, quant, repository=profile.repository.id)
    if stored is None:
        raise UsageError(
            f"{quant.name} is not on this machine",
            code="not-downloaded",
            cause=f"nothing of it lies in {models}",
            hint=f"kimigguf download {quant.name}",
        )
    return stored
