"""Ollama's API in front of a running llama-server: its clients talk to K3, and nothing is copied or registered.

``python -m kimigguf.ollama.bridge --upstream http://127.0.0.1:8080 --port 11434`` serves until it is stopped. Only
translation: the engine schedules, and models cannot be pulled, made or removed here.
"""

import argparse
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kimigguf.ollama.translate import Answer, Json, Untranslatable, chat_request, generate_request, whole

VERSION: Final = "0.35.0"
"""The Ollama whose API this follows; clients ask for it to know what they may use."""
_CAPABILITIES: Final = ["completion", "tools", "thinking"]
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_NOT_HERE: Final = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")
KEY_VARIABLE: Final = "KIMIGGUF_API_KEY"


class _Refused(Exception):  # noqa: N818 -- an HTTP answer
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _OwnPagesOnly:
    """Turns away web pages from elsewhere that a browser on this machine has open, as Ollama itself does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = urlsplit(Request(scope).headers.get("origin", ""))
            if origin.scheme in {"http", "https"} and origin.hostname not in _LOOPBACK:
                await PlainTextResponse("forbidden", status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Bridge:
    """The translation in front of one engine. ``key`` is sent to the engine, where it asks for one."""

    def __init__(self, upstream: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No limit on reading: a slow machine may think for minutes before its first token.
        timeout = httpx.Timeout(30.0, read=None)
        # A fresh connection each: the engine closes idle ones after seconds, and a request that meets that is lost.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=upstream, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )

    def app(self, hosts: Sequence[str] = _LOOPBACK) -> Starlette:
        """The ASGI application; ``hosts`` are the names it may be called by (a foreign name is a rebound one)."""

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            yield
            await self._client.aclose()

        answers: list[tuple[str, str, Callable[[Request], Any]]] = [
            ("/", "GET", self._root),
            ("/api/version", "GET", self._version),
            ("/api/tags", "GET", self._tags),
            ("/api/ps", "GET", self._ps),
            ("/api/show", "POST", self._show),
            ("/api/chat", "POST", self._chat),
            ("/api/generate", "POST", self._generate),
            ("/api/embed", "POST", self._embed),
        ]
        routes = [Route(path, answer, methods=[method]) for path, method, answer in answers]
        routes += [Route(f"/api/{path}", self._not_here, methods=["POST", "DELETE", "HEAD"]) for path in _NOT_HERE]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)), Middleware(_OwnPagesOnly)]
        handlers = {_Refused: _refused}
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)

    async def _root(self, _request: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _not_here(self, _request: Request) -> Response:
        raise _Refused(501, "this is kimigguf's bridge to a running engine: models are not managed here")

    async def _get(self, path: str) -> Any:  # noqa: ANN401 -- parsed JSON
        try:
            reply = await self._client.get(path)
        except httpx.HTTPError as error:
            raise _Refused(502, f"the engine does not answer: {error}") from error
        if reply.is_error:
            raise _Refused(reply.status_code, _message(reply.text))
        return reply.json()

    async def _models(self) -> list[Json]:
        found: list[Json] = (await self._get("/v1/models"))["data"]
        return found

    async def _described(self) -> list[Json]:
        return [
            {
                "name": _full(model["id"]),
                "model": _full(model["id"]),
                "modified_at": "1970-01-01T00:00:00Z",
                "size": int((model.get("meta") or {}).get("size") or 0),
                "digest": "",
                "details": {"format": "gguf", "family": "", "families": None, "parameter_size": "",
                            "quantization_level": ""},
            }
            for model in await self._models()
        ]  # fmt: skip

    async def _tags(self, _request: Request) -> Response:
        return JSONResponse({"models": await self._described()})

    async def _ps(self, _request: Request) -> Response:
        props = await self._get("/props")
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        more = {"context_length": context, "expires_at": "9999-01-01T00:00:00Z", "size_vram": None}
        return JSONResponse({"models": [model | more for model in await self._described()]})

    async def _named(self, body: Json) -> tuple[str, str]:
        """The name that was asked for, and the engine's own for it."""
        asked = str(body.get("model") or "")
        for model in await self._models():
            if _full(asked) == _full(model["id"]):
                return asked, model["id"]
        raise _Refused(404, f"model '{asked}' not found")

    async def _show(self, request: Request) -> Response:
        _, model = await self._named(await request.json())
        props = await self._get("/props")
        found = next(found for found in await self._models() if found["id"] == model)
        meta = {f"kimigguf.{name}": value for name, value in (found.get("meta") or {}).items()}
        answer = {
            "modelfile": f"# served by kimigguf\nFROM {props.get('model_path', model)}\n",
            "parameters": "",
            "template": props.get("chat_template") or "",
            "details": (await self._described())[0]["details"],
            "model_info": meta,
            "capabilities": _CAPABILITIES,
        }
        return JSONResponse(answer)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        asked, model = await self._named(body)
        if not body.get("messages"):
            message = {"role": "assistant", "content": ""}
            return JSONResponse({"model": asked, "message": message, "done": True, "done_reason": "load"})
        return await self._answer(body, chat_request, Answer("chat", asked), model)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        asked, model = await self._named(body)
        if not body.get("prompt"):
            return JSONResponse({"model": asked, "response": "", "done": True, "done_reason": "load"})
        return await self._answer(body, generate_request, Answer("generate", asked), model)

    async def _answer(self, body: Json, translate: Callable[[Json, str], Json], answer: Answer, model: str) -> Response:
        try:
            wanted = translate(body, model)
        except (Untranslatable, KeyError, TypeError) as error:
            raise _Refused(400, str(error)) from error
        lines = self._lines(wanted, answer)
        try:
            first = await anext(lines)  # an error before the first line can still have a status of its own
        except httpx.HTTPError as error:
            raise _Refused(502, f"the engine does not answer: {error}") from error
        if body.get("stream", True):
            return StreamingResponse(_ndjson(first, lines), media_type="application/x-ndjson")
        found = [first] + [line async for line in lines]
        failed = next((line["error"] for line in found if "error" in line), None)
        if failed is not None:
            raise _Refused(500, failed)
        return JSONResponse(whole(found))

    async def _lines(self, wanted: Json, answer: Answer) -> AsyncIterator[Json]:
        async with self._client.stream("POST", "/v1/chat/completions", json=wanted) as reply:
            if reply.is_error:
                raise _Refused(reply.status_code, _message((await reply.aread()).decode("utf-8", "replace")))
            try:
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        yield {"error": _message(data)}
                        return
                    for made in answer.lines(chunk):
                        yield made
            except httpx.HTTPError as error:
                yield {"error": f"the engine's answer broke off: {error}"}
                return
        if not answer.finished:
            yield {"error": "the engine's answer broke off"}
            return
        for made in answer.last():
            yield made

    async def _embed(self, request: Request) -> Response:
        body = await request.json()
        asked, model = await self._named(body)
        try:
            reply = await self._client.post("/v1/embeddings", json={"model": model, "input": body.get("input") or ""})
        except httpx.HTTPError as error:
            raise _Refused(502, f"the engine does not answer: {error}") from error
        if reply.is_error:
            raise _Refused(reply.status_code, _message(reply.text))
        found = reply.json()
        embeddings = [item["embedding"] for item in sorted(found["data"], key=lambda item: item["index"])]
        tokens = (found.get("usage") or {}).get("prompt_tokens", 0)
        return JSONResponse({"model": asked, "embeddings": embeddings, "prompt_eval_count": tokens})


async def _ndjson(first: Json, rest: AsyncIterator[Json]) -> AsyncIterator[str]:
    yield json.dumps(first, ensure_ascii=False) + "\n"
    async for line in rest:
        yield json.dumps(line, ensure_ascii=False) + "\n"


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, _Refused) else 500
    return JSONResponse({"error": str(error)}, status_code=status)


def _full(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _message(text: str) -> str:
    """The sentence in an engine's error, or all of it."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


def main() -> None:
    """Serve until stopped; the engine's key, if it has one, is read from ``KIMIGGUF_API_KEY``."""
    import uvicorn  # noqa: PLC0415 -- the application can be had without a server of its own

    parser = argparse.ArgumentParser(prog="python -m kimigguf.ollama.bridge", description=__doc__)
    parser.add_argument("--upstream", required=True, help="the engine's address, such as http://127.0.0.1:8080")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=11434, help="port to listen on (default: Ollama's, 11434)")
    chosen = parser.parse_args()
    hosts = _LOOPBACK if chosen.host in _LOOPBACK else ("*",)  # whoever opens it to a network names it as they like
    app = Bridge(chosen.upstream, os.environ.get(KEY_VARIABLE)).app(hosts)
    uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
