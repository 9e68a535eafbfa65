"""What a model is called that has no name of ours: by clients as its alias, and by ``status`` with its port."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from kimigguf import profile_files
from kimigguf.download.named import PathTarget, complete, look_for, target_of
from kimigguf.download.store import StoredSet, models_dir
from kimigguf.engines.request import Request
from kimigguf.errors import KimiggufError
from kimigguf.gguf_file.header import Header
from kimigguf.gguf_file.names import ShardName
from kimigguf.gguf_file.read import read_header
from kimigguf.placement.plan import PlannedModel
from kimigguf.placement.plan_file import load_plan

_LONGEST: Final = 48
"""A server's name has room for 64 letters, and a port stands in it too."""


def with_alias(request: Request, environ: Mapping[str, str]) -> Request:
    """The request with the model's own name for its alias, where none was asked for and its profile has none.

    Files that cannot be read leave it as it is: what they are needed for says why.
    """
    if request.alias is not None:
        return request
    with suppress(KimiggufError, OSError):
        first = _first_file(request, environ)
        if first is not None:
            return replace(request, alias=_own_name(first, environ))
    return request


def alias_of(model: PlannedModel, environ: Mapping[str, str]) -> str | None:
    """The name of a planned model for its alias; None where its profile has one, or its files are not to be read."""
    with suppress(KimiggufError, OSError):
        if (first := _first_of(model)) is not None:
            return _own_name(first, environ)
    return None


def _own_name(first: Path, environ: Mapping[str, str]) -> str | None:
    header = read_header(first)
    return None if header.architecture in profile_files.names("serving", environ) else model_name(header, first.name)


def _first_of(model: PlannedModel) -> Path | None:
    return Path(model.folder) / model.files[0].name if model.folder is not None and model.files else None


def _first_file(request: Request, environ: Mapping[str, str]) -> Path | None:
    """The file that is loaded, of a path or a plan; None for a quant's name, whose model has a profile."""
    if request.plan_path is not None:
        return _first_of(load_plan(request.plan_path).model)
    target = target_of(request.target or "", environ)
    if isinstance(target, PathTarget):
        found = look_for(target, models_dir(environ, request.models_dir))
        if isinstance(found, StoredSet):
            return complete(found).files[0].path
    return None


def model_name(header: Header, file_name: str) -> str | None:
    """The name in the header as a plain word, else the file's, without a shard's number; None if neither has a letter.

    Such a word has lower-case letters, digits, dots and dashes: it is typed, and stands in URLs and names of files.
    """
    shard = ShardName.of(file_name)
    named = header.metadata.get("general.name")
    texts = (named if isinstance(named, str) else "", shard.prefix if shard else Path(file_name).stem)
    return next((word for word in map(_plain, texts) if word), None)


def _plain(text: str) -> str:
    word = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return word[:_LONGEST].rstrip("-.")
