"""TLS of a served engine: what is refused before the load, and who passes for the server after it."""

import json
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes.certificates import expired, make, make_signed, with_password
from fakes.processes import free_port

from kimigguf.cli.serve_reach import Reach, snippet
from kimigguf.engines.command import Command
from kimigguf.engines.endpoint import connect
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.engines.evidence import State
from kimigguf.engines.llama_server import Address, Server, get
from kimigguf.engines.passthrough import check_extra
from kimigguf.engines.preflight import check_tls
from kimigguf.engines.registry import Entry, ProcessId, certificate_at, entered
from kimigguf.engines.selftest import Refused, poster
from kimigguf.engines.session import servers_folder
from kimigguf.engines.tls import TlsFiles, check_files, client_host, served_certificate, speaks_tls, tls_files
from kimigguf.errors import NetworkError, UsageError
from kimigguf.events import Event, Notice
from kimigguf.probe.client import Asker, Settings


def flags(files: TlsFiles) -> tuple[str, ...]:
    return ("--ssl-key-file", str(files.key), "--ssl-cert-file", str(files.certificate))


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make(tmp_path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say({"data": [{"id": "kimi-k3"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "Hello"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self._say({"id": "1", "object": "chat.completion", "created": 1, "model": "kimi-k3", "choices": [choice]})

    def _say(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextmanager
def serving(files: TlsFiles) -> Iterator[int]:
    """A server that shows a certificate; gives its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a refused handshake is no failure here
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


# -- before the load ---------------------------------------------------------------------------------------------------


def test_the_files_are_let_through_and_found(files: TlsFiles) -> None:
    check_extra(flags(files), EngineKind.LLAMA_SERVER)  # raises nothing
    assert tls_files(flags(files)) == files
    assert tls_files(("--threads", "3")) is None
    written = ("--ssl_cert_file", "c.pem", "--ssl-key-file", "k.pem")
    assert tls_files(written, Path("/etc")) == TlsFiles(key=Path("/etc/k.pem"), certificate=Path("/etc/c.pem"))


@pytest.mark.parametrize("half", [("--ssl-key-file", "k"), ("--ssl-cert-file", "c"), ("--ssl-cert-file",)])
def test_one_file_without_the_other_is_refused(half: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        tls_files(half)
    assert caught.value.code == "tls-half"


def test_good_files_tell_their_names_and_a_key_that_others_can_read_is_warned_of(files: TlsFiles) -> None:
    assert check_files(files).names == ("127.0.0.1",)
    said: list[Event] = []
    assert served_certificate(flags(files), said.append) == str(files.certificate)
    assert said == []
    files.key.chmod(0o644)
    served_certificate(flags(files), said.append)
    assert said == [Notice(text=f"others on this machine can read the TLS key: chmod 600 {files.key}")]


def test_files_that_cannot_serve_are_refused_with_the_reason(files: TlsFiles, tmp_path: Path) -> None:
    other = make(tmp_path, "other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for bad, reason in (
        (replace(files, key=other.key), "key values mismatch"),
        (replace(files, key=text), "pem"),
        (replace(files, certificate=text), "pem"),
        (replace(files, key=tmp_path / "none"), "No such file"),
        (replace(files, certificate=tmp_path / "none"), "No such file"),
        (with_password(files, tmp_path), "password"),
        (expired(files, tmp_path), "expired"),
    ):
        with pytest.raises(UsageError) as caught:
            check_files(bad)
        assert caught.value.code == "tls-unusable"
        assert reason.lower() in str(caught.value.cause).lower()


# -- who passes for the server -----------------------------------------------------------------------------------------


def ask_all_ways(port: int, certificate: Path) -> list[bool]:
    """Whether each of this program's ways to ask a server gets an answer from the one at ``port``."""
    address = Address(host="127.0.0.1", port=port, certificate=str(certificate))
    answered = [get(address, "/health") is not None]
    post = poster(address.url, None, address.trust)
    try:
        answered.append(bool(post("/v1/chat/completions", {})))
    except Refused:
        answered.append(False)
    with connect(f"{address.url}/v1", certificate=str(certificate)) as client:
        try:
            answered.append(bool(client.models.list().data))
        except openai.APIConnectionError:
            answered.append(False)
    return answered


def test_the_own_certificate_is_trusted_whatever_name_it_is_for(tmp_path: Path) -> None:
    for files in (make(tmp_path), make(tmp_path, "named", names="DNS:k3.example.org")):
        with serving(files) as port:
            assert ask_all_ways(port, files.certificate) == [True] * 3


def test_one_that_an_authority_has_signed_is_trusted_itself_and_the_authoritys_others_are_not(tmp_path: Path) -> None:
    authority = make(tmp_path, "authority")
    ours, another = make_signed(tmp_path, authority), make_signed(tmp_path, authority, "another")
    check_files(ours)
    with serving(ours) as port:
        assert ask_all_ways(port, ours.certificate) == [True] * 3
    with serving(another) as port:
        assert ask_all_ways(port, ours.certificate) == [False] * 3


def test_another_server_on_the_port_does_not_pass_for_this_one(files: TlsFiles, tmp_path: Path) -> None:
    with serving(make(tmp_path, "stranger")) as port:
        assert ask_all_ways(port, files.certificate) == [False] * 3


def test_a_server_that_is_started_again_is_known_by_its_renewed_certificate(tmp_path: Path) -> None:
    """By the old one it would never be seen to get ready, and no clock ends a load."""
    files = make(tmp_path)
    with serving(files) as port:
        assert ask_all_ways(port, files.certificate) == [True] * 3
    address = Address(host="127.0.0.1", port=free_port(), certificate=str(files.certificate))
    with serving(make(tmp_path)) as port:
        assert ask_all_ways(port, files.certificate) == [False] * 3
        started = Command(argv=("/bin/true",), environ={})
        with Server.start(started, address, alias="k3", log=tmp_path / "log", total_bytes=1):
            assert ask_all_ways(port, files.certificate) == [True] * 3


def test_a_certificate_that_is_gone_is_no_crash_of_what_watches(tmp_path: Path) -> None:
    assert get(Address(host="127.0.0.1", port=9, certificate=str(tmp_path / "gone.pem")), "/health") is None


def test_a_running_server_is_known_by_what_it_was_started_with(files: TlsFiles, tmp_path: Path) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    entry = Entry(
        name="k3", supervisor=me, engine=me, host="0.0.0.0", port=8443, alias="k3", quant=None, log="l", plan_file="p",
        arguments=("--name", "k3", "UD-IQ1_M", "--", "--ssl-key-file", "k.pem", "--ssl-cert-file", "c.pem"),
        folder="/srv", started_at="now", planned_bytes=1,
    )  # fmt: skip
    assert entry.address == Address(host="0.0.0.0", port=8443, certificate="/srv/c.pem")
    assert entry.address.url == "https://127.0.0.1:8443"
    with entered(tmp_path, entry):
        assert certificate_at(tmp_path, "https://localhost:8443/v1") == "/srv/c.pem"
        assert certificate_at(tmp_path, "http://127.0.0.1:8443/v1") is None
        assert certificate_at(tmp_path, "https://127.0.0.1:8444") is None
        assert certificate_at(tmp_path, "https://api.moonshot.ai:8443") is None
    assert replace(entry, arguments=("UD-IQ1_M",)).address.url == "http://127.0.0.1:8443"


def test_the_probe_trusts_a_server_of_this_users_by_its_own_certificate(files: TlsFiles, tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    me = ProcessId.of(os.getpid())
    assert me is not None
    with serving(files) as port:
        entry = Entry(
            name="k3", supervisor=me, engine=me, host="127.0.0.1", port=port, alias="k3", quant=None, log="l",
            plan_file="p", arguments=("--", *flags(files)), folder="/", started_at="now", planned_bytes=1,
        )  # fmt: skip
        asker = partial(Asker, "candidate", f"https://127.0.0.1:{port}", environ, Settings(tries=1))
        with closing(asker()) as stranger, pytest.raises(NetworkError):
            stranger.endpoint(None)
        with entered(servers_folder(environ), entry), closing(asker()) as known:
            assert known.endpoint(None).model == "kimi-k3"


# -- how others reach it -----------------------------------------------------------------------------------------------


def test_a_client_is_told_the_name_that_the_certificate_is_for(tmp_path: Path) -> None:
    named = make(tmp_path, names="DNS:*.example.org,DNS:k3.example.org")
    address = Address(host="127.0.0.1", port=8443, certificate=str(named.certificate))
    reach = Reach.of(address, flags(named))
    assert reach.url == "https://k3.example.org:8443"
    assert reach.curl == f"--cacert {named.certificate} --resolve k3.example.org:8443:127.0.0.1 "
    assert any("must lead to this machine" in line for line in reach.remarks)
    assert client_host(["k3.example.org", "127.0.0.1"], "127.0.0.1") == "127.0.0.1"
    plain = Address(host="127.0.0.1", port=8080)
    assert Reach.of(plain, ()) == Reach(url="http://127.0.0.1:8080")


def test_the_snippet_for_clients_of_others_runs_as_it_is_shown(tmp_path: Path) -> None:
    """Also for a certificate that an authority signed, which plain trust in the file would not take."""
    for files in (make(tmp_path), make_signed(tmp_path, make(tmp_path, "authority"))):
        with serving(files) as port:
            reach = Reach.of(Address(host="127.0.0.1", port=port, certificate=str(files.certificate)), flags(files))
            code = snippet(f"{reach.url}/v1", "kimi-k3", needs_key=False, certificate=str(files.certificate))
            names: dict[str, Any] = {}
            exec("\n".join(code), names)  # noqa: S102 -- what the user is told to run
            names["client"].close()
        assert names["messages"][1]["content"] == "Hello"


# -- what the engine can -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "able", "state"),
    [
        (b"..running with SSL: key = %s..", True, State.PASSED),
        (b"..the server is built without SSL support..", False, State.FAILED),
        (b"..", None, State.UNKNOWN),
        (b"", None, State.UNKNOWN),
    ],
)
def test_an_engine_without_tls_is_known_before_a_terabyte_is_loaded(
    text: bytes, able: bool | None, state: State, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_bytes(text)
    assert speaks_tls(str(program)) is able
    engine = FoundEngine(
        kind=EngineKind.LLAMA_SERVER, path=str(program), version="v", build=1, supports_k3=True, backends=None
    )
    (check,) = check_tls(engine, ("llama-server", "--ssl-cert-file", "c"))
    assert (check.state, check.blocks) == (state, state is State.FAILED)
    assert check_tls(engine, ("llama-server",)) == ()


def test_a_library_beside_the_program_may_be_what_has_tls(tmp_path: Path) -> None:
    (tmp_path / "llama-server").write_bytes(b"..")
    (tmp_path / "libllama-server-impl.so").write_bytes(b"..running with SSL: key..")
    assert speaks_tls(str(tmp_path / "llama-server")) is True
