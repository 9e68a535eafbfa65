"""The bridge's way to its engine: one HTTP/1.1 exchange a connection, with as little done per piece as can be.

A general client spends more on each piece of a stream than the engine does on a small model's token; here a piece is
parsed once, by llhttp, and whatever has arrived by the time somebody reads is handed over as one.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_SECONDS: Final = 30.0
_GATHER_SECONDS: Final = 0.002
_HELD_BYTES: Final = 256 * 1024
"""More than this is not read ahead of a caller that takes it slowly."""


class EngineLost(Exception):  # noqa: N818 -- what is known is why, not whose error it is
    """The engine could not be reached, or its answer broke off; the text says why."""


class Upstream:
    """Where the engine listens. ``key`` is sent where it asks for one; ``tls`` is what an https address is checked by.

    No keep-alive: the engine closes idle connections after seconds, and a request that meets that is lost.
    """

    def __init__(self, url: str, key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        secure = parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._prefix = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._headers = f"Host: {parts.netloc}\r\n{authorization}Accept: */*\r\nConnection: close\r\n"

    @asynccontextmanager
    async def ask(self, path: str, body: bytes | None = None) -> AsyncIterator["Reply"]:
        """The engine's reply to a GET, or to a POST of the JSON ``body``; leaving early ends what it was doing.

        No limit on the time to the first byte: a slow machine may read a long prompt for many minutes.

        Raises:
            EngineLost: It cannot be reached, or closes the connection without an answer.
        """
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, reply = await asyncio.get_running_loop().create_connection(
                    Reply, self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise EngineLost(f"no connection within {_CONNECT_SECONDS:.0f} s") from error
        except OSError as error:
            raise EngineLost(str(error)) from error
        try:
            transport.write(self._request(path, body))
            await reply.begun()
            yield reply
        finally:
            transport.abort()

    def _request(self, path: str, body: bytes | None) -> bytes:
        if body is None:
            return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{about}\r\n".encode() + body


class Reply(asyncio.Protocol):
    """One reply as it arrives. ``status`` is its HTTP status."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held = 0
        self._paused = False
        self._closed = False
        self._sized = False
        self._whole = False
        self._lost: str | None = None
        self.status = 0

    async def begun(self) -> None:
        """Wait for the status.

        Raises:
            EngineLost: There will be none.
        """
        while not self.status:
            if self._lost is not None or self._whole:
                raise EngineLost(self._lost or "it closed the connection")
            await self._more()

    async def read(self) -> bytes:
        """All that has come since the last call, at least a byte; empty at the end.

        Raises:
            EngineLost: The reply broke off before its end.
        """
        while not self._pieces:
            if self._lost is not None:
                raise EngineLost(self._lost)
            if self._whole:
                return b""
            await self._more()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        self._go_on()
        return data

    async def gather(self) -> None:
        """Let what comes within the next 2 ms come as one: a very fast engine is then not slowed by being read.

        Real models of K3's size take longer than that for a token, and are passed on as they speak.
        """
        self._pause()
        await asyncio.sleep(_GATHER_SECONDS)
        self._go_on()

    async def read_all(self) -> bytes:
        """The whole of it.

        Raises:
            EngineLost: The reply broke off before its end.
        """
        found = []
        while data := await self.read():
            found.append(data)
        return b"".join(found)

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _pause(self) -> None:
        if self._transport is not None and not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        if self._transport is not None and self._paused and not self._closed:
            self._paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # a stream has no other; uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lost = f"it does not speak HTTP: {error}"
            if self._transport is not None:
                self._transport.abort()
        if self._held > _HELD_BYTES:
            self._pause()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._whole or self._lost is not None:
            pass
        elif exc is None and self.status and not self._sized:
            self._whole = True  # the end of the connection is the end of such a reply
        else:
            self._lost = str(exc or "it closed the connection")
        self._wake()

    # What the parser calls.

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._sized = self._sized or name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held += len(body)

    def on_message_complete(self) -> None:
        self._whole = True


class Events:
    """Cuts the payloads of server-sent events out of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> list[bytes]:
        """The payloads that are whole by now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Engines before 2026 wrote errors under a name of their own.
        found = [line.partition(b":")[2].strip() for line in lines if line.startswith((b"data:", b"error:"))]
        return [payload for payload in found if payload != b"[DONE]"]
