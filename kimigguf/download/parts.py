"""One range of one file: resolved at the hub, followed to where it lies, and every answer held to what was asked."""

import email.utils
import http.client
import re
import time
import urllib.parse
from collections.abc import Generator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from kimigguf import __version__
from kimigguf.download.transport import Connections, Lost, origin, reason
from kimigguf.errors import IntegrityError, NetworkError

_READ_BYTES: Final = 124 << 10
"""Below 128 KiB: larger blocks are mapped and unmapped by malloc for every piece, which TLS's small ones can't bear."""
_REDIRECTS: Final = 6
_SLOWEST_BYTES: Final = 4096
"""Fewer bytes than this within the stall time is a stall too: a trickle would hold a part for ever."""

_TAG_CHANGES: Final = 3
"""After so many another ETag is the store's way, not a change of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one file comes from. ``url`` is the hub's ``/resolve/`` address at the pinned commit."""

    url: str
    name: str
    size_bytes: int
    sha256: str
    commit: str
    token: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class Tag:
    """The ETag that a file's answers carry; asked for with If-Range, so that a change is noticed."""

    value: str | None = None
    changes: int = 0


def stream(
    connections: Connections, source: Source, start: int, end: int, *, tag: Tag, stall_seconds: float
) -> Generator[bytes, None, None]:
    """The bytes ``[start, end)`` of a file, in pieces, never one more. Fewer are possible: the caller counts.

    Raises:
        Lost: This attempt failed; another may not.
        NetworkError: ``gated``, ``not-on-hub``, ``bad-certificate``: no attempt would do better.
        IntegrityError: ``changed-on-hub``: the hub has other content under this name at the pinned commit.
    """
    expected, changes = tag.value, tag.changes
    url, response = _open(connections, source, start, end, expected)
    left = end - start
    try:
        _check_tag(response.headers.get("ETag"), expected, changes, tag)
        _check(response, source, start, end)
        window_ends, window_bytes = time.monotonic() + stall_seconds, 0
        while left > 0:
            try:
                piece = response.read1(min(_READ_BYTES, left))
            except (http.client.HTTPException, OSError, ValueError) as error:
                raise Lost(reason(error)) from error
            if not piece:
                raise Lost("the answer ended early")
            left -= len(piece)
            window_bytes += len(piece)
            yield piece
            if (now := time.monotonic()) > window_ends:
                if window_bytes < _SLOWEST_BYTES:
                    raise Lost("hardly a byte for too long")
                window_ends, window_bytes = now + stall_seconds, 0
    finally:
        # A body that is longer than asked for, or unfinished, blocks the connection for anything else.
        if left > 0 or response.length != 0:
            connections.drop(url)
        response.close()


def _open(
    connections: Connections, source: Source, start: int, end: int, expected: str | None
) -> tuple[str, http.client.HTTPResponse]:
    """Resolve and follow redirects; the token goes to the hub's own origin only."""
    url, home = source.url, origin(source.url)
    for _hop in range(_REDIRECTS):
        headers = {
            "User-Agent": f"kimigguf/{__version__}",
            "Accept-Encoding": "identity",
            "Range": f"bytes={start}-{end - 1}",
        }
        if source.token is not None and origin(url) == home:
            headers["Authorization"] = f"Bearer {source.token}"
        if expected is not None:
            headers["If-Range"] = expected
        response = connections.get(url, headers)
        if response.status not in {301, 302, 303, 307, 308}:
            break
        location = response.headers.get("Location")
        if origin(url) == home:
            _check_identity(response.headers, source)
        _drain(connections, url, response)
        if not location:
            raise Lost("a redirect to nowhere")
        following = urllib.parse.urljoin(url, location)
        if urllib.parse.urlsplit(following).scheme not in {"https", urllib.parse.urlsplit(source.url).scheme}:
            raise Lost("a redirect to something else than the hub's own protocol")
        url = following
    else:
        raise Lost("too many redirects")
    try:
        if origin(url) == home:
            _check_identity(response.headers, source)
        _check_status(response, source, at_hub=origin(url) == home)
    except BaseException:
        _drain(connections, url, response)
        raise
    return url, response


def _drain(connections: Connections, url: str, response: http.client.HTTPResponse) -> None:
    """Keep the connection if what is left to read is small, else close it."""
    try:
        if response.length is not None and response.length <= 1 << 16:
            response.read()
            return
    except (http.client.HTTPException, OSError, ValueError):
        pass  # then it is closed
    connections.drop(url)


def _check_identity(headers: http.client.HTTPMessage, source: Source) -> None:
    """The hub names the content behind an address: another hash or size under a pinned commit is another file."""
    linked = (headers.get("X-Linked-ETag") or "").strip('W/"').lower()
    size = headers.get("X-Linked-Size") or ""
    wrong_hash = re.fullmatch(r"[0-9a-f]{64}", linked) and linked != source.sha256
    if wrong_hash or (size.isdigit() and int(size) != source.size_bytes):
        raise IntegrityError(
            f"{source.name} has changed on the hub since it was listed",
            code="changed-on-hub",
            cause=f"listed with SHA-256 {source.sha256[:12]}..., served with {linked[:12] or 'another size'}",
            hint="list it anew: run the same command with --revision main",
        )


def _check_status(response: http.client.HTTPResponse, source: Source, *, at_hub: bool) -> None:
    status = response.status
    if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
        return
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        text = "too many requests" if status == HTTPStatus.TOO_MANY_REQUESTS else "the server is busy"
        raise Lost(text, wait_seconds=_retry_after(response.headers.get("Retry-After")), throttled=True)
    if status in {401, 403} and at_hub:
        raise NetworkError(
            f"the hub does not give {source.name} to you",
            code="gated",
            cause=response.headers.get("X-Error-Message") or f"HTTP {status}",
            hint="accept the licence on the model's page, then log in with: hf auth login",
        )
    if status in {404, 410} and at_hub:
        raise NetworkError(
            f"the hub no longer has {source.name} at commit {source.commit[:12]}",
            code="not-on-hub",
            cause=response.headers.get("X-Error-Message") or f"HTTP {status}",
            hint="choose another state of the repository with --revision main",
        )
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise Lost("the server says that the file is shorter")
    raise Lost("the signed address has expired" if status == HTTPStatus.FORBIDDEN else f"HTTP {status}")


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or an HTTP date; None if there is no telling."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def _check_tag(etag: str | None, expected: str | None, changes: int, tag: Tag) -> None:
    """Is this the same file as before? ``expected`` and ``changes`` stood before the hub was asked for the address.

    Another ETag is another node of the store, or another file. So the attempt ends, and the next one asks the hub
    first, which vouches for the hash; only an attempt that began after that may bring a new ETag in.
    """
    known = tag.value
    if changes != tag.changes or (expected is not None and etag != expected) or (known is not None and etag != known):
        if known is not None:
            tag.value, tag.changes = None, tag.changes + 1
        raise Lost("the file has another ETag than before")
    if known is None and tag.changes <= _TAG_CHANGES and etag and not etag.startswith("W/"):
        tag.value = etag


def _check(response: http.client.HTTPResponse, source: Source, start: int, end: int) -> None:
    """Is this the range that was asked for?

    Raises:
        Lost: It is not.
    """
    headers = response.headers
    if (headers.get("Content-Encoding") or "identity").lower() != "identity":
        raise Lost("a compressed answer")
    if response.status == HTTPStatus.PARTIAL_CONTENT:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range") or "")
        if match is None or int(match[1]) != start or int(match[2]) >= end:
            raise Lost("another range than was asked for")
        if match[3] not in {"*", str(source.size_bytes)}:
            raise Lost("a range of another file")
    elif start > 0:
        raise Lost("the server ignores ranges")
    elif headers.get("Content-Length") != str(source.size_bytes):
        raise Lost("an answer that is not the file")
