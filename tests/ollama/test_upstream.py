"""The bridge's way to its engine: replies that break off, stall, never end or are not HTTP, and events cut anywhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.ollama.upstream import EngineLost, Events, Upstream

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(talk: Talk) -> AsyncIterator[Upstream]:
    """An engine that says what ``talk`` writes once the request's head was read."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")


def said(data: bytes) -> Talk:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return talk


def asked(talk: Talk) -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        async with answering(talk) as engine, engine.ask("/x") as reply:
            return reply.status, await reply.read_all()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", b"hi"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
    ids=["length", "chunked", "until-closed", "empty"],
)
def test_a_reply_is_read_to_its_end_however_that_is_marked(data: bytes, body: bytes) -> None:
    assert asked(said(data)) == (200, body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
    ids=["nothing", "not-http", "short", "no-last-chunk", "bad-chunk"],
)
def test_a_reply_that_breaks_off_is_never_taken_for_whole(data: bytes) -> None:
    with pytest.raises(EngineLost):
        asked(said(data))


def test_nobody_there_is_said_with_the_reason() -> None:
    async def run() -> None:
        async with Upstream("http://127.0.0.1:9").ask("/x"):
            pass

    with pytest.raises(EngineLost, match="9"):
        asyncio.run(run())


def test_the_key_goes_along_and_the_body_whole() -> None:
    seen = []

    async def run() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(7))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/"
            async with Upstream(url, "secret").ask("/x", b'{"a":1}') as reply:
                assert reply.status == 204

    asyncio.run(run())
    assert seen[0].startswith(b"POST /base/x HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in seen[0]
    assert seen[0].endswith(b'\r\n\r\n{"a":1}')


def test_a_caller_that_reads_slowly_does_not_fill_the_memory() -> None:
    total, sent = 64 * 1024 * 1024, 0

    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        piece = b"x" * 65536
        while sent < total:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async def run() -> None:
        async with answering(flood) as engine, engine.ask("/x") as reply:
            await asyncio.sleep(0.3)
            assert sent < total // 2  # it waits: what was sent lies in the sockets' own buffers
            assert len(await reply.read()) < 4 * 1024 * 1024
            found = 4 * 1024 * 1024
            while found < total // 4:  # and goes on where it is read again
                found += len(await reply.read())

    asyncio.run(run())


def test_a_fast_engine_is_read_in_larger_pieces_and_none_is_lost() -> None:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for number in range(200):
            writer.write(b"%03d" % number)
            await writer.drain()
            await asyncio.sleep(0.0002)

    async def run() -> list[bytes]:
        found = []
        async with answering(talk) as engine, engine.ask("/x") as reply:
            while data := await reply.read():
                found.append(data)
                await reply.gather()
        return found

    pieces = asyncio.run(run())
    assert b"".join(pieces) == b"".join(b"%03d" % number for number in range(200))
    assert len(pieces) < 150


def test_leaving_early_closes_the_connection() -> None:
    async def run() -> bool:
        gone = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
            with suppress(ConnectionResetError):
                await reader.read()
            gone.set()

        async with answering(talk) as engine:
            async with engine.ask("/x") as reply:
                assert await reply.read() == b"hi"
            await asyncio.wait_for(gone.wait(), 5)
        return gone.is_set()

    assert asyncio.run(run())


PAYLOADS = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool))


@given(payloads=PAYLOADS, ends=st.sampled_from([b"\n\n", b"\r\n\r\n"]), data=st.data())
def test_events_are_the_same_wherever_the_network_cut_them(
    payloads: list[str], ends: bytes, data: st.DataObject
) -> None:
    wanted = [text.encode().strip() for text in payloads if text != "[DONE]"]
    stream = b": ping" + ends + b"".join(b"data: " + text.encode() + ends for text in payloads) + b"data: [DONE]" + ends
    events, found = Events(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += events.cut(stream[:size])
        stream = stream[size:]
    assert found == wanted
