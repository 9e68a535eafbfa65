"""HTTP as the fetch needs it: one kept-alive connection per origin and thread, proxies from the environment.

The standard library's client, because a body is read with half the processor time of httpx (measured: 0.9 against
1.4 CPU seconds per GB), and because its socket can be shut from another thread: Ctrl-C does not wait for a timeout.
"""

import base64
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from functools import cache
from typing import Final

from kimigguf.errors import NetworkError, UsageError

_CONNECT_SECONDS: Final = 15.0


class Lost(Exception):  # noqa: N818 -- an event of the line, answered by another attempt; it never leaves the room
    """An attempt that failed but may succeed again.

    ``wait_seconds`` is what the server asked for; ``throttled``: it said that it has too much to do.
    """

    def __init__(self, reason: str, *, wait_seconds: float | None = None, throttled: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_seconds = wait_seconds
        self.throttled = throttled


def origin(url: str) -> str:
    """Scheme, host and port: what a token belongs to."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def proxy_for(url: str, environ: Mapping[str, str]) -> str | None:
    """The proxy that ``environ`` names for an address (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY), or None.

    Raises:
        UsageError: ``proxy-unsupported`` for anything but an HTTP proxy.
    """
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").lower()
    settings = {name.lower(): value for name, value in environ.items() if name.lower().endswith("_proxy") and value}
    if "REQUEST_METHOD" in environ:  # a CGI program: HTTP_PROXY would be the client's "Proxy:" header
        settings.pop("http_proxy", None)
    proxy = settings.get(f"{parts.scheme}_proxy") or settings.get("all_proxy")
    if not proxy or _bypassed(host, parts.port, settings.get("no_proxy", "")):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if urllib.parse.urlsplit(proxy).scheme != "http":
        raise UsageError(
            f"the proxy {_without_password(proxy)} is no HTTP proxy",
            code="proxy-unsupported",
            hint="set HTTPS_PROXY=http://host:port, or unset it",
        )
    return proxy


def _bypassed(host: str, port: int | None, exceptions: str) -> bool:
    for entry in re.split(r"[,\s]+", exceptions.lower()):
        name, _, at = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
        if not name or (at and at != str(port)):
            continue
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
        name = name.lstrip("*").lstrip(".")
        if name in {"", host} or host.endswith("." + name):
            return True
    return False


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@cache
def _tls() -> ssl.SSLContext:
    import httpx  # noqa: PLC0415 -- heavy, and only for its trust store: certifi, SSL_CERT_FILE and SSL_CERT_DIR

    return httpx.create_ssl_context()


class Connections:
    """One worker's connections. Not shared between threads, but for ``interrupt``."""

    def __init__(self, *, environ: Mapping[str, str], stall_seconds: float) -> None:
        self._environ = environ
        self._stall_seconds = stall_seconds
        self._open: dict[str, http.client.HTTPConnection] = {}
        self._lock = threading.Lock()
        self._interrupted = False

    def get(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Send a GET and return the answer with its body unread. Redirects are the caller's business.

        Raises:
            Lost: The line failed; this attempt is over.
            NetworkError: ``bad-certificate``; no attempt would do better.
        """
        parts = urllib.parse.urlsplit(url)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        key = origin(url)
        proxy = proxy_for(url, self._environ)
        if proxy and parts.scheme == "http":
            target, headers = url, {**headers, **_proxy_headers(proxy)}
        for fresh in (False, True):
            with self._lock:
                if self._interrupted:
                    raise Lost("interrupted")
                known = key in self._open
                connection = self._open.setdefault(key, _connection(url, proxy))
            try:
                if connection.sock is None:
                    connection.connect()
                    _socket(connection).settimeout(self._stall_seconds)
                connection.request("GET", target, headers=dict(headers))
                return connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                self.drop(url)
                raise NetworkError(
                    f"the certificate of {parts.hostname} is not trusted",
                    code="bad-certificate",
                    cause=error.verify_message,
                    hint="behind a proxy that re-signs traffic, set SSL_CERT_FILE to its certificate",
                ) from error
            except (http.client.HTTPException, OSError, ValueError) as error:
                self.drop(url)
                # The server may have closed a kept-alive connection in the meantime: that is no failure.
                if not known or fresh or isinstance(error, TimeoutError):
                    raise Lost(reason(error)) from error
        raise AssertionError("unreachable")

    def drop(self, url: str) -> None:
        """Close the connection to this origin: it holds an answer that nobody will read."""
        with self._lock:
            connection = self._open.pop(origin(url), None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            connections, self._open = list(self._open.values()), {}
        for connection in connections:
            connection.close()

    def interrupt(self) -> None:
        """From another thread: whatever this worker is waiting for ends now."""
        with self._lock:
            self._interrupted = True
            for connection in self._open.values():
                # Past TLS, whose own shutdown would let the other thread read on, and take ciphertext for the body.
                with contextlib.suppress(OSError, TypeError):
                    socket.socket.shutdown(_socket(connection), socket.SHUT_RDWR)


def _socket(connection: http.client.HTTPConnection) -> socket.socket:
    sock: socket.socket = connection.sock  # typed as None-able in some versions of the stubs, and as anything in others
    return sock


def reason(error: BaseException) -> str:
    """What went wrong on the line, in words, without addresses (they may be signed)."""
    match error:
        case TimeoutError():
            return "no byte for too long"
        case http.client.RemoteDisconnected() | http.client.IncompleteRead() | ConnectionResetError():
            return "the connection was cut"
        case ConnectionRefusedError():
            return "the connection was refused"
        case socket.gaierror():
            return "the host name was not found"
        case OSError():
            return error.strerror or type(error).__name__
        case _:
            return f"no proper HTTP answer ({type(error).__name__})"


def _connection(url: str, proxy: str | None) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port
    through = urllib.parse.urlsplit(proxy) if proxy else None
    if parts.scheme == "https":
        if through is None:
            return http.client.HTTPSConnection(host, port, timeout=_CONNECT_SECONDS, context=_tls())
        connection = http.client.HTTPSConnection(
            through.hostname or "", through.port or 80, timeout=_CONNECT_SECONDS, context=_tls()
        )
        connection.set_tunnel(host, port or 443, headers=_proxy_headers(proxy or ""))
        return connection
    if through is not None:
        host, port = through.hostname or "", through.port or 80
    return http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urllib.parse.urlsplit(proxy)
    if parts.username is None:
        return {}
    login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode("ascii")}
