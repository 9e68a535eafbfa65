"""An OpenAI-compatible chat endpoint on loopback that answers as a function says, and fails as it says."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A streamed answer. ``cut``: the connection ends before the finish reason. ``usage`` False: no token counts."""

    content: str = ""
    thinking: str = ""
    finish_reason: str = "stop"
    tool_calls: int = 0
    calls: tuple[tuple[str, str], ...] = ()
    """Tool calls by name and arguments, sent in pieces."""
    cut: bool = False
    usage: bool = True
    tokens: tuple[int, int] | None = None
    """Prompt and completion tokens to count; None: eleven, and one a word."""
    stall_seconds: float = 0.0
    logprobs: tuple[dict[str, Any], ...] | None = None
    """What stands in ``logprobs.content`` of an answer that is not streamed."""

    @property
    def counted(self) -> dict[str, int]:
        words = len((self.thinking + " " + self.content).split())
        prompt, completion = self.tokens or (11, words)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """An HTTP error instead of an answer."""

    status: int
    message: str = "no"
    retry_after: str | None = None


Answer = Callable[[dict[str, Any], int], Say | Refuse]
"""From the request's body, and how many chat requests came before it."""


@dataclass(slots=True, kw_only=True)
class Endpoint:
    url: str
    answer: Answer
    models: tuple[str, ...] = ("k3",)
    lists_models: bool = True
    embeds: bool = False
    """Whether texts get vectors: (3, 4, 12) times their length, or that over 13 where normalized."""
    file: str = ""
    """The model's file, which llama-server tells with its build."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: Endpoint

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class names it so
        pass

    def do_GET(self) -> None:
        if self.path == "/props":
            props = {"default_generation_settings": {"n_ctx": 4096}, "chat_template": "{{ x }}"}
            told = {"build_info": "b7-abc", "model_path": self.endpoint.file} if self.endpoint.file else {}
            self._send(200, json.dumps(props | told).encode())
            return
        if self.path != "/v1/models" or not self.endpoint.lists_models:
            self._error(Refuse(status=404, message="not here"))
            return
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in self.endpoint.models]
        self._send(200, json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self) -> None:
        endpoint = self.endpoint
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/embeddings":
            self._embed(body)
            return
        with endpoint.lock:
            number = len(endpoint.bodies)
            endpoint.bodies.append(body)
            endpoint.keys.append(self.headers.get("Authorization", ""))
        said = endpoint.answer(body, number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if isinstance(said, Refuse):
                self._error(said)
            elif not body.get("stream"):
                self._whole(said)
            else:
                self._stream(said, with_usage=(body.get("stream_options") or {}).get("include_usage", False))

    def _embed(self, body: dict[str, Any]) -> None:
        if not self.endpoint.embeds:
            self._error(Refuse(status=501, message="This server does not support embeddings."))
        elif not body["input"]:
            self._error(Refuse(status=400, message='"input" must not be empty'))
        else:
            vectors = [[3.0 * len(text), 4.0 * len(text), 12.0 * len(text)] for text in body["input"]]
            if body.get("embd_normalize") != -1:
                vectors = [[value / (13.0 * len(text)) for value in vector]
                           for text, vector in zip(body["input"], vectors, strict=True)]  # fmt: skip
            data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
            usage = {"prompt_tokens": sum(len(text) for text in body["input"])}
            self._send(200, json.dumps({"data": data[::-1], "usage": usage}).encode())

    def _error(self, refuse: Refuse) -> None:
        extra = {"Retry-After": refuse.retry_after} if refuse.retry_after else {}
        self._send(
            refuse.status, json.dumps({"error": {"message": refuse.message, "code": refuse.status}}).encode(), extra
        )

    def _send(self, status: int, data: bytes, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(extra or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _whole(self, said: Say) -> None:
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(said.calls)
        ]
        message = {"role": "assistant", "content": said.content, "reasoning_content": said.thinking or None}
        choice = {
            "index": 0,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": said.finish_reason,
            "logprobs": None if said.logprobs is None else {"content": list(said.logprobs)},
        }
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "k3", "choices": [choice]}
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18} if not said.tokens else said.counted
        self._send(200, json.dumps({**whole, "usage": usage}).encode())

    def _stream(self, said: Say, *, with_usage: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces: list[dict[str, Any]] = [{"role": "assistant"}]
        pieces += [{"reasoning_content": word} for word in re.findall(r"\s*\S+\s*", said.thinking)]
        pieces += [{"content": part} for part in (said.content[:5], said.content[5:]) if part]
        pieces += [
            {
                "tool_calls": [
                    {"index": n, "id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ]
            }
            for n in range(said.tool_calls)
        ]
        for n, (name, arguments) in enumerate(said.calls):
            start = {"index": n, "id": f"c{n}", "type": "function", "function": {"name": name, "arguments": ""}}
            pieces.append({"tool_calls": [start]})
            pieces += [
                {"tool_calls": [{"index": n, "function": {"arguments": part}}]}
                for part in (arguments[:4], arguments[4:])
            ]
        for piece in pieces:
            self._event({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
        time.sleep(said.stall_seconds)
        if said.cut:
            self.close_connection = True
            self.connection.close()
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": said.finish_reason}]})
        if with_usage and said.usage:
            self._event({"choices": [], "usage": said.counted})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        whole = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "k3", **value}
        self._chunk(b"data: " + json.dumps(whole).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is what some tests are about."""


@contextlib.contextmanager
def serve(answer: Answer, **told: Any) -> Iterator[Endpoint]:
    """Answer on a free port; ``told`` sets attributes of :class:`Endpoint`."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    endpoint = Endpoint(url=f"http://127.0.0.1:{server.server_port}", answer=answer, **told)
    server.RequestHandlerClass.endpoint = endpoint  # type: ignore[attr-defined]  # the class made above has it
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
