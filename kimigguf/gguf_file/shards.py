"""The files of one model as one set: which they are, what they hold together, and whether they belong together."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kimigguf.errors import IntegrityError, UsageError
from kimigguf.gguf_file.header import Header, TensorInfo, Value, read_prefix
from kimigguf.gguf_file.types import type_name

_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""llama.cpp's ``llama_split_path``: it finds the other shards of a set by nothing but this."""
_EXPERTS: Final = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.")
_LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "kimi-k3": (
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "kda.head_dim",
        "ssm.conv_kernel",
        "expert_count",
        "expert_used_count",
        "expert_latent_length",
        "attn_res.block_size",
    )
}
"""Keys without which llama.cpp does not load the architecture: files made before it was final lack some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardName:
    """``NAME-00002-of-00014.gguf`` taken apart; ``number`` counts from 1."""

    stem: str
    number: int
    count: int

    def sibling(self, number: int) -> str:
        """The file name of another shard of the set."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"


def shard_name(name: str) -> ShardName | None:
    """A file name taken apart, or None for one that is not a shard's."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    return ShardName(stem=match["stem"], number=int(match["number"]), count=int(match["count"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file: its name without a folder, its true size, its header, and the very bytes of that header."""

    name: str
    size_bytes: int
    header: Header
    header_bytes: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """The files of one model in load order."""

    files: tuple[ShardFile, ...]

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The first shard's keys: those of the model."""
        return self.files[0].header.metadata

    @property
    def architecture(self) -> str | None:
        """``general.architecture`` of the first shard, such as ``kimi-k3``."""
        return self.files[0].header.architecture

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor of every file, in load order."""
        return tuple(tensor for file in self.files for tensor in file.header.tensors)

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)


# -- which files ------------------------------------------------------------------------------------------------------


def find_set(path: Path) -> tuple[Path, ...]:
    """All files of the model that ``path`` names, in load order; ``path`` is any shard of it, its folder, or its file.

    Raises:
        UsageError: ``no-such-file``, ``not-gguf``, ``no-model`` or ``several-models`` (a folder with none or many).
        IntegrityError: ``missing-shard``, naming it; ``mixed-sets`` where a folder holds two uploads of a set;
            ``empty-file``; ``bad-shard-name``; ``unreadable``.
    """
    try:
        if path.is_dir():
            first = _only_model(path)
        elif path.exists():
            first = path
        else:
            raise UsageError(
                f"there is no file or folder {path}", code="no-such-file", hint="what is on this machine: kimigguf list"
            )
        _require_gguf(first, named=not path.is_dir())
        return _siblings(first)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read", code="unreadable", cause=error.strerror) from error


def _only_model(folder: Path) -> Path:
    names = sorted(
        path.name for path in folder.glob("*.gguf") if path.is_file() and not path.name.lower().startswith("mmproj")
    )
    if not names:
        raise UsageError(
            f"there is no GGUF model in {folder}", code="no-model", hint="what is on this machine: kimigguf list"
        )
    parts = {name: shard_name(name) for name in names}
    stems = {part.stem if part else name for name, part in parts.items()}
    counts = {part.count for part in parts.values() if part}
    if len(stems) > 1:
        example = folder / next(name for name in names)
        raise UsageError(
            f"{folder} holds {len(stems)} models: {', '.join(sorted(stems))}",
            code="several-models",
            hint=f"name a file of the one you mean, such as {example}",
        )
    if len(counts) > 1:
        raise IntegrityError(
            f"{folder} mixes shards of different uploads",
            code="mixed-sets",
            cause=f"some are named as parts of {' and some of '.join(str(count) for count in sorted(counts))}",
            hint="keep one set per folder: move the shards of the other out of it",
        )
    return folder / names[0]


def _require_gguf(path: Path, *, named: bool) -> None:
    """Tell an empty file and something else altogether from a damaged model."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    if not magic:
        raise IntegrityError(f"{path} is empty", code="empty-file", hint=_fetch_hint(path.name))
    if magic != b"GGUF" and (named or shard_name(path.name) is None):
        raise UsageError(
            f"{path} is no GGUF file",
            code="not-gguf",
            cause=f"it starts with {magic!r} instead of b'GGUF'",
            hint="what is on this machine: kimigguf list",
        )


def _siblings(path: Path) -> tuple[Path, ...]:
    part = shard_name(path.name)
    if part is None:
        return (path,)
    if not 1 <= part.number <= part.count:
        raise IntegrityError(
            f"{path.name} counts itself as shard {part.number} of {part.count}",
            code="bad-shard-name",
            hint="give the shards the names they were published under",
        )
    files = tuple(path.with_name(part.sibling(number)) for number in range(1, part.count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IntegrityError(
            f"{missing[0]}{more} of {part.count} shards is missing in {path.parent}",
            code="missing-shard",
            cause="a set is read whole, and its shards are found by their names beside the first",
            hint=_fetch_hint(path.name),
        )
    return files


def _fetch_hint(name: str) -> str:
    quant = re.match(r"Kimi-K3-(.+)-\d{5}-of-\d{5}\.gguf", name)
    return f"kimigguf download {quant[1]}" if quant else "fetch the file again, from where the others came"


# -- what they hold ---------------------------------------------------------------------------------------------------


def read_set(files: Sequence[Path]) -> ShardSet:
    """The headers of a set's files (in load order), checked against their files and each other.

    Raises:
        IntegrityError: As ``gguf_file.header.read_header`` and ``check`` have it.
    """
    found = []
    for path in files:
        header, data, size = read_prefix(path)
        found.append(ShardFile(name=path.name, size_bytes=size, header=header, header_bytes=data))
    check(found)
    return ShardSet(files=tuple(found))


def check(files: Sequence[ShardFile], *, sizes: Mapping[str, int] | None = None) -> None:
    """Make sure that files in load order are one whole model, each from the same one.

    Args:
        files: The files with their headers.
        sizes: True sizes in bytes by name, where the hub or a manifest gives them.

    Raises:
        IntegrityError: ``foreign-shard``, ``wrong-order``, ``missing-shard``, ``wrong-tensor-count``, ``wrong-size``,
            ``no-architecture``, ``outdated-layout`` or ``no-model``.
    """
    if not files:
        raise IntegrityError("a model of no files holds nothing", code="no-model")
    _check_sizes(files, sizes or {})
    _check_split(files)
    _check_same_model(files)
    _check_tensors(files)
    _check_types(files)
    _check_layout(files[0])


def _check_sizes(files: Sequence[ShardFile], sizes: Mapping[str, int]) -> None:
    for file in files:
        if sizes.get(file.name, file.size_bytes) != file.size_bytes:
            raise IntegrityError(
                f"{file.name} has {file.size_bytes:,} bytes instead of {sizes[file.name]:,}",
                code="wrong-size",
                hint=_fetch_hint(file.name),
            )


def _number(file: ShardFile, key: str) -> int | None:
    value = file.header.metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _check_split(files: Sequence[ShardFile]) -> None:
    for index, file in enumerate(files):
        count = _number(file, "split.count")
        number = _number(file, "split.no")
        if count in {None, 0, 1} and len(files) == 1:
            continue
        if count != len(files):
            is_alone = len(files) == 1
            raise IntegrityError(
                f"{file.name} is one of {count} shards, and stands alone"
                if is_alone
                else f"{file.name} does not belong to this set of {len(files)} shards",
                code="missing-shard" if is_alone else "foreign-shard",
                cause=f"its header says split.count = {count}",
                hint=_fetch_hint(file.name),
            )
        if number != index:
            raise IntegrityError(
                f"{file.name} is not the shard that its name says",
                code="wrong-order",
                cause=f"its header says split.no = {number}, and its place is {index} (counted from 0)",
                hint="give the shards the names they were published under",
            )


def _check_same_model(files: Sequence[ShardFile]) -> None:
    """Every shard names the architecture and the number of all tensors; the stem of the names is the set's own."""
    first = files[0]
    if first.header.architecture is None:
        raise IntegrityError(f"{first.name} does not name its architecture", code="no-architecture")
    stems = Counter(part.stem for file in files if (part := shard_name(file.name)))
    for file in files:
        part = shard_name(file.name)
        reasons = []
        if part and len(stems) > 1 and part.stem != stems.most_common(1)[0][0]:
            reasons.append(f"its name differs from {stems.most_common(1)[0][0]}")
        if file.header.architecture not in {None, first.header.architecture}:
            reasons.append(f"its architecture is {file.header.architecture}, not {first.header.architecture}")
        total, expected = _number(file, "split.tensors.count"), _number(first, "split.tensors.count")
        if total != expected:
            reasons.append(f"it is part of {total} tensors, and {first.name} of {expected}")
        if reasons:
            raise _foreign(file, "; ".join(reasons))


def _foreign(file: ShardFile, cause: str) -> IntegrityError:
    return IntegrityError(
        f"{file.name} comes from another model than the shards beside it",
        code="foreign-shard",
        cause=cause,
        hint=_fetch_hint(file.name),
    )


def _check_tensors(files: Sequence[ShardFile]) -> None:
    owner: dict[str, str] = {}
    for file in files:
        for tensor in file.header.tensors:
            if tensor.name in owner:
                raise _foreign(file, f"it holds {tensor.name}, and {owner[tensor.name]} holds it too")
            owner[tensor.name] = file.name
    expected = _number(files[0], "split.tensors.count")
    if expected is not None and expected != len(owner):
        raise IntegrityError(
            f"the set of {files[0].name} holds {len(owner):,} tensors instead of {expected:,}",
            code="wrong-tensor-count",
            cause="split.tensors.count does not add up: a shard of another upload, or files of an older layout",
            hint=_fetch_hint(files[0].name),
        )


def _check_types(files: Sequence[ShardFile]) -> None:
    """Find a shard of another quant by the types of its experts.

    Only in sets that were split by a number of tensors: there the same tensors lie in the same shard of every quant, so
    nothing else tells. In sets split by size, as published ones are, another quant's shard ends at other tensors and is
    found by those; and some of them change the type from layer to layer, which would look the same as a foreign shard.
    """
    lengths = [len(file.header.tensors) for file in files if file.header.tensors]
    if len(lengths) < 3 or len(set(lengths[:-1])) > 1:  # noqa: PLR2004 -- of two, nobody can say which is foreign
        return
    kinds = {
        file.name: {tensor.ggml_type for tensor in file.header.tensors if _EXPERTS.search(tensor.name)}
        for file in files
    }
    kinds = {name: types for name, types in kinds.items() if types}
    for file in files:
        others = [types for name, types in kinds.items() if name != file.name]
        if file.name not in kinds or len(others) < 2:  # noqa: PLR2004 -- likewise
            continue
        usual = set.intersection(*others)
        if usual and not kinds[file.name] & set.union(*others):
            raise _foreign(file, f"its experts are {_names(kinds[file.name])}, and theirs {_names(usual)}")


def _names(types: Iterable[int]) -> str:
    return ", ".join(sorted(type_name(number) for number in types))


def _check_layout(first: ShardFile) -> None:
    architecture = first.header.architecture or ""
    keys = (f"{architecture}.{key}" for key in _LAYOUTS.get(architecture, ()))
    missing = [key for key in keys if key not in first.header.metadata]
    if missing:
        raise IntegrityError(
            f"{first.name} was made before the layout of {architecture} was final",
            code="outdated-layout",
            cause=f"it lacks {', '.join(missing)}",
            hint=_fetch_hint(first.name),
        )
