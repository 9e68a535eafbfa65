"""The set that verify, repair and remove work on, and commands about it that can be pasted."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf.cli.app import App
from kimigguf.cli.models_option import stored_set
from kimigguf.errors import UsageError

if TYPE_CHECKING:
    from kimigguf.download.store import StoredSet

DEFAULT_MODEL: Final = "kimi-k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a user named, with the options that say where to look for it."""

    text: str
    models_dir: Path | None
    model_name: str

    def command(self, *words: str, about: str | Path | None = None) -> str:
        """``kimigguf WORDS`` with the same options, about ``about``; quoted for a shell.

        A hint that dropped an option would mean another set than the one the user is looking at.
        """
        options: list[str] = []
        if self.models_dir is not None:
            options += ["--models-dir", str(self.models_dir)]
        if self.model_name != DEFAULT_MODEL:
            options += ["--model", self.model_name]
        last = [] if about is None else [str(about)]
        if last and last[0].startswith("-"):
            last.insert(0, "--")
        return shlex.join(["kimigguf", *words, *options, *last])

    def again(self, *words: str) -> str:
        """The command ``words`` about the same thing."""
        return self.command(*words, about=self.text)


def chosen_set(app: App, wanted: Wanted, *, fetch: bool = True) -> "StoredSet":
    """The set that is wanted. ``fetch``: whether one that is not here could be fetched instead.

    Raises:
        UsageError: ``no-such-file`` for a path that leads nowhere, ``not-downloaded``, and as ``stored_set`` has it.
        IntegrityError: As ``stored_set`` has it.
    """
    if _is_path(wanted.text) and not os.path.exists(wanted.text):  # noqa: PTH110 -- Path.exists raises where a folder above cannot be read
        raise UsageError(f"there is no file or folder {wanted.text}", code="no-such-file")
    try:
        return stored_set(app, wanted.text, wanted.models_dir, wanted.model_name)
    except UsageError as error:
        if error.code != "not-downloaded":
            raise
        # `list` knows no --model: it shows what every model has here.
        here = Wanted(text=wanted.text, models_dir=wanted.models_dir, model_name=DEFAULT_MODEL).command("list")
        hint = wanted.again("download") if fetch else here
        raise UsageError(error.message, code=error.code, cause=error.cause, hint=hint) from error


def _is_path(text: str) -> bool:
    """Whether a text can only be a path: no quant has a slash in its name, or ends like a file."""
    return "/" in text or os.sep in text or text.lower().endswith(".gguf")
