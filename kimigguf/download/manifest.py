"""The manifest of a set: what belongs into its folder, and what has been verified. Written whole or not at all."""

import json
import os
import shlex
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.errors import IntegrityError
from kimigguf.whole_file import write_whole

MANIFEST: Final = "kimigguf.json"
INNER: Final = ".kimigguf"
"""The folder, within a set's, of what is not for users: lock, journals, marks."""
_SCHEMA: Final = "kimigguf.set/1"
_MAX_MANIFEST_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """How a file looked when its hash was found right. Another look since then: it has to be hashed again."""

    size_bytes: int
    mtime_ns: int
    inode: int
    at: str

    def fits(self, stat: os.stat_result) -> bool:
        return (self.size_bytes, self.mtime_ns, self.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """``path`` is the file's place in the repository, ``name`` its last part and its name on disk."""

    name: str
    path: str
    size_bytes: int
    sha256: str
    verified: Stamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What belongs into a set's folder. ``source``: the hub's address, or the folder it was imported from."""

    repository: str
    commit: str
    quant: str
    source: str
    created: str
    files: tuple[ManifestFile, ...]
    schema: str = _SCHEMA

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def now() -> str:
    """This moment in UTC, as ISO 8601 writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def manifest_of(remote: RemoteSet, source: str) -> Manifest:
    """The manifest of a set that is about to be fetched.

    Raises:
        IntegrityError: ``no-hash`` if the hub gives no SHA-256 for a file.
    """
    files: list[ManifestFile] = []
    for file in remote.files:
        if not _safe(file.name):
            raise IntegrityError(f"the hub lists a file that can't be: {file.path!r}", code="bad-name")
        if file.sha256 is None:
            raise IntegrityError(
                f"the hub lists {file.path} without a SHA-256",
                code="no-hash",
                cause="it is no LFS file there, or the mirror leaves hashes out",
                hint="unset HF_ENDPOINT to use the hub itself",
            )
        files.append(ManifestFile(name=file.name, path=file.path, size_bytes=file.size_bytes, sha256=file.sha256))
    return Manifest(
        repository=remote.repository,
        commit=remote.commit,
        quant=remote.quant,
        source=source,
        created=now(),
        files=tuple(files),
    )


def remote_of(manifest: Manifest) -> RemoteSet:
    """The set as the hub listed it when the manifest was made."""
    return RemoteSet(
        repository=manifest.repository,
        commit=manifest.commit,
        quant=manifest.quant,
        files=tuple(
            RemoteFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256) for file in manifest.files
        ),
    )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None where there is none.

    Raises:
        IntegrityError: ``bad-manifest``.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise IntegrityError(f"{path} is no manifest", code="bad-manifest", cause="it is too large")
        manifest = TypeAdapter(Manifest).validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise IntegrityError(f"cannot read {path}", code="bad-manifest", cause=error.strerror) from error
    except ValidationError as error:
        cause = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:4])
        raise _bad_manifest(path, cause) from error
    unsafe = [file.name for file in manifest.files if not _safe(file.name)]
    if unsafe or manifest.schema != _SCHEMA or not manifest.files:
        raise _bad_manifest(path, f"the file name {unsafe[0]!r} leaves the folder" if unsafe else "not this version's")
    return manifest


def _safe(name: str) -> bool:
    return Path(name).name == name and name not in {"", ".", ".."} and name.isprintable()


def _bad_manifest(path: Path, cause: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is no manifest of this program",
        code="bad-manifest",
        cause=cause,
        hint=f"forget it, and hash what lies there anew: rm {shlex.quote(str(path))} && "
        f"kimigguf import {shlex.quote(str(path.parent))}",
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it whole or not at all.

    Raises:
        OSError: The disk is full, or not writable.
    """
    write_whole(folder / MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def with_verified(manifest: Manifest, name: str, stat: os.stat_result | None) -> Manifest:
    """The manifest with one file marked as verified at this look, or (None) as no longer so."""
    stamp = None
    if stat is not None:
        stamp = Stamp(size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino, at=now())
    return replace(manifest, files=tuple(replace(f, verified=stamp) if f.name == name else f for f in manifest.files))
