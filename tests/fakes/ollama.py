"""An Ollama server on loopback, after its documented API and the texts of its sources (server/create.go, routes.go).

    with serve(folder) as ollama:                 # folder is what OLLAMA_MODELS would name
        environ = {"OLLAMA_HOST": ollama.url, "OLLAMA_MODELS": str(folder)}

It keeps blobs and manifests as Ollama lays them out, follows its rules for split files, and copies as it does: before
0.35.0 a split set is merged through two temporary files, from 0.35.0 on its shards are kept as they are. What it says
in a chat is canned, or comes from ``engine_url``, an OpenAI-compatible server. Attributes may be set at any time.
"""

import contextlib
import hashlib
import json
import re
import socket
import struct
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

from fakes.ollama_store import Ollama, Refusal, make_layers

_PIECE: Final = 1 << 16
_MOST_TOKENS: Final = 48
_NOW: Final = "2026-11-30T07:00:00.123456789Z"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ollama: Ollama

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class names it so
        pass

    def _go(self) -> None:
        path = self.path.partition("?")[0]
        self.ollama.requests.append((self.command, path))
        if self.ollama.before is not None:
            self.ollama.before(self.command, path)
        try:
            self._route(path)
        except Refusal as refusal:
            self.close_connection = True  # what is left of a refused upload must not be read as a request
            self._json({"error": refusal.text}, refusal.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_HEAD = do_DELETE = _go  # noqa: N815 -- http.server asks for these names

    def _route(self, path: str) -> None:
        routes: dict[tuple[str, str], Callable[[], None]] = {
            ("GET", "/api/version"): lambda: self._json({"version": self.ollama.version}),
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps,
            ("POST", "/api/show"): self._show,
            ("POST", "/api/create"): self._create,
            ("POST", "/api/copy"): self._copy,
            ("DELETE", "/api/delete"): self._delete,
            ("POST", "/api/chat"): self._chat,
        }
        if path.startswith("/api/blobs/") and self.command in {"HEAD", "POST"}:
            self._blob(path.removeprefix("/api/blobs/"))
        elif (self.command, path) in routes:
            routes[self.command, path]()
        else:
            raise Refusal(404, "404 page not found")

    def _json(self, value: object, status: int = 200) -> None:
        body = b"" if value is None or self.command == "HEAD" else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> Callable[[object], None]:
        """Start an NDJSON answer in chunks; what is returned sends one line, and None ends it."""
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def send(value: object) -> None:
            line = b"" if value is None else json.dumps(value).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()

        return send

    def _body(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().strip() or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                raise ConnectionResetError
            left -= len(piece)
            yield piece

    def _request(self) -> dict[str, Any]:
        value = json.loads(b"".join(self._body()) or b"{}")
        return cast("dict[str, Any]", value)

    def _blob(self, digest: str) -> None:
        target = self.ollama.blob(digest)
        if self.command == "HEAD":
            self._json({}, 200 if target.exists() else 404)
            return
        if target.exists():
            for _ in self._body():
                pass
            self._json(None, 200)
            return
        with tempfile.NamedTemporaryFile(prefix="sha256-", dir=self.ollama.blobs, delete=False) as file:
            try:
                self._receive(file)
                if f"sha256:{hashlib.sha256(Path(file.name).read_bytes()).hexdigest()}" != digest:
                    raise Refusal(400, f'digest mismatch, expected "{digest}", got "sha256:..."')
                Path(file.name).rename(target)
                self.ollama.adopt(target)
            finally:
                Path(file.name).unlink(missing_ok=True)
        self.ollama.taken.append(digest)
        self._json(None, 201)

    def _receive(self, file: Any) -> None:
        ollama, got = self.ollama, 0
        for piece in self._body():
            file.write(piece)
            file.flush()
            got += len(piece)
            ollama.received_bytes += len(piece)
            ollama.note_usage()
            if ollama.drop_after_bytes is not None and got >= ollama.drop_after_bytes:
                ollama.drop_after_bytes = None
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                raise ConnectionResetError
            if ollama.bytes_per_second:
                time.sleep(len(piece) / ollama.bytes_per_second)

    def _create(self) -> None:
        request = self._request()
        path = self.ollama.manifest_path(request.get("model", ""))
        self._check_files(request.get("files") or {})
        lines: list[object] = []
        streams = request.get("stream", True)
        send = self._stream() if streams else lines.append
        try:
            self._write_model(request, path, lambda text: send({"status": text}))
        except Refusal as refusal:
            if not streams:
                raise
            send({"error": refusal.text})
        if streams:
            send(None)
        else:
            self._json(lines[-1])

    def _check_files(self, files: dict[str, str]) -> None:
        if not files:
            raise Refusal(400, "neither 'from' or 'files' was specified")
        for name, digest in files.items():
            if name.startswith("/") or ".." in name.split("/"):
                raise Refusal(400, f"file path must be relative: {name}")
            if not self.ollama.blob(digest).exists():
                raise Refusal(400, f"blob not found for {name} (digest {digest}): no such file or directory")

    def _write_model(self, request: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
        ollama = self.ollama
        layers, architecture = make_layers(ollama, request["files"], say)
        if ollama.create_error is not None:
            raise Refusal(500, ollama.create_error)
        for key in ("template", "system", "license", "parameters"):
            kind = "params" if key == "parameters" else key
            if value := request.get(key):
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                digest = ollama.add_blob(data)
                layers.append(
                    {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": len(data)}
                )
        config = json.dumps({"model_format": "gguf", "model_family": architecture}).encode()
        manifest = {
            "schemaVersion": 2,
            "config": {"digest": ollama.add_blob(config), "size": len(config)},
            "layers": layers,
        }
        for layer in layers:
            say(f"using existing layer {layer['digest']}")
        say("writing manifest")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest))
        say("success")

    def _details(self, manifest: dict[str, Any]) -> dict[str, Any]:
        config = json.loads(self.ollama.blob(manifest["config"]["digest"]).read_text())
        family = config["model_family"]
        return {"parent_model": "", "format": "gguf", "family": family, "families": [family],
                "parameter_size": "2.8T", "quantization_level": "IQ1_S"}  # fmt: skip

    def _size(self, manifest: dict[str, Any]) -> int:
        return sum(layer["size"] for layer in [*manifest["layers"], manifest["config"]])

    def _tags(self) -> None:
        models = [
            {
                "name": name,
                "model": name,
                "modified_at": "2026-11-30T07:00:00.123456789Z",
                "size": self._size(manifest),
                "digest": hashlib.sha256(json.dumps(manifest).encode()).hexdigest(),
                "details": self._details(manifest),
            }
            for name, manifest in self.ollama.models().items()
        ]
        self._json({"models": models})

    def _ps(self) -> None:
        models = [
            {
                "name": name,
                "model": name,
                "size": self._size(manifest),
                "digest": hashlib.sha256(json.dumps(manifest).encode()).hexdigest(),
                "details": self._details(manifest),
                "expires_at": "2026-11-30T08:00:00.123456789Z",
                "size_vram": 0,
                "context_length": 4096,
            }
            for name, manifest in self.ollama.models().items()
            if name in self.ollama.loaded
        ]
        self._json({"models": models})

    def _layer_text(self, manifest: dict[str, Any], kind: str) -> str:
        for layer in manifest["layers"]:
            if layer["mediaType"].endswith(f".{kind}"):
                return self.ollama.blob(layer["digest"]).read_text()
        return ""

    def _show(self) -> None:
        name = self._request().get("model", "")
        manifest = self.ollama.manifest(name)
        parameters = json.loads(self._layer_text(manifest, "params") or "{}")
        details = self._details(manifest)
        self._json(
            {
                "license": self._layer_text(manifest, "license"),
                "modelfile": '# Modelfile generated by "ollama show"\n',
                "parameters": "\n".join(f"{key:<30} {value}" for key, value in parameters.items()),
                "template": self._layer_text(manifest, "template") or self.ollama.template,
                "details": details,
                "model_info": {"general.architecture": details["family"]},
                "capabilities": list(self.ollama.capabilities),
                "modified_at": "2026-11-30T07:00:00.123456789Z",
            }
        )

    def _copy(self) -> None:
        request = self._request()
        manifest = self.ollama.manifest(request["source"])
        target = self.ollama.manifest_path(request["destination"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(manifest))
        self._json(None)

    def _delete(self) -> None:
        name = self._request().get("model", "")
        manifest = self.ollama.manifest(name)
        self.ollama.manifest_path(name).unlink()
        self.ollama.loaded.discard(name)
        kept = self.ollama.named()
        for layer in [*manifest["layers"], manifest["config"]]:
            if layer["digest"] not in kept:
                self.ollama.blob(layer["digest"]).unlink(missing_ok=True)
        self._json(None)

    def _chat(self) -> None:
        request, ollama = self._request(), self.ollama
        ollama.chats.append(request)
        name = request.get("model", "")
        ollama.manifest(name)
        if request.get("think") and "thinking" not in ollama.capabilities:
            raise Refusal(400, f'"{name}" does not support thinking')
        time.sleep(ollama.load_seconds)
        if ollama.load_error is not None:
            raise Refusal(500, ollama.load_error)
        ollama.loaded.add(name if ":" in name else f"{name}:latest")
        if not request.get("messages"):
            self._json({"model": name, "created_at": _NOW, "message": {"role": "assistant", "content": ""},
                        "done_reason": "load", "done": True})  # fmt: skip
            return
        thinking, content, reason, tokens, seconds = self._say(request)
        final = {
            "model": name, "created_at": _NOW, "done": True, "done_reason": reason, "total_duration": 2_000_000_000,
            "load_duration": 500_000_000, "prompt_eval_count": 12, "prompt_eval_duration": 200_000_000,
            "eval_count": tokens, "eval_duration": round(seconds * 1e9),
        }  # fmt: skip
        if not request.get("stream", True):
            message = {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})
            self._json(final | {"message": message})
            return
        send = self._stream()
        for key, text in (("thinking", thinking), ("content", content)):
            for word in re.findall(r"\s*\S+\s*", text):
                message = {"role": "assistant", "content": "", key: word}
                send({"model": name, "created_at": _NOW, "message": message, "done": False})
        send(final | {"message": {"role": "assistant", "content": ""}})
        send(None)

    def _say(self, request: dict[str, Any]) -> tuple[str, str, str, int, float]:
        """Thinking, content, why it ended, and how many tokens that took how long."""
        ollama = self.ollama
        if ollama.engine_url is None:
            return ollama.thinking, ollama.content, ollama.done_reason, 40, 1.0
        options = request.get("options") or {}
        # The client leaves out what is empty, and Go reads what is missing as empty.
        messages = [
            {"content": ""}
            | {("reasoning_content" if key == "thinking" else key): value for key, value in message.items()}
            for message in request["messages"]
        ]
        # A model of random weights never comes to an end, and the next turn must fit in its small context.
        body = {"messages": messages, "max_tokens": min(options.get("num_predict", _MOST_TOKENS), _MOST_TOKENS)}
        call = urllib.request.Request(
            f"{ollama.engine_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(call) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise Refusal(error.code, json.load(error)["error"]["message"]) from error
        choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
        message, seconds = choice["message"], answer["timings"]["predicted_ms"] / 1000
        thinking, content = message.get("reasoning_content") or "", message.get("content") or ""
        return thinking, content, choice["finish_reason"], tokens, seconds


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is what some tests are about."""


@contextlib.contextmanager
def serve(folder: Path, **told: Any) -> Iterator[Ollama]:
    """Serve ``folder`` (made where missing) on a free port; ``told`` sets attributes of :class:`Ollama`."""
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    ollama = Ollama(url=f"http://127.0.0.1:{server.server_port}", folder=folder, **told)
    server.RequestHandlerClass.ollama = ollama  # type: ignore[attr-defined]  # the class made above has it
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield ollama
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
