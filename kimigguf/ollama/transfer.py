"""Puts files into Ollama as blobs: sent or linked, hashed while the one before is sent, never twice, with progress."""

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event as Flag
from typing import BinaryIO, Final

import httpx

from kimigguf.errors import IntegrityError, KimiggufError, MachineError
from kimigguf.events import Advance, Listener, Notice, Step
from kimigguf.ollama.link import place, take_back
from kimigguf.ollama.session import Session, lost, refusal
from kimigguf.ollama.source import SourceFile
from kimigguf.ollama.storage import ModelsFolder
from kimigguf.units import storage

_PIECE: Final = 4 << 20
_CREATED: Final = 201


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file as Ollama knows it. Neither ``sent`` nor ``linked`` where it had it already."""

    file: SourceFile
    digest: str
    sent: bool = False
    linked: bool = False


class _Stopped(Exception):  # noqa: N818 -- no failure: the hashing is no longer wanted
    pass


def bring_all(
    session: Session,
    files: Sequence[SourceFile],
    listen: Listener,
    *,
    folder: ModelsFolder | None = None,
    link: bool = False,
) -> tuple[Blob, ...]:
    """Send every file that the server lacks, in order, or ``link`` it into the server's ``folder``.

    A file without a recorded hash is hashed first, one file ahead of the sending. One that is linked must have been
    verified, or is hashed too: the server, which checks what it is sent, does not look at what lies there.

    Raises:
        IntegrityError: ``shard-damaged``: the bytes are not those that were recorded.
        MachineError: ``unreadable-shard``, ``ollama-no-space`` or ``cannot-link``.
        NetworkError: ``ollama-connection-lost``.
        ServerError: ``ollama-refused``.
    """
    blobs: list[Blob] = []
    link_into = folder if link else None
    stop = Flag()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as pool:
        try:
            known = [file.sha256 if file.verified or link_into is None else None for file in files]
            ahead = pool.submit(_digest, files[0], known[0], listen, stop)
            for index, file in enumerate(files):
                digest = _result(file, ahead)
                if index + 1 < len(files):
                    ahead = pool.submit(_digest, files[index + 1], known[index + 1], listen, stop)
                blobs.append(_bring(session, file, digest, listen, link_into))
        except BaseException:
            _say_what_lies_there(blobs, folder, listen)
            raise
        finally:
            stop.set()
    return tuple(blobs)


def _result(file: SourceFile, hashed: "Future[str]") -> str:
    try:
        return hashed.result()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: SourceFile, error: OSError) -> MachineError:
    return MachineError(
        f"cannot read {file.path}",
        code="unreadable-shard",
        cause=error.strerror,
        hint=shlex.join(["ls", "-l", str(file.path)]),
    )


def _say_what_lies_there(blobs: list[Blob], folder: ModelsFolder | None, listen: Listener) -> None:
    new = [blob for blob in blobs if blob.sent or blob.linked]
    if not new:
        return
    size = storage(sum(blob.file.size_bytes for blob in new if blob.sent))
    names = [blob.digest.replace(":", "-", 1) for blob in new]
    if folder is not None:
        away = "now: " + shlex.join(["rm", *(str(folder.path / "blobs" / name) for name in names)])
    else:
        away = f"they are {', '.join(names)}"
    listen(
        Notice(
            text=f"{len(new)} blobs ({size}) lie in Ollama's folder and belong to no model yet: the next run uses them,"
            f" a restart of Ollama removes them once they are an hour old, or {away}"
        )
    )


def _digest(file: SourceFile, known: str | None, listen: Listener, stop: Flag) -> str:
    if known is not None:
        return f"sha256:{known}"
    total = hashlib.sha256()
    done = 0
    with file.path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            if stop.is_set():
                raise _Stopped
            total.update(piece)
            done += len(piece)
            listen(Advance(activity="hash", item=file.name, done_bytes=done, total_bytes=file.size_bytes))
    if file.sha256 not in {None, total.hexdigest()}:
        raise damaged(file, f"recorded {file.sha256}, found {total.hexdigest()}")
    return f"sha256:{total.hexdigest()}"


def damaged(file: SourceFile, cause: str) -> IntegrityError:
    """What to say of a file whose bytes have another hash than the recorded one."""
    return IntegrityError(
        f"{file.name} is damaged: its bytes are not those that were recorded",
        code="shard-damaged",
        cause=cause,
        hint=shlex.join(["kimigguf", "verify", str(file.path.parent)]),
    )


def _bring(session: Session, file: SourceFile, digest: str, listen: Listener, link_into: ModelsFolder | None) -> Blob:
    if session.has_blob(digest):
        return Blob(file=file, digest=digest)
    if link_into is None:
        return _send(session, file, digest, listen)
    place(file, digest, link_into)
    if not session.has_blob(digest):
        take_back(digest, link_into)
        raise MachineError(
            f"Ollama does not see what lies in {link_into.path}",
            code="cannot-link",
            cause="it keeps its models elsewhere",
            hint="send copies instead: add --copy",
        )
    listen(Step(text=f"linked {file.name}"))
    return Blob(file=file, digest=digest, linked=True)


def _send(session: Session, file: SourceFile, digest: str, listen: Listener) -> Blob:
    headers = {"Content-Length": str(file.size_bytes), "Content-Type": "application/octet-stream"}
    try:
        with file.path.open("rb") as stream:  # closed here, whatever becomes of the generator that reads it
            content = _pieces(stream, file, listen)
            reply = session.blobs.post(f"/api/blobs/{digest}", content=content, headers=headers)
    except httpx.HTTPError as error:
        raise lost(session.server, error) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    if reply.status_code not in {200, _CREATED}:
        raise _refused(session, file, reply)
    return Blob(file=file, digest=digest, sent=True)


def _refused(session: Session, file: SourceFile, reply: httpx.Response) -> KimiggufError:
    try:
        text = str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = reply.text
    if "digest mismatch" in text:
        return damaged(file, text)
    return refusal(session.server, text, reply.status_code)


def _pieces(stream: BinaryIO, file: SourceFile, listen: Listener) -> Iterator[bytes]:
    done = 0
    while piece := stream.read(_PIECE):
        yield piece
        done += len(piece)
        listen(Advance(activity="send", item=file.name, done_bytes=done, total_bytes=file.size_bytes))
