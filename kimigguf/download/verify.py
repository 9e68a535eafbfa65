"""Is what lies on the disk what the hub listed? By full hash on all cores, or by a quick look."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kimigguf.download.hashing import Digest, hash_files, look_at, marks_path, write_marks
from kimigguf.download.lock import hold
from kimigguf.download.manifest import INNER, read_manifest, with_verified, write_manifest
from kimigguf.download.store import FileState, StoredFile, StoredSet, look
from kimigguf.errors import IntegrityError, KimiggufError, MachineError
from kimigguf.events import Listener, ignore

_END_BYTES: Final = 1 << 20


class Verdict(StrEnum):
    """What is known of one file."""

    OK = "ok"
    DAMAGED = "damaged"
    MISSING = "missing"
    WRONG_SIZE = "wrong-size"
    UNKNOWN = "unknown"  # hashed, but nobody has said what the hash should be; or only looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One file's verdict. ``bad_from_bytes``/``bad_to_bytes``: the first range that differs, where that can be told."""

    name: str
    verdict: Verdict
    size_bytes: int
    sha256: str | None = None
    bad_from_bytes: int | None = None
    bad_to_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verdicts of a set, in load order. ``hashed_bytes`` were read, ``seconds`` it took."""

    files: tuple[Checked, ...]
    quick: bool
    hashed_bytes: int
    seconds: float

    @property
    def bad(self) -> tuple[Checked, ...]:
        """The files that are not as they should be."""
        return tuple(file for file in self.files if file.verdict not in {Verdict.OK, Verdict.UNKNOWN})


def verify(
    stored: StoredSet, *, quick: bool = False, changed_only: bool = False, listen: Listener = ignore
) -> Verification:
    """Check every file of a set; what is found right is noted in its manifest.

    ``changed_only`` hashes only files that have been touched since they were last verified: what a start of the
    engine needs. ``quick`` hashes nothing: sizes, headers, and that the first and last MiB can be read.

    Raises:
        IntegrityError: ``unreadable``.
    """
    started = time.monotonic()
    if stored.manifest is not None:
        stored = look(stored.folder) or stored  # as it is now, not as somebody saw it
    to_hash = [
        file
        for file in stored.files
        if not quick
        and file.state in {FileState.UNVERIFIED, FileState.VERIFIED}
        and not (changed_only and file.state is FileState.VERIFIED)
    ]
    paths = {file.name: file.path for file in to_hash}
    looks = look_at(paths)
    results = hash_files(paths, {file.name: file.sha256 for file in to_hash}, listen)
    files = tuple(_checked(file, results.get(file.name), quick=quick) for file in stored.files)
    good = {file.name: looks[file.name] for file in files if file.verdict is Verdict.OK and file.name in looks}
    _note(stored, good, results, {file.name for file in files if file.verdict is Verdict.DAMAGED})
    return Verification(
        files=files,
        quick=quick,
        hashed_bytes=sum(file.size_bytes for file in to_hash),
        seconds=time.monotonic() - started,
    )


def check_belonging(stored: StoredSet) -> None:
    """Hold the headers of a foreign set against each other: one of another quant would load without a word.

    Raises:
        IntegrityError, UsageError: As ``gguf_file.shards.read_set`` has it.
    """
    if stored.manifest is None:
        from kimigguf.gguf_file.shards import read_set  # noqa: PLC0415 -- reads megabytes of metadata; only for these

        read_set(tuple(file.path for file in stored.files))


def require_whole(verification: Verification, stored: StoredSet) -> None:
    """Turn anything bad into an error that names the shard.

    Raises:
        IntegrityError: ``damaged-shard`` or ``missing-shard``.
    """
    if not verification.bad:
        return
    worst = verification.bad[0]
    missing = worst.verdict is Verdict.MISSING
    others = f" (and {len(verification.bad) - 1} more)" if len(verification.bad) > 1 else ""
    what = "is missing" if missing else "is damaged"
    raise IntegrityError(
        f"{worst.name} {what}{others}",
        code="missing-shard" if missing else "damaged-shard",
        cause=worst.reason,
        hint=f"fetch what is bad: kimigguf repair {stored.quant or stored.folder}",
    )


def _checked(file: StoredFile, digest: Digest | None, *, quick: bool) -> Checked:
    verdict, reason, bad = Verdict.UNKNOWN, None, None
    match file.state:
        case FileState.MISSING | FileState.PARTIAL:
            verdict = Verdict.MISSING
            reason = f"{file.done_bytes:,} of {file.size_bytes:,} bytes are here" if file.done_bytes else None
        case FileState.WRONG_SIZE:
            verdict = Verdict.WRONG_SIZE
            reason = f"it should have {file.size_bytes:,} bytes, and has {file.path.stat().st_size:,}"
        case _ if digest is not None:
            if file.sha256 is None:
                reason = f"SHA-256 {digest.sha256}; nothing to compare it with"
            elif digest.sha256 == file.sha256:
                verdict = Verdict.OK
            else:
                verdict, bad = Verdict.DAMAGED, digest.first_bad
                where = f"bytes {bad[0]:,} to {bad[1]:,} differ" if bad else "its SHA-256 differs"
                reason = f"{where} from what the hub listed"
        case _ if quick and (problem := _quick_problem(file)) is not None:
            verdict, reason = Verdict.DAMAGED, problem
        case FileState.VERIFIED:
            verdict = Verdict.OK
        case _:
            reason = "not hashed"
    return Checked(
        name=file.name,
        verdict=verdict,
        size_bytes=file.size_bytes,
        sha256=digest.sha256 if digest else file.sha256,
        bad_from_bytes=bad[0] if bad else None,
        bad_to_bytes=bad[1] if bad else None,
        reason=reason,
    )


def _quick_problem(file: StoredFile) -> str | None:
    """What a header and the two ends of a file can say against it, None if nothing."""
    from kimigguf.gguf_file.read import check_size, read_header  # noqa: PLC0415 -- reads megabytes of metadata; only for quick

    try:
        check_size(read_header(file.path), file.size_bytes, name=file.name)
        with file.path.open("rb") as stream:
            stream.seek(max(0, file.size_bytes - _END_BYTES))
            if file.size_bytes and not stream.read(_END_BYTES):
                return "its end can't be read"
    except KimiggufError as error:
        return error.message
    except OSError as error:
        return error.strerror
    return None


def _note(
    stored: StoredSet, good: Mapping[str, os.stat_result], digests: Mapping[str, Digest], damaged: set[str]
) -> None:
    """Remember in the manifest what was found; a manifest that can't be written forgets, no more."""
    if stored.manifest is None or not (good or damaged):
        return
    lock = stored.folder / INNER / "lock"
    # Whoever holds the lock is writing the manifest: then it is theirs, and what was found here is only not remembered.
    with (
        contextlib.suppress(OSError, MachineError),
        hold(lock, what=str(stored.folder), wait=False, listen=ignore),
    ):
        manifest = read_manifest(stored.folder) or stored.manifest
        for name, stat in good.items():
            manifest = with_verified(manifest, name, stat)
        for name in damaged:
            manifest = with_verified(manifest, name, None)
        write_manifest(stored.folder, manifest)
        for name in good:
            if not marks_path(stored.folder / name).exists():
                write_marks(stored.folder / name, digests[name].marks)
