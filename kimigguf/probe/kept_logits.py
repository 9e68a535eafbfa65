"""What is written beside a file of kept logits: whose they are and what was read, so that no others pass for them."""

import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from kimigguf.errors import MachineError, UsageError
from kimigguf.gguf_file.shards import ShardSet
from kimigguf.probe.divergence import Logits

_END_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file of the reference. The hash covers its header and its last 64 KiB: all of it would take an hour to read."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What logits were made from. ``chunks`` is how many were asked for: the text may have held fewer.

    ``logits_sha256`` covers the first and the last 64 KiB of the logits themselves, and ties the note to them.
    """

    reference: str
    files: tuple[ModelFile, ...]
    text_sha256: str
    context_tokens: int
    chunks: int
    logits_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a comparison names of its own; None: it takes what the file has."""

    files: tuple[ModelFile, ...] | None
    text: str | None
    context_tokens: int | None
    chunks: int | None


def beside(logits: Path) -> Path:
    """Where it is written."""
    return logits.with_name(logits.name + ".json")


def model_files(paths: Sequence[Path], shards: ShardSet) -> tuple[ModelFile, ...]:
    """What tells this model from another, whatever folder it lies in.

    Raises:
        UsageError: ``unreadable-file``.
    """
    return tuple(
        ModelFile(name=path.name, size_bytes=file.size_bytes, sha256=_ends(path, file.header.data_offset))
        for path, file in zip(paths, shards.files, strict=True)
    )


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def logits_hash(path: Path) -> str:
    return _ends(path, _END_BYTES)


def _ends(path: Path, first_bytes: int) -> str:
    try:
        with path.open("rb") as stream:
            found = hashlib.sha256(stream.read(first_bytes))
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _END_BYTES))
            found.update(stream.read(_END_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read {path}", code="unreadable-file", cause=error.strerror) from error
    return found.hexdigest()


def write(logits: Path, source: Source) -> None:
    """Note what the logits are made from.

    Raises:
        MachineError: ``cannot-write``.
    """
    try:
        beside(logits).write_bytes(TypeAdapter(Source).dump_json(source, indent=1) + b"\n")
    except OSError as error:
        raise MachineError(f"cannot write {beside(logits)}", code="cannot-write", cause=error.strerror) from error


def read(logits: Path) -> Source | None:
    """The note that belongs to these logits; None if there is none, or only that of others."""
    try:
        source = TypeAdapter(Source).validate_json(beside(logits).read_bytes())
    except (OSError, ValidationError):
        return None
    return source if source.logits_sha256 == logits_hash(logits) else None


def check(path: Path, held: Logits, wanted: Wanted) -> Source | None:
    """Refuse kept logits that are not of what is asked for. Their source comes back, None where nothing tells it.

    Raises:
        UsageError: ``other-logits``.
    """
    source = read(path)
    other = _unknown(held, wanted) if source is None else _other(source, held, wanted)
    if not other:
        return source
    said = f"nothing beside {path} tells its {' and '.join(other)}, so it may be another"
    if source is not None:
        said = f"the logits in {path} were made with another {' and '.join(other)} (by {source.reference})"
    raise UsageError(
        said,
        code="other-logits",
        hint=f"name another --logits FILE, leave {_options(other)} out to take it as it is, or make it anew: "
        f"rm {shlex.quote(str(path))}",
    )


def _other(source: Source, held: Logits, wanted: Wanted) -> list[str]:
    found = {
        "reference": wanted.files not in {None, source.files},
        "text": wanted.text is not None and text_hash(wanted.text) != source.text_sha256,
        "context": wanted.context_tokens not in {None, held.context_tokens},
        "chunks": wanted.chunks not in {None, source.chunks, held.chunks},
    }
    return [name for name, differs in found.items() if differs]


def _unknown(held: Logits, wanted: Wanted) -> list[str]:
    found = {
        "reference": wanted.files is not None,
        "text": wanted.text is not None,
        "context": wanted.context_tokens not in {None, held.context_tokens},
        "chunks": wanted.chunks not in {None, held.chunks},
    }
    return [name for name, told in found.items() if told]


def _options(names: Sequence[str]) -> str:
    return " and ".join("--text or --suite" if name == "text" else f"--{name}" for name in names)
