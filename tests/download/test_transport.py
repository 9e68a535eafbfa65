import contextlib
import http.server
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from download.conftest import FAST, Scene
from fakes.hub import serve
from fakes.hub_faults import none

from kimigguf.download import journal
from kimigguf.download.fetch import download
from kimigguf.download.parts import _retry_after
from kimigguf.download.transport import Connections, Lost, _tls, origin, proxy_for, reason
from kimigguf.errors import NetworkError, UsageError
from kimigguf.events import Advance

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        ("https://hub/x", {}, None),
        ("https://hub/x", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://hub/x", {"https_proxy": "proxy:3128"}, PROXY),
        ("https://hub/x", {"HTTP_PROXY": PROXY}, None),
        ("http://hub/x", {"HTTP_PROXY": PROXY}, PROXY),
        ("http://hub/x", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, None),
        ("https://hub/x", {"ALL_PROXY": PROXY}, PROXY),
        ("https://hub/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": "hub"}, None),
        ("https://a.hub/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": ".hub"}, None),
        ("https://a.hub/x", {"HTTPS_PROXY": PROXY, "no_proxy": "x, *.hub"}, None),
        ("https://ahub/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": "hub"}, PROXY),
        ("https://hub/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}, None),
        ("https://hub:8443/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": "hub:8443"}, None),
        ("https://hub/x", {"HTTPS_PROXY": PROXY, "NO_PROXY": "hub:8443"}, PROXY),
        ("http://127.0.0.1/x", {"HTTP_PROXY": PROXY, "NO_PROXY": "127.0.0.0/8"}, None),
        ("http://[::1]/x", {"HTTP_PROXY": PROXY, "NO_PROXY": "::1"}, None),
        ("https://hub/x", {"HTTPS_PROXY": ""}, None),
    ],
)
def test_the_proxy_is_the_one_that_the_environment_names(url: str, environ: dict[str, str], proxy: str | None) -> None:
    assert proxy_for(url, environ) == proxy


def test_a_proxy_of_another_kind_is_refused_without_its_password() -> None:
    with pytest.raises(UsageError) as error:
        proxy_for("https://hub/x", {"HTTPS_PROXY": "socks5://me:secret@proxy:1080"})
    assert error.value.code == "proxy-unsupported"
    assert "secret" not in f"{error.value.message}{error.value.hint}"


def test_an_origin_is_scheme_host_and_port() -> None:
    assert origin("https://Hub/x") == origin("https://hub:443/y") == "https://hub:443"
    assert len({origin(url) for url in ("http://a/", "http://a:81/", "https://a/", "http://b/")}) == 4


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Fetches what it is asked for by absolute address, as a proxy does, and remembers it."""

    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        import http.client
        import urllib.parse

        self.seen.append((self.path, self.headers["Proxy-Authorization"]))
        parts = urllib.parse.urlsplit(self.path)
        onward = http.client.HTTPConnection(parts.netloc)
        headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy")}
        onward.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        answer = onward.getresponse()
        body = answer.read()
        onward.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name not in {"Content-Length", "Server", "Date"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Silent."""


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    seen: list[tuple[str, str | None]] = []
    handler = type("Handler", (_Proxy,), {"seen": seen})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://me:pass@127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()
        thread.join()


def test_a_set_arrives_through_a_proxy(scene: Scene, proxy: tuple[str, list[tuple[str, str | None]]]) -> None:
    address, seen = proxy
    scene.get(HTTP_PROXY=address)
    scene.assert_whole()
    assert all(url.startswith("http://127.0.0.") for url, _ in seen)
    assert {login for _, login in seen} == {"Basic bWU6cGFzcw=="}
    assert len(seen) == len(scene.hub.requests)
    assert not any(name == "Proxy-Authorization" for request in scene.hub.requests for name, _ in request.headers)


def test_a_connection_that_the_server_has_closed_meanwhile_is_no_failure(scene: Scene) -> None:
    connections = Connections(environ={}, stall_seconds=2)
    url = f"{scene.hub.url}/owner/Model-GGUF/resolve/main/{scene.remote.files[0].path}"
    scene.hub.redirect, scene.hub.faults = False, none
    connections.get(url, {}).read()
    for connection in connections._open.values():
        assert connection.sock is not None
        connection.sock.shutdown(2)
    assert connections.get(url, {}).status == 200
    connections.close()


def test_after_an_interrupt_nothing_is_asked_any_more(scene: Scene) -> None:
    connections = Connections(environ={}, stall_seconds=2)
    connections.interrupt()
    with pytest.raises(Lost):
        connections.get(scene.hub.url, {})
    assert not scene.hub.requests


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for loopback that nobody else has signed, and a server's context with it."""
    key, made = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = "subjectAltName=IP:127.0.0.1,IP:127.0.0.2"
    try:
        subprocess.run([*command, "-addext", names, "-keyout", key, "-out", made], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return made, context


@pytest.fixture
def stranger(certificate: tuple[Path, ssl.SSLContext]) -> Iterator[str]:
    """An HTTPS server whose certificate nobody trusts."""
    context = certificate[1]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_certificate_that_is_not_trusted_is_no_matter_of_patience(scene: Scene, stranger: str) -> None:
    with pytest.raises(NetworkError) as error:
        scene.get(replace(FAST, patience_seconds=60), HF_ENDPOINT=stranger)
    assert error.value.code == "bad-certificate"
    assert "self-signed" in (error.value.cause or "")
    assert "SSL_CERT_FILE" in (error.value.hint or "")


@pytest.fixture
def trusted(certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    _tls.cache_clear()
    yield certificate[1]
    _tls.cache_clear()


def test_a_set_arrives_over_https_and_ctrl_c_does_not_write_what_is_encrypted(
    scene: Scene, trusted: ssl.SSLContext
) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, Advance) and event.item == "total" and event.done_bytes > 200_000:
            raise KeyboardInterrupt

    with serve(scene.root, tls=trusted) as hub:
        scene.hub = hub
        hub.bytes_per_second = 200_000
        with pytest.raises(KeyboardInterrupt):
            download(scene.remote, scene.folder, environ=scene.environ(), policy=FAST, listen=interrupt)
        for number, file in enumerate(scene.remote.files, start=1):
            log = scene.folder / ".kimigguf" / f"{file.name}.journal"
            part, truth = scene.folder / f"{file.name}.part", scene.served(number).read_bytes()
            for start, end in journal.read(log, size_bytes=file.size_bytes, sha256=file.sha256 or ""):
                assert part.read_bytes()[start:end] == truth[start:end]
        hub.bytes_per_second = None
        scene.get()
        scene.assert_whole()
        assert {request.host for request in hub.requests} == {"hub", "cdn"}


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [("7", 7, 7), ("Mon, 01 Jan 2001 00:00:00 GMT", 0, 0), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e9, 1e10)],
)
def test_retry_after_is_a_number_or_a_date(value: str, low: float, high: float) -> None:
    seconds = _retry_after(value)
    assert seconds is not None
    assert low <= seconds <= high


@pytest.mark.parametrize("value", [None, "soon", "", "-3"])
def test_a_retry_after_that_says_nothing_is_unknown(value: str | None) -> None:
    assert _retry_after(value) is None


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionRefusedError(111, "refused"), OSError(), ValueError("x")])
def test_every_failure_of_the_line_has_words(error: Exception) -> None:
    assert reason(error)
