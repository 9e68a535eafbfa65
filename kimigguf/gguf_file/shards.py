"""A set of GGUF files as one model: found by name, and held against itself."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.errors import IntegrityError, UsageError
from kimigguf.gguf_file.belonging import check_expert_types, check_layout
from kimigguf.gguf_file.header import Header, TensorInfo, Value
from kimigguf.gguf_file.names import ShardName, is_projector, sets
from kimigguf.gguf_file.read import check_size, read_header

MAGIC: Final = b"GGUF"
_NAMED: Final = 4
"""So many names are listed in an error before the rest is counted."""
MAX_FILES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file of a set. ``header_path`` is a file that starts with its header: itself, or a cached copy of that."""

    name: str
    size_bytes: int
    header: Header
    header_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """The files of one model in load order, checked against each other."""

    files: tuple[ShardFile, ...]

    @property
    def metadata(self) -> "dict[str, Value]":
        """The keys of the first shard, which carries the model's."""
        return dict(self.files[0].header.metadata)

    @property
    def architecture(self) -> str | None:
        return self.files[0].header.architecture

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors in load order."""
        return tuple(tensor for file in self.files for tensor in file.header.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def find_set(path: Path) -> tuple[Path, ...]:
    """All files of the model that ``path`` names, in load order: any shard of it, its only file, or its folder.

    Raises:
        UsageError: ``no-such-file``, ``no-gguf``, ``several-sets``, ``not-gguf``, ``empty-file``, ``is-projector``.
        IntegrityError: ``missing-shard`` with the names, ``mixed-set`` for a folder with two counts of one name.
    """
    try:
        if path.is_dir():
            return _in_folder(path)
        if not path.is_file():
            raise UsageError(f"there is no file or folder {path}", code="no-such-file")
        _must_be_gguf(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}", code="unreadable-file", cause=error.strerror) from error
    shard = ShardName.of(path.name)
    if shard is None:
        return (path,)
    if not 1 <= shard.number <= shard.count:
        raise UsageError(f"{path.name} is no shard of {shard.count}", code="bad-shard-name")
    return _complete(path.parent, shard.siblings)


def _must_be_gguf(path: Path) -> None:
    if is_projector(path.name):
        raise UsageError(
            f"{path.name} is a vision projector, not a model",
            code="is-projector",
            hint=f"name the model's folder or one of its shards beside it in {path.parent}",
        )
    with path.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if not start:
        raise UsageError(f"{path} is empty", code="empty-file", hint="an interrupted download? fetch it again")
    if start != MAGIC:
        raise UsageError(f"{path} is no GGUF file", code="not-gguf", cause=f"it starts with {start!r}, not {MAGIC!r}")


def _in_folder(folder: Path) -> tuple[Path, ...]:
    found = sets(path.name for path in folder.iterdir() if path.is_file())
    if not found:
        below = sorted({shlex.quote(str(path.parent)) for path in folder.glob("*/*.gguf")})
        raise UsageError(
            f"{folder} holds no GGUF model",
            code="no-gguf",
            hint=f"name one of the folders in it: {_some(below)}" if below else None,
        )
    if len(found) == 1:
        return _complete(folder, found[0])
    shards = [ShardName.of(names[0]) for names in found]
    prefixes = [shard.prefix for shard in shards if shard]
    if len(prefixes) == len(found) and len(set(prefixes)) == 1:
        counts = " and ".join(str(shard.count) for shard in shards if shard)
        raise IntegrityError(
            f"{folder} mixes shards of two uploads of {prefixes[0]}: sets of {counts}",
            code="mixed-set",
            cause="the hub's shard count changed with a re-upload; llama.cpp would load a mixture without a word",
            hint="keep one set per folder: move the files of the other away",
        )
    raise UsageError(
        f"{folder} holds {len(found)} models",
        code="several-sets",
        hint="name one: " + _some([shlex.quote(str(_there(folder, names))) for names in found]),
    )


def _complete(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    if len(names) > MAX_FILES:
        raise IntegrityError(f"{names[0]} claims {len(names):,} shards", code="bad-shard-name")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise IntegrityError(
            f"{len(missing)} of {len(names)} shards are missing in {folder}: {_some(missing)}",
            code="missing-shard",
            cause="llama.cpp loads all shards by name from one folder",
            hint="fetch them from where the others came, into the same folder",
        )
    return tuple(folder / name for name in names)


def _there(folder: Path, names: Sequence[str]) -> Path:
    """The first file of a set that is there: a path to one that is missing could not be followed."""
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def read_set(files: Sequence[Path]) -> ShardSet:
    """Read the headers of a set in load order and check it.

    Raises:
        IntegrityError: As ``read.read_header`` and ``check``.
    """
    found = []
    for path in files:
        header = read_header(path)
        found.append(ShardFile(name=path.name, size_bytes=path.stat().st_size, header=header, header_path=path))
    check(found)
    return ShardSet(files=tuple(found))


def check(files: Sequence[ShardFile]) -> None:
    """Hold the files of a set, in load order, against each other and their sizes.

    Raises:
        IntegrityError: ``file-cut``, ``trailing-data``, ``foreign-shard``, ``incomplete-set``, ``tensor-count``,
            ``duplicate-tensor``, ``outdated-layout``: each names the file.
    """
    if not files:
        raise IntegrityError("a model of no files", code="incomplete-set")
    for rule in (_sizes, _numbers, _belonging, _tensor_count, check_expert_types):
        rule(files)
    check_layout(files[0].header, name=files[0].name)


def _sizes(files: Sequence[ShardFile]) -> None:
    for file in files:
        check_size(file.header, file.size_bytes, name=file.name)


def _numbers(files: Sequence[ShardFile]) -> None:
    for index, file in enumerate(files):
        metadata = file.header.metadata
        count, number = metadata.get("split.count"), metadata.get("split.no")
        if count is None and len(files) == 1:
            continue
        if count in (0, 1) and len(files) == 1:
            continue
        if count != len(files):
            raise IntegrityError(
                f"{file.name} says it is one of {count} files, but the set has {len(files)}",
                code="incomplete-set" if len(files) == 1 else "foreign-shard",
                hint="keep the files' original names, all in one folder",
            )
        if number != index:
            raise IntegrityError(
                f"{file.name} is file {index + 1} by its name, and says it is number {number} counted from 0",
                code="foreign-shard",
                hint="it was renamed, or is from another set: fetch it again",
            )


def _belonging(files: Sequence[ShardFile]) -> None:
    first = files[0]
    keys: tuple[tuple[str, Callable[[ShardFile], object]], ...] = (
        ("architecture", lambda file: file.header.architecture),
        ("split.tensors.count", lambda file: file.header.metadata.get("split.tensors.count")),
        ("general.file_type", lambda file: file.header.metadata.get("general.file_type")),
        ("general.name", lambda file: file.header.metadata.get("general.name")),
    )
    for file in files[1:]:
        for what, value in keys:
            # Later shards need not repeat a key; where they do, it must be the same.
            if value(file) is not None and value(first) is not None and value(file) != value(first):
                raise IntegrityError(
                    f"{file.name} belongs to another set than {first.name}",
                    code="foreign-shard",
                    cause=f"their {what} differs: {value(file)!r} and {value(first)!r}",
                    hint="fetch it again from the commit of the others",
                )


def _tensor_count(files: Sequence[ShardFile]) -> None:
    owner: dict[str, str] = {}
    for file in files:
        for tensor in file.header.tensors:
            if tensor.name in owner:
                raise IntegrityError(
                    f"{file.name} holds {tensor.name!r} a second time, after {owner[tensor.name]}",
                    code="duplicate-tensor",
                    cause="one of them is from another upload",
                )
            owner[tensor.name] = file.name
    declared = files[0].header.metadata.get("split.tensors.count")
    if isinstance(declared, int) and declared not in (0, len(owner)):
        raise IntegrityError(
            f"the set of {files[0].name} should have {declared:,} tensors, and has {len(owner):,}",
            code="tensor-count",
            cause="a shard is from another upload, or the files predate the model's final layout",
            hint="fetch the set again from one commit",
        )
