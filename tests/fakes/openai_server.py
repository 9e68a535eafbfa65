"""A loopback OpenAI-compatible server that answers what a test tells it, and keeps what it was asked."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


@dataclass(slots=True, kw_only=True)
class Script:
    """``deltas`` are streamed as they stand; ``status`` and ``error`` answer instead; ``cut`` drops the connection.

    ``page`` answers with ``status`` where the models are listed. ``chunks`` replace the whole stream; ``pause`` is in
    seconds before each event; ``hang_up`` ends the connection in the middle of a chunk; ``props`` makes it a
    llama-server; ``turns`` are the deltas of the next answers, one after the other. ``raw`` is sent as the stream;
    ``refuses`` names a part of a request that is none of this server's.
    """

    url: str = ""
    deltas: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    status: int = 200
    error: dict[str, Any] | None = None
    page: bytes | None = None
    cut: bool = False
    models: tuple[str, ...] = ("kimi-k3",)
    entry: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] | None = None
    raw: bytes | None = None
    refuses: str | None = None
    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    pause: float = 0.0
    hang_up: bool = False
    props: dict[str, Any] | None = None
    usage: dict[str, Any] = field(default_factory=lambda: {"prompt_tokens": 1, "completion_tokens": 2})
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client left in the middle of an answer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    script: Script


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def script(self) -> Script:
        return cast("_Server", self.server).script

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the name is the base class's
        pass

    def do_GET(self) -> None:
        self.script.keys.append(self.headers.get("Authorization"))
        if self.path == "/props":
            found = self.script.props is not None
            self._json(200 if found else 404, self.script.props or {"error": {"message": "File Not Found"}})
            return
        if self.script.page is not None:
            self._send(self.script.status, self.script.page)
            return
        data = [{"id": m, "object": "model"} | self.script.entry for m in self.script.models]
        self._json(200, {"object": "list", "data": data})

    def do_POST(self) -> None:
        script = self.script
        script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if script.refuses is not None and script.refuses in script.asked[-1]:
            self._json(400, {"error": {"message": f"unknown field {script.refuses}"}})
            return
        if script.error is not None:
            self._json(script.status, {"error": script.error})
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stream(script)
            return
        script.gone.set()

    def _stream(self, script: Script) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if script.hang_up:
            self.send_header("Content-Length", "1000000")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if script.raw is not None:
            self.wfile.write(script.raw)
            return
        if script.chunks is not None:
            for chunk in script.chunks:
                self._event(chunk)
            self.wfile.write(b"data: [DONE]\n\n")
            return
        deltas = script.turns.pop(0) if script.turns else script.deltas
        for delta in deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if script.hang_up:
            return
        if script.cut:
            self._event({"error": {"code": 500, "message": "device lost", "type": "server_error"}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish}]})
        self._event({"choices": [], "usage": script.usage,
                     "timings": {"predicted_n": 2, "predicted_per_second": 5.25}})  # fmt: skip
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        time.sleep(self.script.pause)
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "kimi-k3"}
        self.wfile.write(b"data: " + json.dumps(common | data).encode() + b"\n\n")

    def _json(self, status: int, data: dict[str, Any]) -> None:
        self._send(status, json.dumps(data).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.script.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def answering(script: Script) -> Iterator[Script]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.script = script
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
