"""Pieces of the hub's files: ranges, never whole shards, and a token that only the hub itself gets to see."""

import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Final

import httpx

from kimigguf.catalogue.access import endpoint, token
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.errors import IntegrityError, NetworkError

_ATTEMPTS: Final = 4
_BACKOFF_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 10.0
_REDIRECTS: Final = 5
_OK, _PARTIAL, _NOT_FOUND, _BAD_RANGE, _TOO_MANY, _SERVER_FAULT = 200, 206, 404, 416, 429, 500
_REFUSED: Final = (401, 403)


class _Again(Exception):  # noqa: N818 -- an attempt that may do better next time; it never leaves this module
    def __init__(self, reason: str, *, wait_seconds: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_seconds = wait_seconds
        self.unreachable = unreachable


class RangeReader:
    """Reads pieces of one set's files; to be shared by threads.

    Args:
        remote: The set.
        environ: HF_ENDPOINT and HF_TOKEN.
        most_bytes: More than this is not fetched in all, whatever headers claim.
        wait: How to sleep between attempts.
        silence_seconds: An answer that says nothing for so long is given up.
    """

    def __init__(
        self,
        remote: RemoteSet,
        *,
        environ: Mapping[str, str],
        most_bytes: int,
        wait: Callable[[float], None] = time.sleep,
        silence_seconds: float = 15.0,
    ) -> None:
        self._remote = remote
        self._endpoint = endpoint(environ)
        self._token = token(environ)
        self._most_bytes = most_bytes
        self._wait = wait
        self._client = httpx.Client(timeout=httpx.Timeout(silence_seconds, connect=15.0), follow_redirects=False)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.read_bytes = 0
        """Bytes of file bodies asked for so far."""

    def stop(self) -> None:
        """From any thread: what is being read ends soon, with an error."""
        self._stopped.set()

    def close(self) -> None:
        """Close the connections, once nobody reads any more."""
        self._client.close()

    def read(self, file: RemoteFile, start: int, count: int) -> bytes:
        """``count`` bytes of a file from ``start``.

        Raises:
            NetworkError: ``hub-unreachable``, ``gated``, ``bad-answer``.
            IntegrityError: ``changed-on-hub``, ``missing-on-hub``, ``header-too-large``.
        """
        with self._lock:
            self.read_bytes += count
            if self.read_bytes > self._most_bytes:
                raise IntegrityError(
                    f"the headers of {self._remote.quant} would be larger than {self._most_bytes >> 20} MiB",
                    code="header-too-large",
                    cause=f"{file.path} asks for bytes {start:,} to {start + count:,}",
                )
        last = _Again("it was not asked")
        for attempt in range(_ATTEMPTS):
            try:
                return self._attempt(file, start, count)
            except _Again as again:
                last = again
                if self._stopped.is_set():
                    break
                if attempt + 1 < _ATTEMPTS:
                    self._wait(min(max(_BACKOFF_SECONDS * 2**attempt, again.wait_seconds), _LONGEST_WAIT_SECONDS))
        raise NetworkError(
            f"{file.name} cannot be read from {self._endpoint}",
            code="hub-unreachable" if last.unreachable else "bad-answer",
            cause=last.reason,
            hint="try again later, or name a mirror with HF_ENDPOINT",
        )

    def _attempt(self, file: RemoteFile, start: int, count: int) -> bytes:
        path = urllib.parse.quote(f"{self._remote.repository}/resolve/{self._remote.commit}/{file.path}")
        url = httpx.URL(f"{self._endpoint}/{path}")
        home = _origin(url)
        for _ in range(_REDIRECTS):
            headers = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
            if self._token and _origin(url) == home:
                headers["Authorization"] = f"Bearer {self._token}"
            try:
                with self._client.stream("GET", url, headers=headers) as response:
                    if response.is_redirect and "Location" in response.headers:
                        url = url.join(response.headers["Location"])
                        continue
                    self._judge(response, file, at_home=_origin(url) == home)
                    return self._body(response, file, start, count)
            except (httpx.TransportError, httpx.DecodingError) as error:
                is_down = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                raise _Again(_reason(error), unreachable=is_down) from error
            except httpx.InvalidURL as error:
                raise _Again("it redirects to an address that is none") from error
        raise _Again(f"more than {_REDIRECTS} redirects")

    def _judge(self, response: httpx.Response, file: RemoteFile, *, at_home: bool) -> None:
        status = response.status_code
        if status in _REFUSED and at_home:
            raise refused(self._remote.repository, has_token=self._token is not None)
        if status == _NOT_FOUND and at_home:
            raise IntegrityError(
                f"the hub lists {file.path} at {self._remote.commit[:12]}, but does not have it",
                code="missing-on-hub",
                hint="name a mirror with HF_ENDPOINT, or unset it",
            )
        if status == _BAD_RANGE:
            raise self._changed(file, response.headers.get("Content-Range", "").rpartition("/")[2])
        if status not in {_OK, _PARTIAL}:
            wait = response.headers.get("Retry-After", "")
            busy = status == _TOO_MANY or status >= _SERVER_FAULT
            raise _Again(
                f"the answer was HTTP {status}",
                wait_seconds=float(wait) if wait.isdecimal() and busy else 0.0,
                unreachable=busy,
            )

    def _body(self, response: httpx.Response, file: RemoteFile, start: int, count: int) -> bytes:
        """The wanted bytes of an answer, and none behind them: a server that ignores ranges would send 50 GB."""
        if response.status_code == _PARTIAL:
            span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if total not in {"*", str(file.size_bytes)}:
                raise self._changed(file, total)
            if span != f"{start}-{start + count - 1}":
                raise _Again(f"asked for bytes {start}-{start + count - 1}, it sent {span or 'something else'}")
            skip = 0
        else:
            length = response.headers.get("Content-Length")
            if length != str(file.size_bytes):
                raise _Again(f"it sent {length or 'an unknown number of'} bytes instead of the file")
            skip = start
        body = bytearray()
        for piece in response.iter_raw(1 << 16):
            body += piece[skip:] if skip else piece
            skip = max(0, skip - len(piece))
            if len(body) >= count:
                return bytes(body[:count])
            if self._stopped.is_set():
                break
        raise _Again("the connection was cut")

    def _changed(self, file: RemoteFile, total: str) -> IntegrityError:
        return IntegrityError(
            f"{file.path} on the hub is another file than the one listed at {self._remote.commit[:12]}",
            code="changed-on-hub",
            cause=f"{file.size_bytes:,} bytes were listed, and it has {total or 'another number'}",
            hint="if HF_ENDPOINT names a mirror, try another one or unset it",
        )


def refused(repository: str, *, has_token: bool) -> NetworkError:
    """The hub knows the repository and does not show it."""
    page = f"https://huggingface.co/{repository}"
    return NetworkError(
        f"the hub does not let you read {repository}",
        code="gated",
        cause="the token does not give access to it" if has_token else "it asks who you are, and there is no token",
        hint=f"accept its terms on {page}, then: export HF_TOKEN=hf_...",
    )


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _reason(error: httpx.HTTPError) -> str:
    """Why, without addresses: those of storage are signed."""
    match error:
        case httpx.TimeoutException():
            return "no answer in time"
        case httpx.ConnectError():
            return "no connection"
        case httpx.RemoteProtocolError() | httpx.ReadError():
            return "the connection was cut"
        case _:
            return type(error).__name__
