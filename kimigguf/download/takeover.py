"""Take shards that are on this machine already into a set of ours: looked for by name, taken only by hash."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.catalogue.remote import RemoteSet
from kimigguf.download import disk
from kimigguf.download.bring import How, bring, is_same, needs_room
from kimigguf.download.hashing import Digest, hash_files, look_at, write_marks
from kimigguf.download.lock import hold
from kimigguf.download.manifest import (
    INNER,
    Manifest,
    manifest_of,
    read_manifest,
    with_verified,
    write_manifest,
)
from kimigguf.download.store import FileState, StoredSet, cannot_write, look
from kimigguf.errors import UsageError
from kimigguf.events import Advance, Listener, Notice, ignore
from kimigguf.whole_file import sync_folder

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


def candidates(place: Path, names: frozenset[str]) -> dict[str, tuple[Path, ...]]:
    """Files under ``place`` (or, of a file, in its folder) with these names; links to files are followed.

    The same name may lie there more than once: another revision, or a copy that is damaged.
    """
    found: dict[str, list[Path]] = {}
    for path in _walk(place if place.is_dir() else place.parent, _DEPTH if place.is_dir() else 0):
        if path.name in names and path.is_file():
            found.setdefault(path.name, []).append(path)
    return {name: tuple(paths) for name, paths in found.items()}


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

    A shard that is in ``folder`` already is only noted as verified: ``place`` may be that folder, or one above it.

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


def _take_over(
    remote: RemoteSet, found: dict[str, tuple[Path, ...]], folder: Path, source: str, listen: Listener
) -> Takeover:
    manifest = read_manifest(folder) or manifest_of(remote, source)
    write_manifest(folder, manifest)
    here = look(folder)
    have = {file.name for file in here.files if file.state is FileState.VERIFIED} if here else set()
    right = _right_ones({name: paths for name, paths in found.items() if name not in have}, remote, folder, listen)
    to_come = [r for name, r in right.items() if not is_same(r.path, folder / name) and needs_room(r.path, folder)]
    disk.require(folder, sum(r.stat.st_size for r in to_come))
    taken: list[Taken] = []
    for file in remote.files:
        if file.name in right:
            how, manifest = _take(file.name, right[file.name], folder, manifest, listen)
            taken.append(Taken(name=file.name, source=right[file.name].path, how=how))
        elif file.name in have:
            taken.append(Taken(name=file.name, source=None, how=None, reason="here already"))
        elif file.name not in found:
            taken.append(Taken(name=file.name, source=None, how=None, reason="not found"))
        else:
            whole = [path for path in found[file.name] if path.stat().st_size == file.size_bytes]
            reason = "its SHA-256 is not what the hub lists" if whole else f"it should have {file.size_bytes:,} bytes"
            taken.append(Taken(name=file.name, source=(*whole, *found[file.name])[0], how=None, reason=reason))
    stored = look(folder)
    if stored is None:
        raise FileNotFoundError(2, "the folder has vanished", str(folder))
    return Takeover(stored=stored, files=tuple(taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Right:
    """A file whose hash is right, and how it looked before it was hashed."""

    path: Path
    stat: os.stat_result
    digest: Digest


def _right_ones(
    found: Mapping[str, tuple[Path, ...]], remote: RemoteSet, folder: Path, listen: Listener
) -> dict[str, _Right]:
    """Of each name a file with the right hash: the set's own if it is right, then whichever comes first."""
    wanted = {file.name: file for file in remote.files}
    left = {
        name: [path for path in _own_first(paths, folder / name) if path.stat().st_size == wanted[name].size_bytes]
        for name, paths in found.items()
    }
    right: dict[str, _Right] = {}
    while now := {name: paths.pop(0) for name, paths in left.items() if paths and name not in right}:
        looks = look_at(now)
        for name, digest in hash_files(now, {}, listen).items():
            if digest.sha256 == wanted[name].sha256:
                right[name] = _Right(path=now[name], stat=looks[name], digest=digest)
    return right


def _own_first(paths: tuple[Path, ...], target: Path) -> list[Path]:
    """One path of each file, the one that is in the set's folder first: nothing has to be done for that."""
    files: dict[tuple[int, int], Path] = {}
    for path in (target, *paths) if target.is_file() else paths:
        stat = path.stat()
        files.setdefault((stat.st_dev, stat.st_ino), path)
    return list(files.values())


def _take(name: str, right: _Right, folder: Path, manifest: Manifest, listen: Listener) -> tuple[How, Manifest]:
    target, size = folder / name, right.stat.st_size
    how = bring(
        right.path,
        target,
        advance=lambda done: listen(Advance(activity="copy", item=name, done_bytes=done, total_bytes=size)),
    )
    sync_folder(folder)
    before, after = right.stat, right.path.stat()
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    # What was written to while it was hashed or brought is not verified, whatever its hash was.
    manifest = with_verified(manifest, name, target.stat() if unchanged else None)
    write_manifest(folder, manifest)
    if unchanged:
        write_marks(target, right.digest.marks)
    listen(Notice(text=f"{name}: verified {how}" if how is How.IN_PLACE else f"{name}: {how} of {right.path}"))
    return how, manifest
