"""Where sets lie on disk, and what is known of them.

    <models>/<owner>--<name>/<quant>/<first 12 digits of the commit>/
        Kimi-K3-UD-IQ1_M-00001-of-00015.gguf      real files, original names: engines find siblings by name
        Kimi-K3-UD-IQ1_M-00002-of-00015.gguf.part  not whole yet
        kimigguf.json                              the manifest: what belongs here, and what has been verified
        .kimigguf/                                 lock, journals, hash marks

A folder holds one set at one commit and is never renamed: a newer revision lies beside the one in use.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kimigguf.catalogue.quants import Quant
from kimigguf.catalogue.remote import RemoteSet
from kimigguf.download import journal
from kimigguf.download.manifest import INNER, MANIFEST, Manifest, ManifestFile, read_manifest
from kimigguf.errors import IntegrityError, MachineError, UsageError
from kimigguf.home import from_home, whole

PART: Final = ".part"
_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class FileState(StrEnum):
    """What a look at one file says, without reading it."""

    VERIFIED = "verified"  # its hash was right, and it has not changed since
    UNVERIFIED = "unverified"  # the right size, but touched since, or never hashed
    WRONG_SIZE = "wrong-size"
    PARTIAL = "partial"
    MISSING = "missing"


class SetState(StrEnum):
    WHOLE = "whole"
    PARTIAL = "partial"
    UNVERIFIED = "unverified"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # no manifest of ours: nothing to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a set. ``sha256`` None and ``size_bytes`` as found: nobody has said what they should be."""

    name: str
    path: Path
    size_bytes: int
    sha256: str | None
    state: FileState
    done_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """A set on this machine, as a look at its folder shows it."""

    folder: Path
    files: tuple[StoredFile, ...]
    manifest: Manifest | None = None

    @property
    def first(self) -> Path:
        """The file that an engine is given."""
        return self.files[0].path

    @property
    def quant(self) -> str | None:
        return self.manifest.quant if self.manifest else None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def done_bytes(self) -> int:
        return sum(file.done_bytes for file in self.files)

    @property
    def state(self) -> SetState:
        states = {file.state for file in self.files}
        if self.manifest is None:
            return SetState.FOREIGN
        if FileState.WRONG_SIZE in states:
            return SetState.DAMAGED
        if states & {FileState.MISSING, FileState.PARTIAL}:
            return SetState.PARTIAL
        return SetState.UNVERIFIED if FileState.UNVERIFIED in states else SetState.WHOLE


def models_dir(environ: Mapping[str, str], override: Path | None = None) -> Path:
    """The folder that holds all sets: what the user has named, else what was chosen once, else the data folder.

    Raises:
        UsageError: ``bad-config``.
    """
    if (named := named_models_dir(environ, override)) is not None:
        return named
    choice = read_choice()
    return data_models_dir() if choice is None else choice.folder


def named_models_dir(environ: Mapping[str, str], override: Path | None = None) -> Path | None:
    """The folder that the user has named: ``override``, else KIMIGGUF_MODELS, else the configuration.

    Raises:
        UsageError: ``bad-config``.
    """
    if override is not None:
        return whole(override)
    if environ.get("KIMIGGUF_MODELS"):
        return whole(environ["KIMIGGUF_MODELS"])
    return _folder_in(_settings(config_path()), config_path())


def data_models_dir() -> Path:
    """The models folder that the system's conventions give."""
    from platformdirs import user_data_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    return user_data_path("kimigguf") / "models"


def config_path() -> Path:
    """The user's configuration; read, never written."""
    from platformdirs import user_config_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    return user_config_path("kimigguf") / "config.toml"


def choice_path() -> Path:
    """Where the program remembers the folder that it has chosen itself."""
    return data_models_dir().parent / "chosen.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The models folder that the program has chosen, and where its disk was mounted then."""

    folder: Path
    mount: str


def read_choice() -> Choice | None:
    """What was chosen once, None if nothing was.

    Raises:
        UsageError: ``bad-config``.
    """
    settings = _settings(choice_path())
    folder = _folder_in(settings, choice_path())
    return None if folder is None else Choice(folder=folder, mount=str(settings.get("mount", folder.anchor)))


def _settings(path: Path) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}", code="bad-config", cause=str(error)) from error


def _folder_in(settings: Mapping[str, Any], path: Path) -> Path | None:
    value = settings.get("models_dir")
    if value is None:
        return None
    if not isinstance(value, str) or not from_home(value).is_absolute():
        raise UsageError(
            f"models_dir in {path} is no absolute path", code="bad-config", hint='models_dir = "/mnt/models"'
        )
    return whole(value)


def set_folder(models: Path, remote: RemoteSet) -> Path:
    """Where a set at one commit belongs."""
    return folder_of(models, repository=remote.repository, quant=remote.quant, commit=remote.commit)


def folder_of(models: Path, *, repository: str, quant: str, commit: str) -> Path:
    """Where a quant of a repository at one commit belongs."""
    return models / repository.replace("/", "--") / quant / commit[:12]


# -- looking -----------------------------------------------------------------------------------------------------------


def look(folder: Path) -> StoredSet | None:
    """The set whose manifest lies in ``folder``, None where there is none. Reads no weights.

    Raises:
        IntegrityError: ``bad-manifest``.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    return StoredSet(folder=folder, manifest=manifest, files=tuple(_look_at(folder, file) for file in manifest.files))


def _look_at(folder: Path, file: ManifestFile) -> StoredFile:
    path = folder / file.name
    done = 0
    try:
        stat = path.stat()
    except OSError:
        if (folder / (file.name + PART)).is_file():
            log = folder / INNER / f"{file.name}.journal"
            done = journal.read(log, size_bytes=file.size_bytes, sha256=file.sha256).total_bytes
        state = FileState.PARTIAL if done else FileState.MISSING
    else:
        if stat.st_size != file.size_bytes:
            state = FileState.WRONG_SIZE
        else:
            done = file.size_bytes
            state = FileState.VERIFIED if file.verified and file.verified.fits(stat) else FileState.UNVERIFIED
    return StoredFile(
        name=file.name, path=path, size_bytes=file.size_bytes, sha256=file.sha256, state=state, done_bytes=done
    )


def stored_at(path: Path) -> StoredSet:
    """The set that ``path`` (a shard, a single file, or a folder) belongs to: one of ours, or a foreign one.

    Raises:
        UsageError, IntegrityError: As ``gguf_file.shards.find_set`` has it.
    """
    from kimigguf.gguf_file.shards import find_set  # noqa: PLC0415 -- only for paths

    folder = path if path.is_dir() else path.parent
    stored = look(folder)
    if stored is not None and (path.is_dir() or path.name in {file.name for file in stored.files}):
        return stored
    return _foreign(tuple(find_set(path)))


def _foreign(paths: tuple[Path, ...]) -> StoredSet:
    files = tuple(
        StoredFile(
            name=path.name,
            path=path,
            size_bytes=path.stat().st_size,
            sha256=None,
            state=FileState.UNVERIFIED,
            done_bytes=path.stat().st_size,
        )
        for path in paths
    )
    return StoredSet(folder=paths[0].parent, files=files)


def managed_sets(models: Path) -> tuple[StoredSet, ...]:
    """All sets with a sound manifest under the models folder, the newest of each quant first."""
    folders = sorted(path.parent for path in models.glob(f"*/*/*/{MANIFEST}"))
    stored = [found for folder in folders if (found := _look_or_not(folder)) is not None]
    stored.sort(key=lambda s: s.manifest.created if s.manifest else "", reverse=True)
    return tuple(sorted(stored, key=lambda s: (s.manifest.repository, s.manifest.quant) if s.manifest else ("", "")))


def _look_or_not(folder: Path) -> StoredSet | None:
    try:
        return look(folder)
    except IntegrityError:  # one broken manifest must not hide the other sets; its own set is named by `verify PATH`
        return None


def locate(models: Path, wanted: Quant | RemoteSet | str, *, repository: str | None = None) -> StoredSet | None:
    """The set of a quant (by name) or exactly ``wanted`` (a RemoteSet, by commit); None if nothing of it is there.

    Of several commits of a quant the newest whole one is taken, else the newest unverified, else the one that has most.
    """
    if isinstance(wanted, RemoteSet):
        return look(set_folder(models, wanted))
    name = wanted if isinstance(wanted, str) else wanted.name
    rank = {SetState.WHOLE: 3, SetState.UNVERIFIED: 2, SetState.DAMAGED: 1}
    found = [
        stored
        for stored in managed_sets(models)
        if stored.manifest is not None
        and stored.manifest.quant == name
        and repository in {None, stored.manifest.repository}
    ]
    return max(
        found, key=lambda s: (rank.get(s.state, 0), s.done_bytes if s.state is SetState.PARTIAL else 0), default=None
    )


def foreign_sets(models: Path, *, depth: int = 4) -> Iterator[StoredSet]:
    """Sets under the models folder that have no manifest of ours, by the names of their files."""
    if depth < 0 or not models.is_dir():
        return
    try:
        entries = sorted(models.iterdir())
    except OSError:  # not ours to read
        return
    if not (models / MANIFEST).is_file():
        groups: dict[str, list[Path]] = {}
        for path in entries:
            if path.suffix == ".gguf" and path.is_file():
                groups.setdefault(_SHARD.sub("", path.name), []).append(path)
        yield from (_foreign(tuple(paths)) for paths in groups.values())
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith(".") and not entry.is_symlink():
            yield from foreign_sets(entry, depth=depth - 1)


def cannot_write(folder: Path, error: OSError) -> MachineError:
    """What to say when the disk refuses: full, read-only, broken."""
    import errno  # noqa: PLC0415 -- only when it has gone wrong

    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return MachineError(
            f"the disk of {folder} is full",
            code="disk-full",
            cause=error.strerror,
            hint="make room and run the same command again: it continues with what is there",
        )
    return MachineError(
        f"cannot write to {folder}",
        code="cannot-write",
        cause=error.strerror,
        hint="choose another folder with --models-dir DIR",
    )


def as_json(stored: StoredSet) -> dict[str, Any]:
    """A set as JSON answers show it."""
    manifest = stored.manifest
    return {
        "repository": manifest.repository if manifest else None,
        "commit": manifest.commit if manifest else None,
        "quant": stored.quant,
        "folder": str(stored.folder),
        "state": str(stored.state),
        "size_bytes": stored.size_bytes,
        "done_bytes": stored.done_bytes,
        "source": manifest.source if manifest else None,
        "created": manifest.created if manifest else None,
        "files": [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "done_bytes": file.done_bytes,
                "sha256": file.sha256,
                "state": str(file.state),
            }
            for file in stored.files
        ],
    }
