"""A Hugging Face hub on loopback: a folder served as repositories, with pinned commits, signed redirects and faults.

    with serve(root) as hub:            # root/<owner>/<name>/<files...>
        environ = {"HF_ENDPOINT": hub.url}

Files that end in ``.gguf`` or ``.bin`` are LFS files: ``/resolve/`` answers 302 to a second host ("cdn"), as the real
hub does. ``hub.requests`` holds every request, ``hub.faults`` may be set at any time.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from fakes.hub_faults import Faults, Request, none
from fakes.hub_handler import Server
from fakes.hub_state import COMMIT, Hub


def _second_host() -> str:
    """127.0.0.2 where loopback has it (Linux), else 127.0.0.1: then only the port tells the hosts apart."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            return "127.0.0.1"
    return "127.0.0.2"


@contextlib.contextmanager
def serve(
    root: Path,
    *,
    commit: str = COMMIT,
    faults: Faults = none,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Hub]:
    """Serve ``root`` until the block ends; every thread and socket is gone after it. ``tls``: over HTTPS."""
    main, cdn = Server("127.0.0.1", "hub"), Server(_second_host(), "cdn")
    scheme = "http" if tls is None else "https"
    url, cdn_url = (f"{scheme}://{s.server_address[0]!s}:{s.server_address[1]}" for s in (main, cdn))
    hub = Hub(
        url=url, cdn_url=cdn_url, commits={commit: Path(root)}, branches={"main": commit}, faults=faults, token=token
    )
    main.hub = cdn.hub = hub
    main.tls = cdn.tls = tls
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in (main, cdn)]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in (main, cdn):
            server.stop()
        for thread in threads:
            thread.join()


__all__ = ["COMMIT", "Hub", "Request", "serve"]
