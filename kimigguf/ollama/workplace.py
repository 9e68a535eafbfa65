"""Where a set can be merged before Ollama gets it: beside its shards, else in Ollama's own folder."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kimigguf.download.disk import existing
from kimigguf.download.manifest import INNER
from kimigguf.ollama.link import why_not_new
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A folder to merge in; it need not exist yet.

    ``apart``: it is on another file system than Ollama's models, or that is not known. ``hindrance`` is why a file made
    there could not be linked into Ollama's blobs, None where it could.
    """

    folder: Path
    free_bytes: int
    apart: bool
    hindrance: str | None


def workplace(source: Source, folder: ModelsFolder | None, *, link: bool) -> Workplace | None:
    """Where to merge; None where nothing can be written.

    To ``link`` the merged file, the first place that it can be linked from; else the first that can be written.
    """
    parents = [source.folder, *((folder.path,) if folder else ())]
    found = [place for parent in parents if (place := _look_at(parent / INNER, folder)) is not None]
    return next((place for place in found if link and place.hindrance is None), found[0] if found else None)


def _look_at(path: Path, folder: ModelsFolder | None) -> Workplace | None:
    try:
        there = existing(path)
        if not os.access(there, os.W_OK | os.X_OK):
            return None
        free, device = shutil.disk_usage(there).free, there.stat().st_dev
    except OSError:
        return None
    return Workplace(
        folder=path,
        free_bytes=free,
        apart=folder is None or folder.device != device,
        hindrance=why_not_new(device, folder),
    )
