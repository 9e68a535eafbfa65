"""One process at a time changes a set; the others learn who it is, and a dead holder holds nothing."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kimigguf.errors import MachineError
from kimigguf.events import Listener, Step

_POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock. ``since`` is a date and time in UTC, as ISO 8601 writes it."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextlib.contextmanager
def hold(path: Path, *, what: str, wait: bool, listen: Listener) -> Iterator[None]:
    """Hold the lock file ``path`` for the length of a block. The system releases it when the process dies.

    Raises:
        MachineError: ``set-busy`` if another process holds it and ``wait`` is False; ``no-locks`` where the file
            system has none; ``cannot-write``.
    """
    file = _acquire(path, what, wait=wait, listen=listen)
    try:
        _sign(file)
        try:
            yield
        finally:
            # Emptied, so that nobody is named any more; not removed, so that those who wait agree on one file.
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
    finally:
        os.close(file)


def _acquire(path: Path, what: str, *, wait: bool, listen: Listener) -> int:
    """The lock file, opened and locked. Opened anew for every try: its holder may remove it together with its set."""
    told = False
    while True:
        file = _open(path)
        try:
            locked = _try(file, path)
        except BaseException:
            os.close(file)
            raise
        if locked and _is_at(file, path):
            return file
        os.close(file)
        if locked:
            continue
        holder = _holder(path)
        who = str(holder) if holder else "another process"
        if not wait:
            raise MachineError(
                f"{what} is being worked on by {who}",
                code="set-busy",
                hint=f"wait for it, or stop it with: kill {holder.pid}" if holder else "wait for it",
            )
        if not told:
            listen(Step(text=f"waiting for {who}, which works on {what}"))
            told = True
        time.sleep(_POLL_SECONDS)


def _is_at(file: int, path: Path) -> bool:
    """Is the open file still the one under this name?"""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise MachineError(
            f"cannot write to {path.parent}",
            code="cannot-write",
            cause=error.strerror,
            hint="choose another folder with --models-dir DIR",
        ) from error


def _try(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}:
            return False
        raise MachineError(
            f"the file system of {path.parent} has no file locks",
            code="no-locks",
            cause=error.strerror,
            hint="choose a folder on a local disk with --models-dir DIR",
        ) from error
    return True


def _sign(file: int) -> None:
    holder = Holder(pid=os.getpid(), host=os.uname().nodename, since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    with contextlib.suppress(OSError):  # a full disk: the lock itself holds all the same
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)


def _holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
