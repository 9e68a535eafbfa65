"""A stand-in for Docker's daemon on a socket of its own: the real command line talks to it, and it keeps what it hears.

It answers the few calls that ``docker network`` and ``docker run --detach`` make, as Docker's Engine API 1.45 has them.
"""

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Daemon:
    """Where it listens, and what it was asked to make."""

    socket: Path
    networks: list[str] = field(default_factory=list)
    containers: list[dict[str, Any]] = field(default_factory=list)
    started: int = 0


@contextmanager
def running(folder: Path) -> Iterator[Daemon]:
    daemon = Daemon(socket=folder / "docker.sock")
    with socketserver.ThreadingUnixStreamServer(str(daemon.socket), _handler(daemon)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield daemon
        finally:
            server.shutdown()
            thread.join()


def _handler(daemon: Daemon) -> type[BaseHTTPRequestHandler]:  # noqa: C901 -- one class with a branch per call
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._say(200, None)

        def do_GET(self) -> None:
            path = re.sub(r"^/v[\d.]+", "", self.path)
            if path.startswith("/networks/"):
                known = path.rpartition("/")[2].partition("?")[0] in daemon.networks
                self._say(200 if known else 404, {"Id": "n"} if known else {"message": "network not found"})
            else:
                self._say(200, {"Id": "c"})

        def do_POST(self) -> None:
            path = re.sub(r"^/v[\d.]+", "", self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if path == "/networks/create":
                daemon.networks.append(json.loads(body)["Name"])
                self._say(201, {"Id": "n"})
            elif path.startswith("/containers/create"):
                daemon.containers.append(json.loads(body) | {"query": path.partition("?")[2]})
                self._say(201, {"Id": "c", "Warnings": []})
            else:
                daemon.started += path.endswith("/start")
                self._say(204, None)

        def _say(self, status: int, data: object) -> None:
            body = b"" if data is None else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("API-Version", "1.45")
            self.send_header("Content-Type", "application/json")
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

        def address_string(self) -> str:
            return "docker"

    return Handler
