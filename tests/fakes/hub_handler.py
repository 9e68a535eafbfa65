"""How a loopback hub and its store answer, rightly or wrongly."""

import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, Final, cast

from fakes.hub_faults import Fault, Kind, Request
from fakes.hub_state import LFS, File, Hub

_PIECE: Final = 1 << 18


class Server(ThreadingHTTPServer):
    daemon_threads = False  # joined at the end: nothing outlives the test
    request_queue_size = 128
    address_family = socket.AF_INET

    def __init__(self, host: str, name: str) -> None:
        super().__init__((host, 0), Handler)
        self.name = name
        self.hub: Hub
        self.tls: ssl.SSLContext | None = None
        self.open_sockets: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.open_sockets.add(connection)
        if self.hub.send_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.hub.send_buffer_bytes)
        if self.tls is not None:  # the handshake is the handler's, with its first read
            self.open_sockets.discard(connection)
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            self.open_sockets.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.open_sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what these tests are about."""

    def stop(self) -> None:
        self.shutdown()
        for connection in list(self.open_sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def hub(self) -> Hub:
        return cast("Server", self.server).hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the name is the base class's
        """The log is ``hub.requests``."""

    # -- requests ------------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self._note(file=None)
        if not self._allowed():
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            wanted = _paths_of(body)
            if (commit := self._commit(match[1], match[2])) is not None:
                self._json([_entry(file) for file in self.hub.files(commit, match[1]) if file.path in wanted])
            return
        self._error(404, "EntryNotFound", f"no such endpoint {path}")

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        if match := re.fullmatch(r"/signed/([0-9a-f]+)/(.+)", path):
            self._signed(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._note(file=None)
            if self._allowed():
                self._api(path, urllib.parse.parse_qs(url.query))

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._tree(match[1], match[2], (match[3] or "").strip("/"), query)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in self.hub.branches.items()]
            return self._json({"branches": branches, "tags": [], "converts": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._model(match[1], match[2] or "main", blobs="blobs" in query)
        return self._error(404, "EntryNotFound", f"no such endpoint {path}")

    def _note(self, *, file: str | None, body: bool = False) -> Request:
        url = urllib.parse.urlsplit(self.path)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        request = Request(
            host=cast("Server", self.server).name,
            method=self.command,
            path=urllib.parse.unquote(url.path),
            query=url.query,
            range=(int(match[1]), int(match[2]) if match[2] else None) if match else None,
            if_range=self.headers.get("If-Range"),
            authorization=self.headers.get("Authorization"),
            headers=tuple(self.headers.items()),
            file=file,
            body=body,
        )
        self.hub.requests.append(request)
        if self.hub.before is not None:
            self.hub.before(request)
        return request

    def _allowed(self) -> bool:
        if self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return True
        self._error(401, "GatedRepo", "Access to this model is restricted. You must be authenticated to access it.")
        return False

    def _commit(self, repository: str, revision: str) -> str | None:
        commit = self.hub.resolve(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif not (self.hub.commits[commit] / repository).is_dir():
            self._error(404, "RepoNotFound", "Repository not found")
            return None
        return commit

    # -- the API -------------------------------------------------------------------------------------------------

    def _tree(self, repository: str, revision: str, under: str, query: dict[str, list[str]]) -> None:
        if (commit := self._commit(repository, revision)) is None:
            return None
        prefix = f"{under}/" if under else ""
        files = [file for file in self.hub.files(commit, repository) if file.path.startswith(prefix)]
        if under and not files:
            return self._error(404, "EntryNotFound", f"{under} does not exist on {revision!r}")
        deep = query.get("recursive", ["false"])[0].lower() in {"1", "true"}
        folders = {
            file.path[: len(prefix) + at]
            for file in files
            for at, letter in enumerate(file.path[len(prefix) :])
            if letter == "/" and (deep or "/" not in file.path[len(prefix) : len(prefix) + at])
        }
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]
        entries += [_entry(file) for file in files if deep or "/" not in file.path[len(prefix) :]]
        at = int(query.get("cursor", ["0"])[0])
        headers = {}
        if at + self.hub.page_size < len(entries):
            base = urllib.parse.urlsplit(self.path).path
            flags = f"recursive={str(deep).lower()}&cursor={at + self.hub.page_size}"
            headers["Link"] = f'<{self.hub.url}{base}?{flags}>; rel="next"'
        return self._json(entries[at : at + self.hub.page_size], headers=headers)

    def _model(self, repository: str, revision: str, *, blobs: bool) -> None:
        if (commit := self._commit(repository, revision)) is None:
            return
        siblings: list[dict[str, Any]] = []
        for file in self.hub.files(commit, repository):
            sibling: dict[str, Any] = {"rfilename": file.path}
            if blobs:
                sibling |= {"size": file.size, "blobId": file.oid}
                if file.sha256:
                    sibling["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": 134}
            siblings.append(sibling)
        now = "2026-08-01T00:00:00.000Z"
        model = {"_id": "1", "id": repository, "modelId": repository, "sha": commit, "private": False, "tags": ["gguf"]}
        model |= {"gated": "auto" if self.hub.token else False, "disabled": False, "downloads": 1, "likes": 1}
        self._json(model | {"lastModified": now, "createdAt": now, "siblings": siblings, "usedStorage": 1})

    # -- file bytes ----------------------------------------------------------------------------------------------

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        request = self._note(file=name, body=not (self.hub.redirect and name.endswith(LFS)))
        if not self._allowed() or (commit := self._commit(repository, revision)) is None:
            return None
        folder = self.hub.commits[commit] / repository
        path = folder / name
        if not path.is_file():
            return self._error(404, "EntryNotFound", "Entry not found")
        file = self.hub.describe(folder, path)
        headers = {"X-Repo-Commit": commit}
        if file.sha256:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        fault = self.hub.faults(request)
        if fault is not None and self._refused(fault):
            return None
        if file.sha256 and self.hub.redirect:
            headers |= {"Location": self.hub.sign(name, path), "Content-Length": "0", "ETag": f'"{file.etag}"'}
            return self._head(302, headers)
        with path.open("rb") as stream:
            return self._body(name, stream, f'"{file.etag}"', headers, fault)

    def _signed(self, key: str, name: str) -> None:
        request = self._note(file=name, body=True)
        found = self.hub.signed(key)
        fault = self.hub.faults(request)
        if fault is not None and self._refused(fault):
            return None
        if found is None:
            return self._text(403, "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        file, path = found
        with path.open("rb") as stream:  # opened before it is named: a test may replace the file at any moment
            stat = os.fstat(stream.fileno())
            # Like an object store's: not the hash, but it changes with the content.
            text = f"{file} {stat.st_size} {stat.st_mtime_ns}"
            etag = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            return self._body(file, stream, f'"{etag}"', {}, fault)

    def _refused(self, fault: Fault) -> bool:
        """Answer the faults that are whole answers of their own."""
        wait = {"Retry-After": f"{fault.seconds:.0f}"}
        match fault.kind:
            case Kind.TOO_MANY:
                self._text(429, "Too many requests", wait)
            case Kind.UNAVAILABLE:
                self._text(503, "Service unavailable", wait)
            case Kind.ERROR:
                self._text(500, "Internal error")
            case Kind.EXPIRED:
                self._text(403, "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
            case Kind.HTML:
                self._text(200, "<html><body>Sign in to the hotel network</body></html>", {"Content-Type": "text/html"})
            case _:
                return False
        return True

    def _body(self, name: str, stream: BinaryIO, etag: str, headers: dict[str, str], fault: Fault | None) -> None:
        size = os.fstat(stream.fileno()).st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if_range = self.headers.get("If-Range")
        first, last, status = 0, size - 1, 200
        kind = fault.kind if fault else None
        if match and (if_range is None or if_range == etag) and kind is not Kind.IGNORE_RANGE:
            first, last, status = int(match[1]), min(int(match[2] or size - 1), size - 1), 206
            if first >= size:
                return self._head(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
            if kind is Kind.MOVED_RANGE and first > 0:
                first, last = first - 1, last - 1
        count = declared = last - first + 1
        sent = min(count, fault.after_bytes) if fault else count
        match kind:
            case Kind.SHORT:
                declared = count = sent = max(0, min(sent, count - 1))
            case Kind.LONG:
                declared = count + 7
                sent = count
            case Kind.WRONG_LENGTH:
                declared, sent = count + 1000, count
            case Kind.CUT | Kind.RESET | Kind.STALL:
                sent = min(sent, count - 1)
            case _:
                sent = count
        headers |= {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._head(status, headers | {"Content-Length": str(declared)})
        if self.command == "HEAD":
            return None
        self._send(name, stream, first, sent, garbage=kind is Kind.GARBAGE)
        return self._after(fault)

    def _after(self, fault: Fault | None) -> None:
        match fault.kind if fault else None:
            case Kind.LONG:
                self.wfile.write(b"surplus")
            case Kind.STALL if fault is not None:
                self.hub.closing.wait(fault.seconds)
                self.close_connection = True
            case Kind.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
            case Kind.CUT | Kind.WRONG_LENGTH:
                self.close_connection = True
            case _:
                pass

    def _send(self, name: str, stream: BinaryIO, first: int, count: int, *, garbage: bool) -> None:
        self.wfile.flush()
        rate = self.hub.bytes_per_second
        started, at = time.monotonic(), 0
        while at < count and not self.hub.closing.is_set():
            piece = min(count - at, _PIECE if rate is None else max(1, min(_PIECE, int(rate / 50))))
            if garbage or isinstance(self.connection, ssl.SSLSocket):
                data = os.pread(stream.fileno(), piece, first + at)
                self.connection.sendall(bytes(0xFF ^ byte for byte in data) if garbage else data)
                done = len(data)
            else:
                done = os.sendfile(self.connection.fileno(), stream.fileno(), first + at, piece)
            if done == 0:
                break
            at += done
            with self.hub.lock:
                self.hub.sent_bytes[name] = self.hub.sent_bytes.get(name, 0) + done
            if rate is not None:
                self.hub.closing.wait(max(0.0, started + at / rate - time.monotonic()))

    # -- answers -------------------------------------------------------------------------------------------------

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, headers | {"Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _text(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, text.encode(), {"Content-Type": "text/plain"} | (headers or {}))

    def _error(self, status: int, code: str, message: str) -> None:
        self._json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})


def _entry(file: File) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": file.oid, "size": file.size, "path": file.path}
    if file.sha256:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return entry


def _paths_of(body: bytes) -> set[str]:
    if body[:1] == b"{":
        return set(json.loads(body).get("paths", []))
    return set(urllib.parse.parse_qs(body.decode()).get("paths", []))
