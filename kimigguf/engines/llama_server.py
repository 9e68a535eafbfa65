"""A llama.cpp server as a running thing: start it, watch it load, know when it is ready and why it is not, stop it."""

import errno
import http.client
import json
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

import psutil

from kimigguf.engines.command import Command
from kimigguf.engines.diagnose import ENDED, EngineDiedError, server_error
from kimigguf.engines.oom import KillWatch
from kimigguf.engines.pressure import PressureWatch
from kimigguf.engines.progress import LoadWatch, read_activity
from kimigguf.engines.supervise import Child, State
from kimigguf.engines.tls import trusting
from kimigguf.errors import MachineError, ServerError, UsageError
from kimigguf.events import Listener, Notice, Step, ignore
from kimigguf.hardware.pressure import read_pressure
from kimigguf.units import duration

STALL_SECONDS: Final = 300.0
_OK: Final = 200
_POLL_SECONDS: Final = 0.1
_HTTP_SECONDS: Final = 5.0
_STRANGER_SECONDS: Final = 30.0
_HEALTH_EVERY_SECONDS: Final = 2.0
_HEALTH_SECONDS: Final = 10.0
_SILENT_TIMES: Final = 3
_DYING_SECONDS: Final = 10.0
_SLOTS_SECONDS: Final = 2.0
DRAIN_SECONDS: Final = 15.0
"""What requests in flight get on a stop. With what the engine itself gets it stays below the 30 s that ``stop``,
Docker's and Kubernetes' patience last."""
_PRESSURE_EVERY_SECONDS: Final = 10.0
"""The kernel's shortest window of stalls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens; ``certificate`` is the file of the one it shows, None for plain HTTP."""

    host: str
    port: int
    certificate: str | None = None

    @property
    def reachable_host(self) -> str:
        """The host to connect to: a server on every address is reached on loopback."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 -- compared, not bound

    @property
    def url(self) -> str:
        host = self.reachable_host
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def trust(self) -> ssl.SSLContext | None:
        """What takes this server for itself and no other; None for plain HTTP.

        Raises:
            OSError, ValueError: Its certificate is no longer there.
        """
        return None if self.certificate is None else trusting(self.certificate)


def port_problem(address: Address) -> UsageError | MachineError | None:
    """Why the address cannot be listened on now; None if it can.

    Connections of an earlier server that still close do not count.
    """
    host = address.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # a ValueError for what cannot even be a name
        return UsageError(
            f"--host {address.host} is no address and no name that this machine knows",
            code="unknown-host",
            cause=str(error),
            hint="--host 127.0.0.1 for this machine alone, --host 0.0.0.0 --new-api-key for every network it is on",
        )
    # A name with addresses of both kinds is served on the older kind, as clients try it where the newer one fails.
    family, kind, protocol, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return _bind_problem(address, error)
    return None


def _bind_problem(address: Address, error: OSError) -> UsageError | MachineError:
    where = f"port {address.port} on {address.host}"
    match error.errno:
        case errno.EADDRINUSE:
            return MachineError(
                f"{where} cannot be had: another program listens there",
                code="port-in-use",
                hint="choose another with --port; ss -ltnp shows who has it",
            )
        case errno.EADDRNOTAVAIL:
            return UsageError(
                f"--host {address.host} is an address of another machine, or of none",
                code="address-not-here",
                hint="ip -brief address shows those of this machine; 0.0.0.0 is all of them",
            )
        case errno.EACCES | errno.EPERM:
            return MachineError(
                f"{where} cannot be had: this user may not listen there",
                code="port-not-allowed",
                cause=error.strerror,
                hint="choose one from 1024 on with --port",
            )
    return MachineError(f"{where} cannot be had", code="port-unusable", cause=error.strerror or str(error))


def require_free(address: Address) -> None:
    """Refuse an address that cannot be listened on.

    Raises:
        UsageError: ``unknown-host``, ``address-not-here``.
        MachineError: ``port-in-use``, ``port-not-allowed``, ``port-unusable``.
    """
    if (problem := port_problem(address)) is not None:
        raise problem


def get(
    address: Address, path: str, *, key: str | None = None, seconds: float = _HTTP_SECONDS
) -> tuple[int, bytes] | None:
    """Status and body of a GET; None if nobody answers HTTP there. No proxy is ever asked."""
    try:
        connection = _connection(address, seconds)
    except (OSError, ValueError):  # its certificate is no longer there
        return None
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _connection(address: Address, seconds: float) -> http.client.HTTPConnection:
    host = address.reachable_host.strip("[]")
    if (trust := address.trust) is None:
        return http.client.HTTPConnection(host, address.port, timeout=seconds)
    return http.client.HTTPSConnection(host, address.port, timeout=seconds, context=trust)


def read_slots(address: Address, key: str | None) -> tuple[int | None, int | None]:
    """How many slots there are, and how many are at work; None where the server does not say."""
    return _slots(get(address, "/slots", key=key, seconds=_SLOTS_SECONDS))


def _slots(answer: tuple[int, bytes] | None) -> tuple[int | None, int | None]:
    with suppress(ValueError, TypeError, AttributeError):
        listed = json.loads(answer[1]) if answer and answer[0] == _OK else None
        if isinstance(listed, list):
            return len(listed), sum(bool(slot.get("is_processing")) for slot in listed)
    return None, None


class Server:
    """An engine that was started to serve. The one owner of its process and of its state."""

    def __init__(
        self,
        child: Child,
        address: Address,
        *,
        alias: str,
        total_bytes: int,
        key: str | None,
        streamed_bytes: int = 0,
    ) -> None:
        self._child = child
        self._total_bytes = total_bytes
        self._key = key
        self._kills = KillWatch()
        self._pressure = PressureWatch(streamed_bytes=streamed_bytes)
        self._pressure_at = 0.0
        self._ready_at: float | None = None
        self.address = address
        self.alias = alias
        self.state = State.STARTING

    @classmethod
    def start(
        cls,
        command: Command,
        address: Address,
        *,
        alias: str,
        log: Path,
        total_bytes: int,
        key: str | None = None,
        streamed_bytes: int = 0,
    ) -> Self:
        """Start the engine; it is not ready yet. ``key`` is one of the API keys that it was given.

        ``streamed_bytes`` of its weights are meant to be read from disk again and again.

        Raises:
            MachineError: ``port-in-use`` before anything is started, ``engine-unusable``, ``log-unwritable``.
        """
        require_free(address)
        trusting.cache_clear()  # it reads its certificate anew, which may have been renewed
        child = Child.start(command.argv, command.environ, log)
        return cls(child, address, alias=alias, total_bytes=total_bytes, key=key, streamed_bytes=streamed_bytes)

    @property
    def log(self) -> Path:
        return self._child.log

    @property
    def pid(self) -> int:
        return self._child.pid

    def log_text(self) -> str:
        """The engine's log from its beginning, at most 8 MiB of it."""
        return self._child.log_head()

    def wait_ready(self, listen: Listener = ignore, *, stall_seconds: float = STALL_SECONDS) -> float:
        """Wait until the model is loaded and answers; returns the seconds it took.

        No clock ends a load: a terabyte takes as long as it takes. When nothing advanced for ``stall_seconds`` (no
        bytes read, no memory mapped, no processor time, no log line), that is said, with the last line seen.

        Raises:
            ServerError: the engine died, with the reason from its log.
        """
        began = time.monotonic()
        listen(Step(text="starting the engine"))
        watch = LoadWatch(total_bytes=self._total_bytes, stall_seconds=stall_seconds, listen=listen)
        while True:
            self.raise_if_dead("loading")
            answer = get(self.address, "/health")
            if answer is not None and answer[0] == _OK and self._is_ours():
                self.raise_if_dead("loading")
                self.state = State.READY
                self._ready_at = time.monotonic()
                watch.finish()
                return self._ready_at - began
            if answer is not None:
                self.state = State.LOADING
                self._refuse_stranger(answer[0], began)
            watch.look(read_activity(self._child.pid, self._child.log), self._child.log_tail)
            if sentence := self._pressed():
                listen(Notice(text=sentence))
            self._child.wait(_POLL_SECONDS)

    def _is_ours(self) -> bool:
        """Whether the answering server carries our alias: another one may have taken the port meanwhile."""
        answer = get(self.address, "/v1/models", key=self._key)
        if answer is None or answer[0] != _OK:
            return False
        with suppress(ValueError, AttributeError, TypeError):
            models = json.loads(answer[1]).get("data", [])
            return any(self.alias in (model.get("id"), *(model.get("aliases") or ())) for model in models)
        return False

    def _refuse_stranger(self, status: int, began: float) -> None:
        """Give up on a port where, long after ``began``, whoever answers is healthy and does not serve our model."""
        if status != _OK or time.monotonic() - began <= _STRANGER_SECONDS:
            return
        if self._listens():
            answer = get(self.address, "/v1/models", key=self._key)
            said = f"{answer[0]} {answer[1][:200].decode(errors='replace')}" if answer else "no answer"
            raise ServerError(
                "the server says that it is healthy and does not name its model",
                code="health-lies",
                cause=f"GET /health: 200; GET /v1/models: {said}",
                hint=f"another build of the engine may not have the fault: --engine-path DIR; the log: {self.log}",
            )
        raise ServerError(
            f"the server that answers at {self.address.url} does not serve {self.alias}",
            code="not-ours",
            cause="another program took the port while the engine was starting",
            hint=f"choose another with --port; the log: {self.log}",
        )

    def _listens(self) -> bool:
        """Whether it is the engine itself that listens on the port."""
        with suppress(psutil.Error):
            listening = psutil.Process(self.pid).net_connections("tcp")
            return any(one.status == psutil.CONN_LISTEN and one.laddr.port == self.address.port for one in listening)
        return False

    def wait(self, listen: Listener = ignore) -> NoReturn:
        """Wait, as long as it serves, for its end. What is wrong meanwhile is told once each time, also to its log.

        That is a server that lives and no longer answers - a busy one still answers /health, so silence there is a
        hang and not work - and memory that runs short.

        Raises:
            EngineDiedError: With the reason from its log.
            KeyboardInterrupt: It is to be stopped; requests in flight have had ``DRAIN_SECONDS``.
        """

        def say(text: str) -> None:
            self._child.note(text)
            with suppress(OSError):  # a terminal that was closed, a reader that has gone: no reason to end a server
                listen(Notice(text=text))

        try:
            self._watch(say)
        except KeyboardInterrupt:
            self._drain(say)
            raise

    def _drain(self, say: Callable[[str], None]) -> None:
        """Let the requests in flight come to their end, for a while. A second interruption ends the wait."""
        until = time.monotonic() + DRAIN_SECONDS
        busy = self._at_work()
        if busy:
            say(f"{busy} in flight get up to {duration(DRAIN_SECONDS)} to end; Ctrl-C again ends them now")
        while busy and time.monotonic() < until and self._child.wait(_POLL_SECONDS) is None:
            busy = self._at_work()
        if busy:
            say(f"{busy} were cut off")

    def _at_work(self) -> str | None:
        """Requests in flight, in words; None: there are none, or the server never tells."""
        answer = get(self.address, "/slots", key=self._key, seconds=_SLOTS_SECONDS)
        if answer is None:  # it answers between two batches, and one batch of a long prompt takes its time
            return "requests" if self._child.exit() is None else None
        _, busy = _slots(answer)
        return f"{busy} request(s)" if busy else None

    def _watch(self, say: Callable[[str], None]) -> NoReturn:
        silent = 0
        while True:
            if self._child.wait(_HEALTH_EVERY_SECONDS) is not None:
                self.raise_if_dead("serving")
            if sentence := self._pressed():
                say(sentence)
            if get(self.address, "/health", seconds=_HEALTH_SECONDS) is not None:
                if silent >= _SILENT_TIMES:
                    say("the server answers again")
                silent = 0
                continue
            silent += 1
            if silent == _SILENT_TIMES and self._child.exit() is None:
                say(f"the server lives (process {self.pid}) and does not answer /health: it hangs")

    def _pressed(self) -> str | None:
        """What is new about the memory around it; asked for no more often than the kernel has news."""
        now = time.monotonic()
        if now - self._pressure_at < _PRESSURE_EVERY_SECONDS:
            return None
        self._pressure_at = now
        self._kills.look()
        return self._pressure.look(read_pressure(self.pid), now)

    def raise_if_dead(self, doing: str) -> None:
        """Say so if the engine has ended.

        Raises:
            ServerError: The reason, from its log.
        """
        how = self._child.exit()
        if how is not None:
            self.state = State.EXITED
            raise self._failure(doing)

    def raise_if_dying(self, doing: str) -> None:
        """As ``raise_if_dead``, for one whose sockets may be closed and whose end cannot be seen yet."""
        if get(self.address, "/health") is None:
            self._child.wait(_DYING_SECONDS)
        self.raise_if_dead(doing)

    def _failure(self, doing: str) -> EngineDiedError:
        how = self._child.stop(0)
        killer = self._kills.verdict(self.pid) if how.signal_number == signal.SIGKILL else None
        text, path = self._child.log_tail(), str(self._child.log)
        error = server_error(text, how, log_path=path, while_doing=doing, killer=killer)
        error.ready_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        error.how = f"{how}; {killer.words}" if killer else str(how)
        # A signal leaves no word of its own in the log, which may be all that somebody has tomorrow.
        self._child.note(f"{ENDED}{doing}: {error.how}")
        return error

    def stop(self) -> None:
        """End the engine and everything it started. Safe to call twice."""
        if self.state is not State.EXITED:
            self.state = State.STOPPING
        self._child.stop()
        self.state = State.EXITED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
