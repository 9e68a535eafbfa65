"""Finds the files that a user means: a downloaded quant, or any shard, folder or file on this machine."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from kimigguf.catalogue.profiles import load_model
from kimigguf.catalogue.quants import ModelProfile, Quant
from kimigguf.download import named, store
from kimigguf.download.store import FileState, StoredSet
from kimigguf.errors import MachineError
from kimigguf.gguf_file import shards
from kimigguf.ollama.source import Source, SourceFile

_TEMPLATE: Final = "tokenizer.chat_template"


def find_source(text: str, environ: Mapping[str, str], models_dir: Path | None = None) -> Source:
    """What a user means by QUANT|PATH; any shard of a set, and its folder, mean the whole set.

    Raises:
        UsageError: No such quant or path, or a path that is no GGUF.
        MachineError: ``unreadable-folder``.
        IntegrityError: A set that is incomplete or damaged.
    """
    profile = load_model(environ=environ)
    target = named.target_of(text, environ)
    if isinstance(target, named.PathTarget):
        _must_open(target.path)
    models = store.models_dir(environ, models_dir)
    found = named.look_for(target, models)
    if isinstance(found, named.CatalogueTarget):
        return Source(
            label=found.quant.name,
            quant=found.quant,
            architecture=profile.architecture,
            size_bytes=found.quant.size_bytes,
            folder=models,
            models_dir=models_dir,
        )
    return replace(describe(found, profile), named=text, models_dir=models_dir)


def _must_open(path: Path) -> None:
    whole = path.absolute()
    for folder in (*reversed(whole.parents), whole):
        # Only in the set's own folder names are looked for.
        last = folder == whole or (folder == whole.parent and not os.path.isdir(whole))  # noqa: PTH112 -- as below
        if os.path.isdir(folder) and not os.access(folder, os.X_OK | (os.R_OK if last else 0)):  # noqa: PTH112 -- Path.is_dir raises below a closed folder
            raise MachineError(
                f"this user may not look into {folder}",
                code="unreadable-folder",
                hint=f"sudo chmod a+rx {shlex.quote(str(folder))}",
            )


def describe(stored: StoredSet, profile: ModelProfile) -> Source:
    """Look at a set's files and read their headers.

    Raises:
        IntegrityError: A shard is missing, of the wrong size, or does not belong to the set.
    """
    stored = named.complete(stored)
    paths = tuple(file.path for file in stored.files)
    unreadable = tuple(path.name for path in paths if not os.access(path, os.R_OK))
    read = None if unreadable else shards.read_set(paths)
    folder = stored.folder.absolute()
    quant = _named_quant(stored.quant or paths[0].name, profile)
    return Source(
        label=quant.name if quant else paths[0].stem.partition("-00001-of-")[0],
        quant=quant,
        architecture=read.architecture if read else None,
        size_bytes=stored.size_bytes,
        files=tuple(
            SourceFile(
                path=file.path,
                size_bytes=file.size_bytes,
                sha256=file.sha256,
                verified=file.state is FileState.VERIFIED,
            )
            for file in stored.files
        ),
        folder=folder,
        unread_tensors=sum(1 for tensor in read.tensors if tensor.size_bytes is None) if read else 0,
        projectors=tuple(sorted(path.name for path in folder.glob("*mmproj*.gguf"))),
        links=tuple(path.name for path in paths if path.is_symlink()),
        unreadable=unreadable,
        template=_template_of(read) if read else None,
    )


def _template_of(read: shards.ShardSet) -> str | None:
    value = read.metadata.get(_TEMPLATE)
    return value if isinstance(value, str) else None


def _named_quant(text: str, profile: ModelProfile) -> Quant | None:
    """The quant whose name stands in a quant's or file's name, the longest first."""
    ordered = sorted(profile.quants, key=lambda quant: len(quant.name), reverse=True)
    return next((quant for quant in ordered if f"-{quant.name}" in f"-{text}"), None)
