"""The servers that this user runs, as files: one each while it lives, and never believed over the process table.

``<state>/servers/<name>.json``. A process is known by its id and its start time: an id alone may be another's by now.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from kimigguf.engines import deaths
from kimigguf.engines.footprint import Baseline
from kimigguf.engines.llama_server import Address, get
from kimigguf.engines.tls import tls_files
from kimigguf.errors import MachineError, UsageError

_SCHEMA: Final = "kimigguf.server/1"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TO_START: Final = "kimigguf list shows what is here to be served, kimigguf recommend what this machine can hold"
_RESERVE_SECONDS: Final = 1.0
"""A name may be held for a moment by what only looks whether it is free, and by a process that is just ending."""
_SAME_SECONDS: Final = 2.0
"""Start times are counted from the boot, whose own time shifts a little when the clock is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process for sure. ``started`` is seconds since the epoch."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has ``pid`` now."""
        try:
            return cls(pid=pid, started=psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def process(self) -> psutil.Process | None:
        """The live process, None if it has ended, or its id is another's."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) <= _SAME_SECONDS
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is written about a server. ``arguments`` start it again; ``supervisor`` watches ``engine``."""

    name: str
    supervisor: ProcessId
    engine: ProcessId
    host: str
    port: int
    alias: str
    quant: str | None
    log: str
    plan_file: str
    arguments: tuple[str, ...]
    folder: str
    started_at: str
    planned_bytes: int
    api_key_file: str | None = None
    ready: Baseline | None = None
    """How it stood when it was ready; None before."""
    schema: str = _SCHEMA

    @property
    def address(self) -> Address:
        files = tls_files(self.arguments, Path(self.folder))
        return Address(host=self.host, port=self.port, certificate=None if files is None else str(files.certificate))


class Life(StrEnum):
    """What a server is doing, by its processes first and its answers second."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"
    """The engine lives and does not answer: it hangs, or is not listening yet."""
    ORPHANED = "orphaned"
    """The engine lives and its supervisor does not."""
    ENDED = "ended"
    """The engine has ended; its supervisor starts it again after a while, or is about to end too."""


def check_name(name: str) -> str:
    """The name, if a server may be called so.

    Raises:
        UsageError: ``bad-name``.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"a server cannot be called {name!r}",
            code="bad-name",
            hint="letters, digits, dots and dashes, 64 at most",
        )
    return name


def life_of(entry: Entry) -> Life:
    """What the server is doing now."""
    if entry.engine.process() is None:
        return Life.ENDED
    if entry.supervisor.process() is None:
        return Life.ORPHANED
    answer = get(entry.address, "/health", seconds=2.0)
    if answer is None:
        return Life.SILENT
    return Life.READY if answer[0] == 200 else Life.LOADING  # noqa: PLR2004 -- HTTP


def entries(folder: Path) -> tuple[Entry, ...]:
    """Every server with a living engine or supervisor, by name. Files of servers that are gone are removed.

    What removes its own file ended in order: of a file that is left over the death is remembered.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        entry = _read(path)
        if not _names_living(path):
            _clear(path)
        elif entry is not None and (entry.engine.process() or entry.supervisor.process()):
            found.append(entry)
    return tuple(found)


def _names_living(path: Path) -> bool:
    """Whether a file names a process that lives, also in an entry of another version, or cannot be read now."""
    try:
        found = json.loads(path.read_bytes())
        both = [ProcessId(pid=one["pid"], started=one["started"]) for one in (found["supervisor"], found["engine"])]
        return any(one.process() is not None for one in both)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    except (ValueError, TypeError, KeyError):  # no entry of any version
        return False


def _clear(path: Path) -> None:
    """Remove a file that is over. It is read once more under the lock: a server may have been entered there since."""
    with suppress(OSError), _writing(path.parent):
        if not _names_living(path):
            if (entry := _read(path)) is not None:
                remember_death(path.parent, entry, None)
            path.unlink(missing_ok=True)


def remember_death(folder: Path, entry: Entry, how: str | None) -> None:
    """Remember that the server ended by itself; ``how`` None: nobody saw it."""
    deaths.remember(
        folder,
        deaths.Death(
            name=entry.name,
            how=how or deaths.UNSEEN,
            noticed=time.time(),
            seen=how is not None,
            alias=entry.alias,
            quant=entry.quant,
            port=entry.port,
            log=entry.log,
            arguments=entry.arguments,
            folder=entry.folder,
        ),
    )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Be the only one who writes or removes an entry; held for the moment of a file operation, never longer."""
    from filelock import FileLock  # noqa: PLC0415 -- kept out of `kimigguf --help`

    with FileLock(folder / ".entries.lock", mode=0o600):
        yield


def find(folder: Path, name: str | None) -> Entry:
    """The server of that name, or the only one.

    Raises:
        UsageError: ``no-server``, ``which-server``.
    """
    running = entries(folder)
    if name is not None:
        if entry := next((entry for entry in running if entry.name == name), None):
            return entry
        known = ", ".join(entry.name for entry in running)
        hint = f"running: {known}" if known else "none is running; kimigguf list shows what could be served"
        raise UsageError(f"no server is called {name!r}", code="no-server", hint=hint)
    if not running:
        raise UsageError("no server is running", code="no-server", hint=TO_START)
    if len(running) > 1:
        raise UsageError(
            f"{len(running)} servers are running",
            code="which-server",
            hint="name one with --name: " + ", ".join(entry.name for entry in running),
        )
    return running[0]


def certificate_at(folder: Path, url: str) -> str | None:
    """The certificate of the running server at ``url``, where it is one of this user's and shows one."""
    asked = urlsplit(url)
    own = {"127.0.0.1", "localhost", "::1"}
    for entry in entries(folder):
        if asked.scheme == "https" and entry.port == asked.port and asked.hostname in own | {entry.host}:
            return entry.address.certificate
    return None


def require_new(folder: Path, name: str) -> None:
    """Refuse a name that a living server has.

    Raises:
        UsageError: ``name-in-use``.
    """
    if any(entry.name == name for entry in entries(folder)):
        raise UsageError(
            f"a server called {name} is running",
            code="name-in-use",
            hint=f"kimigguf stop --name {name}, or give this one another --name and --port",
        )


@contextmanager
def reserved(folder: Path, name: str, *, to_start: bool = False) -> Iterator[None]:
    """Have the name for oneself while the block runs, from before the first byte is fetched.

    It is a lock of the system's on ``<name>.lock``: what a dead process held is free. The file stays, so that all who
    come agree on one. ``to_start`` takes the right to start a process that will reserve the name itself.

    Raises:
        UsageError: ``name-in-use``.
        MachineError: ``state-unwritable``.
    """
    require_new(folder, name)
    with _locked(folder, name, "starting" if to_start else "lock"):
        require_new(folder, name)  # one that became ready while the lock was waited for
        yield


def restarting(folder: Path, name: str) -> AbstractContextManager[None]:
    """Have the right to start a server of that name for oneself, as ``reserved`` to start gives it, while it runs.

    Raises:
        UsageError: ``name-in-use``.
        MachineError: ``state-unwritable``.
    """
    return _locked(folder, name, "starting")


@contextmanager
def _locked(folder: Path, name: str, purpose: str) -> Iterator[None]:
    from filelock import FileLock, Timeout  # noqa: PLC0415 -- kept out of `kimigguf --help`

    lock = FileLock(folder / f"{name}.{purpose}", timeout=_RESERVE_SECONDS, mode=0o600)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"a server called {name} is being started",
            code="name-in-use",
            hint="give this one another --name; kimigguf status shows those that run",
        ) from error
    except OSError as error:
        raise MachineError(f"cannot write to {folder}", code="state-unwritable", cause=error.strerror) from error
    try:
        yield
    finally:
        lock.release()


class Registration:
    """A server's place in the registry, while its supervisor holds it."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self._path = path
        self.entry = entry

    def enter(self) -> None:
        """Have the entry there.

        Raises:
            MachineError: ``state-unwritable``.
        """
        self._put(self.entry)

    def write(self, entry: Entry) -> None:
        """Have ``entry`` there in its place, if it can be written: a full disk ends no server that has loaded."""
        with suppress(MachineError):
            self._put(entry)
            self.entry = entry

    def _put(self, entry: Entry) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.touch(mode=0o600)
            part.write_text(json.dumps(asdict(entry), indent=1) + "\n", encoding="utf-8")
            with _writing(self._path.parent):
                part.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise MachineError(f"cannot write {self._path}", code="state-unwritable", cause=error.strerror) from error

    def remove(self) -> None:
        """Take it out; an entry that is another's by then stays."""
        with suppress(OSError), _writing(self._path.parent):
            if _read(self._path) in {None, self.entry}:
                self._path.unlink(missing_ok=True)


@contextmanager
def entered(folder: Path, entry: Entry) -> Iterator[Registration]:
    """Have the server in the registry while the block runs; an entry that is another's by then stays.

    The death of an earlier one of its name is forgotten.

    Raises:
        MachineError: ``state-unwritable``.
    """
    registration = Registration(folder / f"{entry.name}.json", entry)
    registration.enter()
    deaths.forget(folder, entry.name)
    try:
        yield registration
    finally:
        registration.remove()


def _read(path: Path) -> Entry | None:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    with suppress(OSError, ValidationError, UsageError):
        entry = TypeAdapter(Entry).validate_json(path.read_bytes())
        if entry.schema == _SCHEMA and check_name(entry.name) == path.stem:
            return entry
    return None


def now() -> str:
    """This moment in UTC, as ISO 8601 writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def stop(entry: Entry, *, grace_seconds: float = 30.0) -> None:
    """End a server: ask its supervisor, then whatever is left of both, group by group."""
    if (supervisor := entry.supervisor.process()) is not None:
        with suppress(psutil.Error):
            supervisor.terminate()
            _wait_gone(entry.supervisor, grace_seconds)
    if (engine := entry.engine.process()) is not None:
        with suppress(psutil.Error):
            engine.terminate()
            _wait_gone(entry.engine, grace_seconds)
    _kill_group(entry.engine)
    if (supervisor := entry.supervisor.process()) is not None:
        with suppress(psutil.Error):
            supervisor.kill()


def _wait_gone(who: ProcessId, seconds: float) -> None:
    """Wait for its end. One that nobody reaps (a container without an init) has ended all the same."""
    until = time.monotonic() + seconds
    while who.process() is not None and time.monotonic() < until:
        time.sleep(0.05)


def _kill_group(engine: ProcessId) -> None:
    """What is left of the engine's group; the engine leads it, so its id names it while any member lives."""
    import signal  # noqa: PLC0415 -- used here alone

    if engine.process() is None and psutil.pid_exists(engine.pid):
        return  # the id is another's by now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(engine.pid, signal.SIGKILL)
