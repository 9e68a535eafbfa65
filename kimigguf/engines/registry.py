"""The servers that this user runs, as files: one each while it lives, and never believed over the process table.

``<state>/servers/<name>.json``. A process is known by its id and its start time: an id alone may be another's by now.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psutil

from kimigguf.engines.llama_server import Address, get
from kimigguf.errors import MachineError, UsageError

_SCHEMA: Final = "kimigguf.server/1"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
    schema: str = _SCHEMA

    @property
    def address(self) -> Address:
        return Address(host=self.host, port=self.port)


class Life(StrEnum):
    """What a server is doing, by its processes first and its answers second."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"
    """The engine lives and does not answer: it hangs, or is not listening yet."""
    ORPHANED = "orphaned"
    """The engine lives and its supervisor does not."""
    GONE = "gone"


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
        return Life.GONE
    if entry.supervisor.process() is None:
        return Life.ORPHANED
    answer = get(entry.address, "/health", seconds=2.0)
    if answer is None:
        return Life.SILENT
    return Life.READY if answer[0] == 200 else Life.LOADING  # noqa: PLR2004 -- HTTP


def entries(folder: Path) -> tuple[Entry, ...]:
    """Every server with a living engine, by name. Files of servers that are gone are removed."""
    found = []
    for path in sorted(folder.glob("*.json")):
        entry = _read(path)
        if entry is not None and entry.engine.process() is not None:
            found.append(entry)
        elif entry is None or entry.supervisor.process() is None:
            path.unlink(missing_ok=True)
    return tuple(found)


def find(folder: Path, name: str | None) -> Entry:
    """The server of that name, or the only one.

    Raises:
        UsageError: ``no-server``, ``which-server``.
    """
    running = entries(folder)
    if name is not None:
        if entry := next((entry for entry in running if entry.name == name), None):
            return entry
        known = ", ".join(entry.name for entry in running) or "none"
        raise UsageError(f"no server is called {name!r}", code="no-server", hint=f"running: {known}")
    if not running:
        raise UsageError("no server is running", code="no-server", hint="start one: kimigguf serve UD-IQ1_M --detach")
    if len(running) > 1:
        raise UsageError(
            f"{len(running)} servers are running",
            code="which-server",
            hint="name one with --name: " + ", ".join(entry.name for entry in running),
        )
    return running[0]


def require_new(folder: Path, name: str) -> None:
    """Refuse a name that a living server has.

    Raises:
        UsageError: ``name-in-use``.
    """
    if any(entry.name == name for entry in entries(folder)):
        raise UsageError(
            f"a server called {name} is running",
            code="name-in-use",
            hint=f"kimigguf stop --name {name}, or give this one another --name",
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
    from filelock import FileLock, Timeout  # noqa: PLC0415 -- kept out of `kimigguf --help`

    require_new(folder, name)
    lock = FileLock(folder / f"{name}.{'starting' if to_start else 'lock'}", timeout=_RESERVE_SECONDS, mode=0o600)
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
        require_new(folder, name)  # one that became ready while the lock was waited for
        yield
    finally:
        lock.release()


@contextmanager
def entered(folder: Path, entry: Entry) -> Iterator[None]:
    """Have the server in the registry while the block runs; an entry that is another's by then stays."""
    path = folder / f"{entry.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(asdict(entry), indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    try:
        yield
    finally:
        if _read(path) in {None, entry}:
            path.unlink(missing_ok=True)


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


def metrics(text: str) -> Mapping[str, float]:
    """The numbers of a Prometheus page by name, without ``llamacpp:``."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            with suppress(ValueError):
                found[name.partition(":")[2] or name] = float(value)
    return found


def observe(entry: Entry, key: str | None) -> dict[str, Any]:
    """What the server and its process say of themselves now; None for each thing that they do not."""
    engine = entry.engine.process()
    memory = None
    if engine is not None:
        with suppress(psutil.Error):
            memory = engine.memory_info().rss
    page = get(entry.address, "/metrics", key=key, seconds=2.0)
    numbers = metrics(page[1].decode(errors="replace")) if page and page[0] == 200 else {}  # noqa: PLR2004 -- HTTP
    slots = get(entry.address, "/slots", key=key, seconds=2.0)
    busy = total = None
    with suppress(ValueError, TypeError, AttributeError):
        listed = json.loads(slots[1]) if slots and slots[0] == 200 else None  # noqa: PLR2004 -- HTTP
        if isinstance(listed, list):
            total, busy = len(listed), sum(bool(slot.get("is_processing")) for slot in listed)
    return {
        "resident_bytes": memory,
        "planned_bytes": entry.planned_bytes,
        "slots": total,
        "slots_busy": busy,
        "prompt_tokens": _whole(numbers.get("prompt_tokens_total")),
        "generated_tokens": _whole(numbers.get("tokens_predicted_total")),
        "prompt_tokens_per_second": numbers.get("prompt_tokens_seconds"),
        "generated_tokens_per_second": numbers.get("predicted_tokens_seconds"),
        "requests_waiting": _whole(numbers.get("requests_deferred")),
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
