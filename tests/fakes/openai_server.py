"""A loopback OpenAI-compatible server that answers what a test tells it, and keeps what it was asked."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


@dataclass(slots=True, kw_only=True)
class Script:
    """``deltas`` are streamed as they stand; ``status`` and ``error`` answer instead; ``cut`` drops the connection.

    ``page`` answers with ``status`` where the models are listed.
    """

    url: str = ""
    deltas: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    status: int = 200
    error: dict[str, Any] | None = None
    page: bytes | None = None
    cut: bool = False
    models: tuple[str, ...] = ("kimi-k3",)
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
        if self.script.page is not None:
            self._send(self.script.status, self.script.page)
            return
        self._json(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in self.script.models]})

    def do_POST(self) -> None:
        script = self.script
        script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if script.error is not None:
            self._json(script.status, {"error": script.error})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for delta in script.deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.close_connection = True
        if script.cut:
            self._event({"error": {"code": 500, "message": "device lost", "type": "server_error"}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
                     "timings": {"predicted_n": 2, "predicted_per_second": 5.25}})  # fmt: skip
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        common = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "kimi-k3"}
        self.wfile.write(b"data: " + json.dumps(common | data).encode() + b"\n\n")

    def _json(self, status: int, data: dict[str, Any]) -> None:
        self._send(status, json.dumps(data).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
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
