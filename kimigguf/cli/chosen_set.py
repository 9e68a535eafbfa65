"""The set that verify, repair and remove work on, and commands about it that can be pasted."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf.cli.app import App

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
    """The set that is wanted, as it lies here. ``fetch``: whether one that is not here could be fetched instead.

    Raises:
        UsageError: ``unknown-quant``, ``no-such-file``, and what else is wrong with a path.
        IntegrityError: ``not-downloaded``, ``bad-manifest``, or the files are no set.
    """
    from kimigguf.download.named import CatalogueTarget, look_for, not_here, target_of
    from kimigguf.download.store import models_dir

    target = target_of(wanted.text, app.environ, model=wanted.model_name)
    models = models_dir(app.environ, wanted.models_dir)
    match look_for(target, models):
        case CatalogueTarget(quant=quant):
            # `list` knows no --model: it shows what every model has here.
            here = Wanted(text=wanted.text, models_dir=wanted.models_dir, model_name=DEFAULT_MODEL).command("list")
            raise not_here(quant.name, models, hint=wanted.again("download") if fetch else here)
        case stored:
            return stored
