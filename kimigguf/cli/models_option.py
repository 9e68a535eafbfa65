"""``--models-dir``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def models_option(function: F) -> F:
    """Add ``--models-dir DIR`` to a command, as its parameter ``models_dir``."""
    return click.option(
        "--models-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder that holds all sets (or KIMIGGUF_MODELS, or models_dir in config.toml).",
    )(function)
