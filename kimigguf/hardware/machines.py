"""Machines as files: reads the named ones under ``profiles/machines`` and any file in the same schema, and writes it.

The schema is ``snapshot.Machine`` as TOML: a key that is not there is unknown, an empty list means "there is none",
and sizes are bytes or text such as "768GiB". One addition: an accelerator may carry ``count``, so that eight equal
cards are written once.
"""

import errno
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kimigguf import profile_files
from kimigguf.errors import UsageError
from kimigguf.hardware.snapshot import Accelerator, Machine
from kimigguf.home import from_home

KIND: Final = "machines"
_WHAT: Final = "machine file"
_MAX_COUNT: Final = 1024
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What file systems without hard links (FAT, some network ones) answer."""
_SILENT: Final = frozenset({"drivers", "unknown", "notices", "members"})
"""Lists whose absence from a file says the same as an empty list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accelerators(Accelerator):
    """``count`` equal accelerators as one table of a file."""

    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _MachineFile(Machine):
    """What a file may say."""

    accelerators: tuple[_Accelerators, ...] | None = None


def machine_names(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of all machine files, a user's own and the shipped ones, sorted."""
    return profile_files.names(KIND, environ)


def load_machine(text: str, environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine that ``text`` names: a machine file's path (with a slash or ending in .toml), else a profile's name.

    A name that is no profile may still be a file in the current folder, as ``inspect --save box`` writes it.

    Raises:
        UsageError: ``unknown-profile`` with the nearest names, ``bad-profile`` naming file, key and allowed values.
    """
    looks_like_path = text.endswith(".toml") or "/" in text or os.sep in text
    if looks_like_path or (text not in machine_names(environ) and Path(text).is_file()):
        return load_file(from_home(text))
    return load_file(profile_files.find(KIND, text, environ))


def load_file(path: Path) -> Machine:
    """Read and validate one machine file.

    Raises:
        UsageError: ``bad-profile`` naming file, key and allowed values.
    """
    read = profile_files.load(path, _MachineFile, what=_WHAT)
    if problem := _contradiction(read):
        raise UsageError(f"{path} is no valid {_WHAT}", code="bad-profile", cause=problem)
    values = {field.name: getattr(read, field.name) for field in fields(Machine)}
    return Machine(**values | {"accelerators": _expanded(read.accelerators)})


def _expanded(groups: tuple[_Accelerators, ...] | None) -> tuple[Accelerator, ...] | None:
    if groups is None:
        return None
    plain = [field.name for field in fields(Accelerator)]
    return tuple(
        Accelerator(**{name: getattr(group, name) for name in plain}) for group in groups for _ in range(group.count)
    )


def _contradiction(machine: _MachineFile) -> str | None:
    """What the types cannot say: counts in range, no negative size, free never more than there is."""
    for index, group in enumerate(machine.accelerators or ()):
        if not 1 <= group.count <= _MAX_COUNT:
            return f"accelerators.{index}.count: should be 1 to {_MAX_COUNT}"
    parts: list[tuple[str, object]] = [("ram", machine.ram), ("cpu", machine.cpu)]
    parts += [(f"accelerators.{i}", a) for i, a in enumerate(machine.accelerators or ())]
    parts += [(f"disks.{i}", d) for i, d in enumerate(machine.disks or ())]
    for where, part in parts:
        for key in (field.name for field in fields(part)):  # type: ignore[arg-type]  # all four are dataclasses
            value: Any = getattr(part, key)
            if isinstance(value, int | float) and value < 0:
                return f"{where}.{key}: should not be negative"
        total = getattr(part, "total_bytes", None)
        for key in ("free_bytes", "available_bytes"):
            part_of_it = getattr(part, key, None)
            if total is not None and part_of_it is not None and part_of_it > total:
                return f"{where}.{key}: should not be above total_bytes"
    return None


def to_data(machine: Machine) -> dict[str, Any]:
    """A machine as JSON has it: every field by its name, null for unknown."""
    return asdict(machine)


def to_toml(machine: Machine) -> str:
    """A machine as a file that ``load_file`` reads back to an equal one: no unknown fields, equal cards grouped."""
    import tomli_w  # noqa: PLC0415 -- only when saving

    data = to_data(machine)
    if machine.accelerators is not None:
        data["accelerators"] = [
            without_unknown(asdict(card)) | ({"count": count} if count > 1 else {})
            for card, count in _runs(machine.accelerators)
        ]
    return tomli_w.dumps(without_unknown(data))


def _runs(cards: tuple[Accelerator, ...]) -> list[tuple[Accelerator, int]]:
    """Neighbours that are equal in everything, as one with a count."""
    return [(card, len(list(group))) for card, group in groupby(cards)]


def without_unknown(value: Any) -> Any:  # noqa: ANN401 -- walks the JSON form, whose values are of any type
    """TOML has no null: what is unknown is not there. Tables that say nothing are left out with it."""
    if isinstance(value, dict):
        kept = {key: without_unknown(inner) for key, inner in value.items() if inner is not None}
        return {key: inner for key, inner in kept.items() if inner != {} and not (inner == [] and key in _SILENT)}
    if isinstance(value, list | tuple):
        return [without_unknown(inner) for inner in value]
    return value.value if isinstance(value, StrEnum) else value


def save(machine: Machine, path: Path, *, overwrite: bool = False) -> None:
    """Write a machine file: whole or not at all.

    Raises:
        UsageError: ``file-exists`` unless ``overwrite``, ``cannot-write`` with the system's reason.
    """
    comment = f"# Written by `kimigguf inspect --save`; use it with `--machine {shlex.quote(str(path))}`."
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if not overwrite:
            refuse_existing(path)
        # A file may be read elsewhere and later: it describes a machine, and is none that was read just now.
        described = (
            replace(machine, name=path.stem, source="read by kimigguf inspect") if machine.is_this_one else machine
        )
        temporary.write_text(f"{comment}\n{to_toml(described)}", encoding="utf-8")
        give_name(temporary, path, overwrite=overwrite)
    except FileExistsError:
        refuse_existing(path)
        raise
    except OSError as error:
        hint = "choose a folder that is there and that you may write"
        raise UsageError(f"cannot write {path}", code="cannot-write", cause=error.strerror, hint=hint) from error
    finally:
        temporary.unlink(missing_ok=True)


def give_name(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Put a whole file in its place. A hard link takes a name only if it is free, with no gap for another process."""
    if not overwrite:
        try:
            path.hardlink_to(temporary)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        else:
            return
    temporary.replace(path)


def refuse_existing(path: Path) -> None:
    """Say no to a file that is there already, before anything is done for it.

    Raises:
        UsageError: ``file-exists``.
    """
    if path.exists():
        hint = "choose another name, or add --force to write over it"
        raise UsageError(f"{path} exists", code="file-exists", hint=hint)


def known_accelerators(environ: Mapping[str, str] = os.environ) -> tuple[Accelerator, ...]:
    """Every accelerator of every machine file that can be read, each name once; what a what-if may add."""
    found: dict[str | None, Accelerator] = {}
    for name in machine_names(environ):
        try:
            machine = load_machine(name, environ)
        except UsageError:  # a user's broken file is told when it is used
            continue
        for card in machine.accelerators or ():
            found.setdefault(card.name, card)
    return tuple(found.values())
