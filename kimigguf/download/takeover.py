"""Take shards that are on this machine already into a set of ours: looked for by name, taken only by hash."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.catalogue.remote import RemoteSet
from kimigguf.download import disk
from kimigguf.download.bring import How, bring, needs_room
from kimigguf.download.hashing import hash_files, write_marks
from kimigguf.download.lock import hold
from kimigguf.download.manifest import (
    INNER,
    Manifest,
    manifest_of,
    read_manifest,
    sync_folder,
    with_verified,
    write_manifest,
)
from kimigguf.download.store import FileState, StoredSet, cannot_write, look
from kimigguf.errors import UsageError
from kimigguf.events import Advance, Listener, Notice, ignore

_DEPTH: Final = 6
"""An HF cache is hub/models--x--y/snapshots/COMMIT/QUANT/FILE: five below the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One file of the set: ``how`` it came in, or None and the ``reason``."""

    name: str
    source: Path | None
    how: How | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    stored: StoredSet
    files: tuple[Taken, ...]


def candidates(place: Path, names: frozenset[str]) -> dict[str, Path]:
    """Files under ``place`` (or, of a file, in its folder) with these names; links to files are followed."""
    found: dict[str, Path] = {}
    for path in _walk(place if place.is_dir() else place.parent, _DEPTH if place.is_dir() else 0):
        if path.name in names and path.name not in found and path.is_file():
            found[path.name] = path
    return found


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth > 0:
                yield from _walk(Path(entry.path), depth - 1)
        else:
            yield Path(entry.path)


def take_over(
    remote: RemoteSet, place: Path, folder: Path, *, wait: bool = True, listen: Listener = ignore
) -> Takeover:
    """Bring every file of ``remote`` that lies under ``place`` with the right hash into ``folder``.

    What lies there is read, never moved or changed. Files that are missing or wrong stay for ``download``.

    Raises:
        UsageError: ``nothing-to-import``.
        MachineError: ``disk-full``, ``cannot-write``, ``set-busy``.
        IntegrityError: ``unreadable``, ``no-hash``, ``bad-manifest``.
    """
    found = candidates(place, frozenset(file.name for file in remote.files))
    if not found:
        raise UsageError(
            f"no shard of {remote.quant} lies in {place}",
            code="nothing-to-import",
            cause=f"looked for {remote.files[0].name} and its siblings",
        )
    with hold(folder / INNER / "lock", what=f"{remote.quant} in {folder}", wait=wait, listen=listen):
        try:
            return _take_over(remote, found, folder, str(place), listen)
        except OSError as error:
            raise cannot_write(folder, error) from error


def _take_over(remote: RemoteSet, found: dict[str, Path], folder: Path, source: str, listen: Listener) -> Takeover:
    manifest = read_manifest(folder) or manifest_of(remote, source)
    write_manifest(folder, manifest)
    here = look(folder)
    have = {file.name for file in here.files if file.state is FileState.VERIFIED} if here else set()
    sizes = {file.name: file.size_bytes for file in remote.files}
    to_hash = {name: path for name, path in found.items() if name not in have and path.stat().st_size == sizes[name]}
    digests = hash_files(to_hash, {}, listen)
    right = {file.name for file in remote.files if file.name in digests and digests[file.name].sha256 == file.sha256}
    disk.require(folder, sum(sizes[name] for name in right if needs_room(found[name], folder)))
    taken: list[Taken] = []
    for file in remote.files:
        if file.name in have:
            taken.append(Taken(name=file.name, source=None, how=None, reason="here already"))
        elif file.name not in found:
            taken.append(Taken(name=file.name, source=None, how=None, reason="not found"))
        elif file.name not in to_hash:
            reason = f"it should have {file.size_bytes:,} bytes"
            taken.append(Taken(name=file.name, source=found[file.name], how=None, reason=reason))
        elif file.name not in right:
            reason = "its SHA-256 is not what the hub lists"
            taken.append(Taken(name=file.name, source=found[file.name], how=None, reason=reason))
        else:
            how, manifest = _take(file.name, found[file.name], folder, manifest, listen)
            write_marks(folder / file.name, digests[file.name].marks)
            taken.append(Taken(name=file.name, source=found[file.name], how=how))
    stored = look(folder)
    if stored is None:
        raise FileNotFoundError(2, "the folder has vanished", str(folder))
    return Takeover(stored=stored, files=tuple(taken))


def _take(name: str, source: Path, folder: Path, manifest: Manifest, listen: Listener) -> tuple[How, Manifest]:
    target, size = folder / name, source.stat().st_size
    target.unlink(missing_ok=True)  # it was not verified, and is replaced by one that is
    how = bring(
        source,
        target,
        advance=lambda done: listen(Advance(activity="copy", item=name, done_bytes=done, total_bytes=size)),
    )
    sync_folder(folder)
    manifest = with_verified(manifest, name, target.stat())
    write_manifest(folder, manifest)
    listen(Notice(text=f"{name}: {how} of {source}"))
    return how, manifest
