"""How a start can go wrong: a fake process plays what a real engine cannot be made to show."""

import errno
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes import server_program
from fakes.processes import free_port, is_open, is_running, until

from kimigguf.engines import llama_server
from kimigguf.engines.command import Command
from kimigguf.engines.diagnose import EngineDiedError
from kimigguf.engines.llama_server import Address, Server, port_problem, require_free
from kimigguf.engines.pressure import PressureWatch
from kimigguf.engines.supervise import State
from kimigguf.errors import ServerError, UsageError
from kimigguf.events import Event, Notice
from kimigguf.hardware.pressure import MemoryPressure, Room
from kimigguf.units import GIB


def start(mode: str, folder: Path) -> Server:
    address = Address(host="127.0.0.1", port=free_port())
    argv = (sys.executable, str(server_program.__file__), str(address.port), mode)
    made = Command(argv=argv, environ=dict(os.environ))
    return Server.start(made, address, alias="kimi-k3", log=folder / "engine.log", total_bytes=1000)


def test_a_slow_load_is_waited_for(tmp_path: Path) -> None:
    with start("slow", tmp_path) as server:
        seconds = server.wait_ready()
        states = [server.state]
    states.append(server.state)
    assert seconds >= 1.0
    assert states == [State.READY, State.EXITED]


def test_a_silent_stall_is_named_with_the_last_words_and_not_killed(tmp_path: Path) -> None:
    seen: list[Event] = []
    with start("stalls", tmp_path) as server:
        server.wait_ready(seen.append, stall_seconds=0.5)
        assert server.state is State.READY
    notices = [event.text for event in seen if isinstance(event, Notice)]
    assert notices
    assert "loading model" in notices[0]


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("cuda-oom", "out-of-memory", "cudaMalloc failed"),
        ("dies-silently", "server-died", "exit code 3"),
        ("killed-while-loading", "killed", "SIGKILL"),
        ("illegal-instruction", "illegal-instruction", "SIGILL"),
    ],
)
def test_a_death_while_loading_is_explained(tmp_path: Path, mode: str, code: str, words: str) -> None:
    with start(mode, tmp_path) as server, pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert caught.value.code == code
    assert caught.value.exit_code == 6
    assert words in f"{caught.value.message} {caught.value.cause}"
    assert str(tmp_path / "engine.log") in (caught.value.hint or "")
    assert isinstance(caught.value, EngineDiedError)
    assert caught.value.ready_seconds == 0.0  # it never was: its load is no time in which it served


def test_a_death_while_serving_is_explained(tmp_path: Path) -> None:
    with start("dies-while-serving", tmp_path) as server:
        server.wait_ready()
        with pytest.raises(ServerError) as caught:
            server.wait()
    assert caught.value.code == "device-error"
    assert "illegal memory access" in (caught.value.cause or "")
    assert "serving" in caught.value.message
    assert isinstance(caught.value, EngineDiedError)
    assert 0.0 < caught.value.ready_seconds < 30.0


def test_a_hung_server_is_named_while_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "_HEALTH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(llama_server, "_HEALTH_SECONDS", 0.2)
    seen: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            seen.append(event.text)
            os.kill(server.pid, signal.SIGCONT if len(seen) == 1 else signal.SIGKILL)

    with start("hangs", tmp_path) as server:
        server.wait_ready()
        with pytest.raises(ServerError):
            server.wait(listen)
    assert len(seen) == 2
    assert "hangs" in seen[0]
    assert "answers again" in seen[1]


def test_a_busy_server_is_not_called_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only slot works on one request for ever; /health answers all the same."""
    monkeypatch.setattr(llama_server, "_HEALTH_EVERY_SECONDS", 0.05)
    seen: list[Event] = []
    with start("busy", tmp_path) as server:
        server.wait_ready()
        with socket.create_connection(("127.0.0.1", server.address.port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            threading.Timer(2.0, os.kill, (server.pid, signal.SIGKILL)).start()
            with pytest.raises(ServerError):
                server.wait(seen.append)
    assert seen == []


@pytest.mark.parametrize(
    ("mode", "least", "most", "words"),
    [
        ("busy", 0.5, 20.0, ["get up to", "1 request(s) were cut off"]),
        ("ends-soon", 0.0, 20.0, ["get up to"]),
        ("amid-a-batch", 0.0, 20.0, ["requests in flight get up to"]),
        ("slow", 0.0, 20.0, []),
    ],
)
def test_a_request_in_flight_is_not_cut_off_at_once_and_not_waited_for_for_ever(
    *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, least: float, most: float, words: list[str]
) -> None:
    monkeypatch.setattr(llama_server, "DRAIN_SECONDS", 0.5 if mode == "busy" else 30.0)
    if mode == "amid-a-batch":
        monkeypatch.setattr(llama_server, "_SLOTS_SECONDS", 0.1)
    seen: list[str] = []
    with start(mode, tmp_path) as server:
        server.wait_ready()
        began: list[float] = []

        def interrupt(*_arguments: object) -> None:
            began.append(time.monotonic())
            raise KeyboardInterrupt

        monkeypatch.setattr(server, "_watch", interrupt)

        def tell(event: Event) -> None:
            seen.append(getattr(event, "text", ""))
            raise OSError(errno.EIO, "the terminal is closed")

        with pytest.raises(KeyboardInterrupt):
            server.wait(tell)
        assert least <= time.monotonic() - began[0] < most
    assert len(seen) == len(words)
    assert all(word in text for word, text in zip(words, seen, strict=True))


def test_what_is_told_while_serving_stands_in_the_log_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server in the background nobody reads the terminal, and a kill leaves no word of the engine's own."""
    monkeypatch.setattr(llama_server, "_HEALTH_EVERY_SECONDS", 0.1)
    short = MemoryPressure(rooms=(Room(name="the cgroup", total_bytes=GIB, left_bytes=0),))
    monkeypatch.setattr(llama_server, "read_pressure", lambda _pid: short)
    with start("slow", tmp_path) as server:
        server.wait_ready()
        monkeypatch.setattr(llama_server, "_PRESSURE_EVERY_SECONDS", 0.0)
        server._pressure = PressureWatch()

        def end(event: Event) -> None:
            assert isinstance(event, Notice)
            os.kill(server.pid, signal.SIGKILL)

        with pytest.raises(ServerError):
            server.wait(end)
    lines = (tmp_path / "engine.log").read_text().splitlines()
    assert "memory pressure: " in lines[-2]
    assert "the cgroup has 0 GiB left" in lines[-2]
    assert "the engine ended while serving: killed by SIGKILL" in lines[-1]
    assert all(line.startswith("kimigguf 20") for line in lines[-2:])


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "_STRANGER_SECONDS", 0.5)
    monkeypatch.setattr(Server, "_listens", lambda _self: False)
    with start("stranger", tmp_path) as server, pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert caught.value.code == "not-ours"


def test_an_engine_whose_health_lies_is_told_from_another_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/health says ok, and no model is ever named: the port is the engine's own, so another port would not help."""
    monkeypatch.setattr(llama_server, "_STRANGER_SECONDS", 0.5)
    with start("names-no-model", tmp_path) as server, pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert caught.value.code == "health-lies"
    assert "GET /v1/models: 503" in (caught.value.cause or "")
    assert "--port" not in (caught.value.hint or "")


def test_an_interrupted_wait_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    def interrupt(_event: Event) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), start("slow", tmp_path) as server:
        server.wait_ready(interrupt)
    assert not is_running(server.pid)
    assert until(lambda: not is_open(server.address.port))
    assert time.monotonic() - began < 5


def test_a_server_on_every_address_is_reached_on_loopback() -> None:
    assert Address(host="0.0.0.0", port=1).url == "http://127.0.0.1:1"
    assert Address(host="::", port=1).url == "http://[::1]:1"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EADDRINUSE, "port-in-use"),
        (errno.EADDRNOTAVAIL, "address-not-here"),
        (errno.EACCES, "port-not-allowed"),
        (errno.ENOBUFS, "port-unusable"),
    ],
)
def test_only_a_taken_port_is_called_taken(monkeypatch: pytest.MonkeyPatch, number: int, code: str) -> None:
    def refuse(_socket: socket.socket, _where: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse, raising=False)
    problem = port_problem(Address(host="127.0.0.1", port=80))
    assert problem is not None
    assert problem.code == code
    assert ("another program" in problem.message) == (code == "port-in-use")


def test_a_name_that_nobody_knows_is_a_wrong_name_and_no_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no real server of names is asked
    with pytest.raises(UsageError) as caught:
        require_free(Address(host="no-such-host.invalid", port=80))
    assert caught.value.code == "unknown-host"
    assert "no-such-host.invalid" in caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port_is_free_by_address_and_by_name(host: str) -> None:
    assert port_problem(Address(host=host, port=free_port())) is None
