"""The bridge inside the process that serves: its port is taken before the load, and it ends with the engine."""

import errno
import logging
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Final

from kimigguf.errors import MachineError, ServerError

if TYPE_CHECKING:
    import ssl

    import uvicorn

HOST: Final = "127.0.0.1"
"""Loopback only: the bridge asks for no key and sends the engine's own, so it must not be open to a network."""
DEFAULT_PORT: Final = 11434
_NEEDED: Final = ("starlette", "uvicorn", "httptools")
_OF_THE_EXTRA: Final = re.compile(r"""\bextra\s*==\s*['"]ollama-bridge['"]""")
_START_SECONDS: Final = 10.0
_DRAIN_SECONDS: Final = 1
"""How long an answer that is under way may go on once the server stops."""


def url(port: int) -> str:
    """What clients take as ``OLLAMA_HOST``."""
    return f"http://{HOST}:{port}"


def check_bridge(port: int) -> None:
    """Refuse, before anything is loaded, a bridge that could not start.

    Raises:
        MachineError: ``bridge-missing`` without the extra, ``port-in-use``, ``port-unusable``.
    """
    try:
        import httptools  # noqa: F401, PLC0415 -- an extra; only its presence is asked for
        import starlette  # noqa: F401, PLC0415 -- likewise
        import uvicorn  # noqa: F401, PLC0415 -- likewise
    except ImportError as error:
        raise MachineError(
            "--ollama-api needs starlette, uvicorn and httptools, which are not all installed",
            code="bridge-missing",
            cause=str(error),
            hint=shlex.join([sys.executable, "-m", "pip", "install", *bridge_packages()]),
        ) from error
    _bind(port).close()


def bridge_packages() -> tuple[str, ...]:
    """What the extra ``ollama-bridge`` is made of, as pip takes it: kimigguf itself need not be in an index of pip's.

    By the installed metadata; where those have no such extra, what a start asks for.
    """
    try:
        requires = metadata.requires("kimigguf") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        requires = []
    found = (line.partition(";") for line in requires)
    return tuple(name.strip() for name, _, marker in found if _OF_THE_EXTRA.search(marker)) or _NEEDED


@contextmanager
def held(port: int) -> Iterator[socket.socket]:
    """The port, taken while the block runs: a load takes long enough for somebody else to come for it.

    Raises:
        MachineError: ``port-in-use``, ``port-unusable``.
    """
    with _bind(port) as taken:
        # With the option on both sides the kernel gives a port away as long as nobody listens there.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield taken


@contextmanager
def running(
    taken: socket.socket,
    upstream: str,
    key: str | None,
    tls: "ssl.SSLContext | None" = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Iterator[None]:
    """The bridge to the engine at ``upstream``, answering on ``taken`` while the block runs; ``tls`` is its trust.

    ``tell`` hears, once each, what clients ask for and do not get.

    Raises:
        ServerError: ``bridge-failed``.
    """
    import uvicorn  # noqa: PLC0415 -- an extra

    from kimigguf.ollama.bridge import Bridge  # noqa: PLC0415 -- needs the extra

    config = uvicorn.Config(
        Bridge(upstream, key, tls=tls, tell=tell).app(),
        log_config=None,
        log_level="warning",  # also after an earlier bridge of this process ended, and was silenced for that
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    server = uvicorn.Server(config)
    # Connections inherit it: those that still close must not keep the port from who serves next.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A daemon: if this process dies of something else, nothing waits for clients.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, name="ollama-bridge", daemon=True)
    thread.start()
    try:
        _wait_started(server, thread)
        yield
    finally:
        # Answers that are cut off now are meant to be: not each is worth a traceback on the terminal.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        server.should_exit = True
        thread.join(_DRAIN_SECONDS + 5)


def _wait_started(server: "uvicorn.Server", thread: threading.Thread) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > give_up:
            raise ServerError("the bridge for Ollama's clients did not start", code="bridge-failed")
        time.sleep(0.01)


def _bind(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # What was served here a moment ago must not keep the port; one that listens still does.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
    except OSError as error:
        made.close()
        raise MachineError(
            f"{HOST}:{port} cannot be had for --ollama-api",
            code="port-in-use" if error.errno == errno.EADDRINUSE else "port-unusable",
            cause=f"{error.strerror}; {DEFAULT_PORT} is Ollama's own, if it runs here",
            hint=f"choose another: --ollama-port {another_port(port)}",
        ) from error
    return made


def another_port(port: int) -> int:
    """A port to try in place of ``port``, where nothing of ours listens by default."""
    return DEFAULT_PORT + 1 if port != DEFAULT_PORT + 1 else DEFAULT_PORT + 2
