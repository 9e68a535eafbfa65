"""Which set a user means by QUANT|PATH: one answer for every command, and one set of errors.

What cannot be meant (no such quant, no such file) is a usage error (exit code 2); a set that is meant and is not whole
on this machine (nothing of it, a shard missing or damaged) is one of integrity (5).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.catalogue.quants import EngineNeed, ModelProfile, Quant
from kimigguf.download.store import FileState, SetState, StoredSet, locate, stored_at
from kimigguf.errors import IntegrityError, UsageError
from kimigguf.home import whole

DEFAULT_MODEL: Final = "kimi-k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueTarget:
    """A quant of the catalogue."""

    profile: ModelProfile
    quant: Quant

    @property
    def need(self) -> EngineNeed:
        return self.quant.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTarget:
    """Files on this machine: any shard of a set, a single file, or a folder. ``text`` is what was typed."""

    path: Path
    text: str

    @property
    def need(self) -> None:
        return None


Target = CatalogueTarget | PathTarget


def target_of(text: str, environ: Mapping[str, str], *, model: str = DEFAULT_MODEL) -> Target:
    """What the user means: a path if it can only be one or nothing else fits, else a quant's name.

    A folder that is called like a quant is written ``./UD-IQ1_M``.

    Raises:
        UsageError: ``unknown-quant`` with the nearest names.
    """
    path = whole(text)
    if is_path(text):
        return PathTarget(path=path, text=text)
    profile = load_model(model, environ)
    try:
        return CatalogueTarget(profile=profile, quant=find_quant(profile, text))
    except UsageError:
        if os.path.exists(path):  # noqa: PTH110 -- Path.exists raises where a folder above cannot be read
            return PathTarget(path=path, text=text)
        raise


def is_path(text: str) -> bool:
    """Whether a text can only be a path: no quant has a slash in its name, begins with a dot or ends like a file."""
    return "/" in text or os.sep in text or text.startswith(("~", ".")) or text.lower().endswith(".gguf")


def look_for(target: Target, models: Path) -> StoredSet | CatalogueTarget:
    """What of the target lies on this machine, as it is; the target again for a quant of which there is nothing.

    Raises:
        UsageError: ``no-such-file``, ``unreadable-file``, and as ``find_set`` has it.
        IntegrityError: ``bad-manifest``, and as ``find_set`` has it.
    """
    match target:
        case PathTarget(path=path, text=text):
            try:
                path.stat()
                return stored_at(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise UsageError(f"there is no file or folder {text}", code="no-such-file") from error
            except OSError as error:
                raise UsageError(f"cannot read {text}", code="unreadable-file", cause=error.strerror) from error
        case CatalogueTarget(profile=profile, quant=quant):
            return locate(models, quant, repository=profile.repository.id) or target


def present(target: Target, models: Path) -> StoredSet | CatalogueTarget:
    """The set, complete by name and size; the target for a quant that is still to be fetched, in whole or in part.

    Raises:
        UsageError: As ``look_for``.
        IntegrityError: ``damaged-shard``, ``missing-shard``, and as ``look_for``.
    """
    found = look_for(target, models)
    if isinstance(found, CatalogueTarget):
        return found
    if isinstance(target, CatalogueTarget) and found.state is SetState.PARTIAL:
        return target
    return complete(found)


def complete(stored: StoredSet) -> StoredSet:
    """The set if no shard is missing or of the wrong size: what a look can tell, before anything is hashed.

    Raises:
        IntegrityError: ``damaged-shard``, ``missing-shard``.
    """
    bad = [file for file in stored.files if file.state not in {FileState.VERIFIED, FileState.UNVERIFIED}]
    if not bad:
        return stored
    first = bad[0]
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    fix = f"kimigguf download {stored.quant}" if stored.quant else "fetch it again from where the others came from"
    if first.state is FileState.WRONG_SIZE:
        raise IntegrityError(
            f"{first.name} is damaged{others}",
            code="damaged-shard",
            cause=f"it should have {first.size_bytes:,} bytes",
            hint=fix,
        )
    raise IntegrityError(
        f"{first.name} is missing{others}",
        code="missing-shard",
        cause=f"{first.done_bytes:,} of {first.size_bytes:,} bytes are in {stored.folder}",
        hint=fix,
    )


def not_here(quant: str, models: Path, *, hint: str, because: str = "") -> IntegrityError:
    """What to say of a quant that is meant and of which nothing lies on this machine."""
    return IntegrityError(
        f"{quant} is not on this machine",
        code="not-downloaded",
        cause=f"nothing of it lies in {models}{because}",
        hint=hint,
    )
