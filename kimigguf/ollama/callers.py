"""Who may call the bridge, and what becomes of an answer whose caller leaves."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kimigguf.ollama.answers import EngineError

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_OWN_PAGES: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(?!https?:)[a-z-]+://.*"
"""Pages of this machine, and those of desktop programs (``vscode-webview://...``), which say neither http nor https."""
_Made = TypeVar("_Made")


class Gone(Exception):  # noqa: N818 -- nobody is left to call it an error
    """The client hung up."""


class _OwnPagesOnly:
    """Turns away web pages from elsewhere that a browser on this machine has open, as Ollama itself does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = Request(scope).headers.get("origin")  # "null" is what a page says that hides where it is from
            if origin is not None and not re.fullmatch(_OWN_PAGES, origin):
                await PlainTextResponse("forbidden", status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def checks(hosts: Sequence[str]) -> list[Middleware]:
    """What every call passes; ``hosts`` are the names the bridge may be called by (a foreign name is a rebound one)."""
    return [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(_OwnPagesOnly),
        Middleware(CORSMiddleware, allow_origin_regex=_OWN_PAGES, allow_methods=["*"], allow_headers=["*"]),
    ]


async def while_there(request: Request, work: Coroutine[Any, Any, _Made]) -> _Made:
    """``work``, ended where the client hangs up: a slow engine would go on for minutes for nobody.

    Raises:
        Gone: It did.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def drained(lines: AsyncGenerator[str, None]) -> None:
    """All of them, for who counts what they do and not what they say."""
    async with aclosing(lines):
        async for _ in lines:
            pass


async def written(first: str, lines: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """The lines, and an error that comes now as one more, which is how Ollama tells it."""
    async with aclosing(lines):
        yield first
        try:
            async for made in lines:
                yield made
        except EngineError as error:
            yield json.dumps({"error": str(error)}) + "\n"
