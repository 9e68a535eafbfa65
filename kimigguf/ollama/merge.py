"""Merges a set into one file in a folder of our own, so that Ollama has nothing to merge.

``NAME.gguf.part`` is being written or looked through; ``NAME.gguf`` was found to hold what the shards hold, and
``NAME.json`` says of which shards it was made and what its hash is. The record stays when the file has gone to Ollama:
it tells which blob the set is there. A merge that was interrupted is continued, whoever began it.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from kimigguf.download.lock import hold
from kimigguf.download.manifest import Stamp, now
from kimigguf.download.store import PART, cannot_write
from kimigguf.engines.supervise import Child
from kimigguf.errors import IntegrityError
from kimigguf.events import Advance, Listener, Notice, Step
from kimigguf.ollama.merged import Merged, Stretch, merged, same_header
from kimigguf.units import storage
from kimigguf.whole_file import sync_folder, write_whole

_PIECE_BYTES: Final = 4 << 20
_TICK_SECONDS: Final = 0.25
_SCHEMA: Final = "kimigguf.merged/1"
_TOOL: Final = "llama-gguf-split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A file that was merged: the looks of its shards, in order, and what became of them."""

    shards: tuple[Stamp, ...]
    size_bytes: int
    sha256: str
    inode: int
    schema: str = _SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A set's files in load order, the folder to merge them in and the name of what they become, without ``.gguf``.

    ``tool`` is llama-gguf-split; None: kimigguf writes the same bytes itself.
    """

    files: tuple[Path, ...]
    folder: Path
    name: str
    tool: Path | None = None

    @property
    def whole(self) -> Path:
        return self.folder / f"{self.name}.gguf"

    @property
    def part(self) -> Path:
        return self.folder / f"{self.name}.gguf{PART}"

    @property
    def _record(self) -> Path:
        return self.folder / f"{self.name}.json"

    def record(self) -> Record | None:
        """What these very shards were merged to before; None if nothing is on record."""
        from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

        try:
            found = TypeAdapter(Record).validate_json(self._record.read_bytes())
            looks = [path.stat() for path in self.files]
        except (OSError, ValidationError):
            return None
        fits = len(looks) == len(found.shards) and all(map(Stamp.fits, found.shards, looks))
        return found if fits and found.schema == _SCHEMA else None

    def begun_bytes(self) -> int:
        """What lies here of the merged file, whole or in part."""
        return _size(self.whole) or _size(self.part)

    def keep(self, record: Record) -> None:
        """Write the record down."""
        write_whole(self._record, json.dumps(asdict(record)).encode())

    def clear(self) -> None:
        """Remove the merged file, whole or in part; the record stays."""
        for path in (self.whole, self.part, self.log):
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def log(self) -> Path:
        """What the tool says."""
        return self.folder / f"{self.name}.log"


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _is(path: Path, record: Record) -> bool:
    with contextlib.suppress(OSError):
        found = path.stat()
        return (found.st_size, found.st_ino) == (record.size_bytes, record.inode)
    return False


def merge(job: Job, environ: Mapping[str, str], listen: Listener) -> Record:
    """Merge the set, or go on where it was interrupted; afterwards ``job.whole`` holds it.

    In a set of ours this holds the set's own lock: nobody repairs or removes shards that are being merged.

    Raises:
        IntegrityError: ``merge-differs``: what was written is not what the shards hold; it is removed then.
        MachineError: ``disk-full``, ``cannot-write``, ``set-busy``.
    """
    with hold(job.folder / "lock", what=f"{job.name} in {job.folder.parent}", wait=False, listen=listen):
        record = job.record()
        if record is not None and _is(job.part, record):
            job.part.replace(job.whole)  # interrupted between the last two steps
        if record is not None and _is(job.whole, record):
            return record
        with contextlib.suppress(OSError):
            job.whole.unlink()  # of other shards
        try:
            return _make(job, environ, listen)
        except BaseException:
            _say_what_lies_there(job, listen)
            raise


def _say_what_lies_there(job: Job, listen: Listener) -> None:
    if size := _size(job.part):
        text = f"{storage(size)} of the merged file lie in {job.part}: the next run goes on from there, or:"
        listen(Notice(text=f"{text} {shlex.join(['rm', str(job.part)])}"))


def _make(job: Job, environ: Mapping[str, str], listen: Listener) -> Record:
    plan = merged(job.files)
    looks = [path.stat() for path in job.files]
    begun = _size(job.part) > 0
    own = begun or job.tool is None
    how = ", continued" if begun else "" if own or job.tool is None else f" with {job.tool}"
    listen(Step(text=f"merging {len(job.files)} shards into {job.folder}{how}"))
    try:
        if own or not _run_tool(job, plan, environ, listen):
            _write(job.part, plan, listen)
        listen(Step(text="waiting until all of it is on the disk, then holding it against the shards"))
        _to_disk(job.part)
        try:
            digest = check(job.part, plan, listen)
        except IntegrityError as error:
            job.part.unlink(missing_ok=True)
            if own and not begun:
                raise
            # What was begun may be of other shards, or half of it was lost with the power; tools have faults, too.
            listen(Notice(text=f"merging again: {error.cause or error.message}"))
            return _make(replace(job, tool=None), environ, listen)
        stamps = tuple(
            Stamp(size_bytes=look.st_size, mtime_ns=look.st_mtime_ns, inode=look.st_ino, at=now()) for look in looks
        )
        record = Record(shards=stamps, size_bytes=plan.size_bytes, sha256=digest, inode=job.part.stat().st_ino)
        job.keep(record)
        job.part.replace(job.whole)
        sync_folder(job.folder)
    except OSError as error:
        raise cannot_write(job.folder, error) from error
    job.log.unlink(missing_ok=True)
    return record


def _run_tool(job: Job, plan: Merged, environ: Mapping[str, str], listen: Listener) -> bool:
    """Have the tool merge; false where it could not."""
    with Child.start([str(job.tool), "--merge", str(job.files[0]), str(job.part)], environ, job.log) as child:
        while (ended := child.wait(_TICK_SECONDS)) is None:
            listen(_merging(job.name, _size(job.part), plan.size_bytes))
        if ended.code == 0 and _size(job.part):
            listen(_merging(job.name, plan.size_bytes, plan.size_bytes))
            return True
        said = [line.strip() for line in child.log_tail().splitlines() if line.strip()]
    listen(Notice(text=f"{job.tool} gave up, so kimigguf merges itself: {said[-1][:300] if said else ended}"))
    return False


def _name(path: Path) -> str:
    return path.name.removesuffix(PART).removesuffix(".gguf")


def _merging(name: str, done: int, total: int) -> Advance:
    return Advance(activity="merge", item=name, done_bytes=done, total_bytes=total)


def _write(part: Path, plan: Merged, listen: Listener) -> None:
    """Write the merged file from where it ends; its header last, so that half a file is none."""
    with part.open("r+b" if part.exists() else "xb") as out:
        done = min(_size(part), plan.size_bytes)
        for stretch in plan.stretches:
            for at, piece in _pieces(stretch, done):
                out.seek(at)
                out.write(piece)
                done = at + len(piece)
                listen(_merging(_name(part), done, plan.size_bytes))
        out.truncate(plan.size_bytes)
        out.seek(0)
        out.write(plan.header)
    listen(_merging(_name(part), plan.size_bytes, plan.size_bytes))


def _pieces(stretch: Stretch, done: int) -> Iterator[tuple[int, bytes]]:
    """What of a tensor lies behind ``done`` in the merged file: where each piece goes there, and the piece."""
    at, end = max(stretch.at, done), stretch.at + stretch.size_bytes
    if at >= end:
        return
    try:
        with stretch.path.open("rb", buffering=0) as shard:
            shard.seek(stretch.offset + at - stretch.at)
            while at < end:
                piece = shard.read(min(_PIECE_BYTES, end - at))
                if not piece:
                    raise IntegrityError(
                        f"{stretch.path.name} ends inside {stretch.name}",
                        code="file-cut",
                        hint=shlex.join(["kimigguf", "verify", str(stretch.path.parent)]),
                    )
                yield at, piece
                at += len(piece)
    except OSError as error:
        raise IntegrityError(
            f"{stretch.path} cannot be read",
            code="unreadable",
            cause=error.strerror,
            hint="look at the disk's health: dmesg | tail",
        ) from error


def _to_disk(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def check(path: Path, plan: Merged, listen: Listener) -> str:
    """Hold a merged file against its shards: its size, its keys and tensor table, and every byte of every tensor.

    Returns:
        Its SHA-256, worked out on the way.

    Raises:
        IntegrityError: ``merge-differs``.
    """
    if _size(path) != plan.size_bytes:
        raise _differs(path, f"it has {_size(path):,} bytes and should have {plan.size_bytes:,}")
    total, item = hashlib.sha256(), _name(path)
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:
        header = _read(stream, len(plan.header))
        if not same_header(header, plan):
            raise _differs(path, "its keys or its tensor table are others than the shards'")
        total.update(header)
        last = pool.submit(total.update, b"")
        for stretch in plan.stretches:
            padding = _read(stream, stretch.at - stream.tell())
            last.result()
            last = pool.submit(total.update, padding)
            for at, piece in _pieces(stretch, 0):
                found = _read(stream, len(piece))
                if found != piece:
                    raise _differs(path, f"{stretch.name} is not what {stretch.path.name} holds")
                last.result()
                last = pool.submit(total.update, found)  # while the next pieces are read
                listen(Advance(activity="check", item=item, done_bytes=at, total_bytes=plan.size_bytes))
        last.result()
        total.update(_read(stream, plan.size_bytes - stream.tell()))
    listen(Advance(activity="check", item=item, done_bytes=plan.size_bytes, total_bytes=plan.size_bytes))
    return total.hexdigest()


def _read(stream: BinaryIO, count: int) -> bytes:
    """``count`` bytes, or as many as there are."""
    data = stream.read(count)
    while len(data) < count and (more := stream.read(count - len(data))):
        data += more
    return data


def _differs(path: Path, cause: str) -> IntegrityError:
    return IntegrityError(
        f"{path.name} is not what its shards hold together",
        code="merge-differs",
        cause=cause,
        hint="run the same command again: it is merged anew; if it happens again, look at the disk: dmesg | tail",
    )


def split_tool(environ: Mapping[str, str]) -> Path | None:
    """The llama-gguf-split of the llama.cpp that would serve here, or another on PATH; None where there is none."""
    from kimigguf.engines.discover import places  # noqa: PLC0415 -- only where something is to be merged
    from kimigguf.engines.report import beside  # noqa: PLC0415 -- as above

    programs = [place / "llama-server" if place.is_dir() else place for place, _, _ in places(environ)]
    if found := shutil.which(_TOOL, path=environ.get("PATH", "")):
        programs.append(Path(found))
    return next((tool for program in programs if (tool := beside(program, _TOOL))), None)
