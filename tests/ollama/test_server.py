import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.ollama.server import PATIENT_SECONDS, host_url, is_local, look, supports_k3


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("  ", "http://127.0.0.1:11434"),
        ("1.2.3.4", "http://1.2.3.4:11434"),
        (":56789", "http://127.0.0.1:56789"),
        ("1.2.3.4:56789", "http://1.2.3.4:56789"),
        ("http://1.2.3.4", "http://1.2.3.4:80"),
        ("https://1.2.3.4", "https://1.2.3.4:443"),
        ("https://example.com:56789/", "https://example.com:56789"),
        ("example.com:56789/path/", "http://example.com:56789/path"),
        ("example.com", "http://example.com:11434"),
        ("ollama.com", "https://ollama.com:443"),
        ("[::1]", "http://[::1]:11434"),
        ("::1", "http://[::1]:11434"),
        ("https://[0001:002:003:0004::1]:56789/path", "https://[1:2:3:4::1]:56789/path"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:1234", "http://127.0.0.1:1234"),
        ("[::]:1234", "http://[::1]:1234"),
        ('"127.0.0.1:99"', "http://127.0.0.1:99"),
        ("example.com:99999", "http://example.com:11434"),
        ("http://example.com:port", "http://example.com:80"),
    ],
)
def test_ollama_host_is_read_as_ollama_reads_it(value: str, url: str) -> None:
    assert host_url({"OLLAMA_HOST": value}) == url


def test_no_ollama_host_means_the_default_port_on_the_loopback() -> None:
    assert host_url({}) == "http://127.0.0.1:11434"


@given(st.text(max_size=40))
def test_no_value_of_ollama_host_makes_a_traceback(value: str) -> None:
    assert "://" in host_url({"OLLAMA_HOST": value})


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("0.32.14", False),
        ("0.32.15", True),
        ("v0.32.15", True),
        ("0.33.0", True),
        ("1.0.0", True),
        ("0.5.7", False),
        ("0.33.0-rc2", True),
        ("0.32.15-rc1", None),
        ("0.32.14-rc1", False),
        ("0.0.0", None),
        ("nightly", None),
        ("", None),
        (None, None),
    ],
)
def test_a_version_is_compared_by_its_numbers(version: str | None, verdict: bool | None) -> None:
    assert supports_k3(version) is verdict


@contextmanager
def answering(status: int, body: bytes, drip_seconds: float = 0.0) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(drip_seconds)
            except OSError:
                pass  # the caller has given up, as it should

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class names it so
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_is_new_enough_is_said_to_be() -> None:
    with answering(200, b'{"version": "0.32.15"}') as host:
        seen = look({"OLLAMA_HOST": host}, deadline_seconds=PATIENT_SECONDS)
    assert (seen.reachable, seen.version, seen.supports_k3, seen.local) == (True, "0.32.15", True, True)


def test_a_server_that_is_too_old_names_the_version_it_would_need() -> None:
    with answering(200, b'{"version": "0.32.14"}') as host:
        seen = look({"OLLAMA_HOST": host}, deadline_seconds=PATIENT_SECONDS)
    assert (seen.reachable, seen.supports_k3) == (True, False)
    assert "0.32.15" in seen.reason


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"not here"), (200, b"<html>"), (200, b"[]"), (200, b'{"version": 3}'), (200, b"{}")]
)
def test_something_else_on_the_port_is_not_taken_for_ollama(status: int, body: bytes) -> None:
    with answering(status, body) as host:
        seen = look({"OLLAMA_HOST": host}, deadline_seconds=PATIENT_SECONDS)
    assert (seen.reachable, seen.version, seen.supports_k3) == (False, None, None)
    assert "not as Ollama" in seen.reason


def test_a_closed_port_is_told_within_a_second() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can take the port
        started = time.monotonic()
        seen = look({"OLLAMA_HOST": f"127.0.0.1:{closed.getsockname()[1]}"})
        took = time.monotonic() - started
    assert not seen.reachable
    assert took < 1.0
    assert "does not answer" in seen.reason


def test_a_server_that_drips_its_answer_does_not_hold_the_caller() -> None:
    with answering(200, b'{"version": "0.32.15"}', drip_seconds=0.3) as host:
        started = time.monotonic()
        seen = look({"OLLAMA_HOST": host})
        took = time.monotonic() - started
    assert not seen.reachable
    assert took < 1.0


def test_a_proxy_in_the_environment_is_not_asked_for_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with answering(200, b'{"version": "0.32.15"}') as host:
        assert look({"OLLAMA_HOST": host}, deadline_seconds=PATIENT_SECONDS).reachable


@pytest.mark.parametrize("value", ["[", "[x]:3", "http://[1:2", "a\x00b", "ö.invalid:1", "x" * 300, "ftp://127.0.0.1"])
def test_an_address_that_is_none_is_unreachable_and_no_traceback(value: str) -> None:
    assert not look({"OLLAMA_HOST": value}).reachable


def test_only_an_address_of_this_machine_is_local() -> None:
    assert is_local("http://127.0.0.1:11434") is True
    assert is_local("http://192.0.2.1:11434") is False  # TEST-NET-1: never anyone's address
