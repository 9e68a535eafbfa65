"""Ollama's API in front of a running llama-server: its clients talk to K3, and nothing is copied or registered.

``python -m kimigguf.ollama.bridge --upstream http://127.0.0.1:8080 --port 11434`` serves until it is stopped. Only
translation: the engine schedules, and models cannot be pulled, made or removed here.
"""

import argparse
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kimigguf.engines.doctor import missing_marker
from kimigguf.engines.printable import printable
from kimigguf.ollama.answers import Answer, EngineError, message_of
from kimigguf.ollama.callers import LOOPBACK, Gone, checks, drained, while_there, written
from kimigguf.ollama.listing import full_name, listed, running, shown
from kimigguf.ollama.translate import (
    Json,
    Untranslatable,
    Wanted,
    chat_request,
    embed_request,
    embeddings,
    format_request,
    format_template,
    generate_request,
)
from kimigguf.ollama.upstream import EngineLost, Events, Upstream

if TYPE_CHECKING:
    import ssl

VERSION: Final = "0.35.0"
"""The Ollama whose API this follows; clients ask for it to know what they may use."""
KEY_VARIABLE: Final = "KIMIGGUF_API_KEY"
UNHEEDED_HEADER: Final = "X-Kimigguf-Unheeded"
_NOT_HERE: Final[Mapping[str, str]] = {
    "pull": "kimigguf download QUANT fetches a model",
    "push": "nothing is published from here",
    "create": "kimigguf serve QUANT --alias NAME gives it another name",
    "copy": "kimigguf serve QUANT --alias NAME gives it another name",
    "delete": "kimigguf stop ends it, kimigguf remove QUANT frees the disk",
    "blobs/{digest}": "kimigguf download QUANT fetches a model",
}
"""Calls that manage models, and how that is done instead."""
_NO_EMBEDDINGS: Final = (
    "this engine was started without embeddings: kimigguf serve QUANT --engine llama-server --ollama-api"
    " -- --embeddings --pooling last"
)
_CHAT_PATH: Final = "/v1/chat/completions"
_KNOWN_SECONDS: Final = 5.0
_PHRASE_CHARACTERS: Final = 120
_MOST_TOLD: Final = 50
"""More than this are no settings that somebody may miss, but noise."""
_BAD_REQUEST, _CLIENT_GONE, _NOT_SUPPORTED, _ERROR = 400, 499, 501, 400


class _Refused(Exception):  # noqa: N818 -- an HTTP answer
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Bridge:
    """The translation in front of one engine.

    ``key`` is sent to the engine, where it asks for one; ``tls`` is what an https engine is checked by. ``tell`` hears,
    once each, what requests ask for and do not get.
    """

    def __init__(
        self,
        upstream: str,
        key: str | None = None,
        *,
        tls: "ssl.SSLContext | None" = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._engine = Upstream(upstream, key, tls)
        self._tell = tell
        self._told: set[str] = set()
        self._known: tuple[float, list[Json]] = (-math.inf, [])

    def app(self, hosts: Sequence[str] = LOOPBACK) -> Starlette:
        """The ASGI application; ``hosts`` are the names it may be called by (a foreign name is a rebound one)."""
        answers: list[tuple[str, str, Callable[[Request], Any]]] = [
            ("/", "GET", self._root),
            ("/api/version", "GET", self._version),
            ("/api/tags", "GET", self._tags),
            ("/api/ps", "GET", self._ps),
            ("/api/show", "POST", self._show),
            ("/api/chat", "POST", self._chat),
            ("/api/generate", "POST", self._generate),
            ("/api/embed", "POST", self._embed),
            ("/api/embeddings", "POST", self._old_embeddings),
        ]
        routes = [Route(path, answer, methods=[method]) for path, method, answer in answers]
        routes += [
            Route(f"/api/{path}", _not_here(why), methods=["POST", "DELETE", "HEAD"]) for path, why in _NOT_HERE.items()
        ]
        routes.append(Route("/api/{rest:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]))
        handlers = {_Refused: _refused, Gone: _gone}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=checks(hosts))

    async def _root(self, _request: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _asked(self, path: str, body: Json | None = None) -> Any:  # noqa: ANN401 -- parsed JSON
        """The engine's JSON reply, or its refusal with its status."""
        try:
            async with self._engine.ask(path, None if body is None else json.dumps(body).encode()) as reply:
                data = await reply.read_all()
        except EngineLost as error:
            raise _Refused(502, f"the engine does not answer: {error}") from error
        found = _json(data)
        if reply.status >= _ERROR:
            raise _Refused(reply.status, message_of(found))
        return found

    async def _models(self, *, fresh: bool = False) -> list[Json]:
        """What the engine serves. Kept for seconds: asking costs as much time as several tokens of a small model."""
        if fresh or time.monotonic() - self._known[0] > _KNOWN_SECONDS:
            self._known = (time.monotonic(), (await self._asked("/v1/models"))["data"])
        return self._known[1]

    async def _tags(self, _request: Request) -> Response:
        return JSONResponse({"models": [listed(model) for model in await self._models(fresh=True)]})

    async def _ps(self, _request: Request) -> Response:
        props = await self._asked("/props")
        return JSONResponse({"models": [running(model, props) for model in await self._models(fresh=True)]})

    async def _named(self, body: Json) -> tuple[str, Json]:
        """The name that was asked for, and the model that bears it."""
        asked = str(body.get("model") or body.get("name") or "")
        for fresh in (False, True):
            for model in await self._models(fresh=fresh):
                if full_name(asked) == full_name(model["id"]):
                    return asked, model
        there = ", ".join(full_name(model["id"]) for model in self._known[1])
        raise _Refused(404, f"model '{asked}' not found; this engine serves {there}")

    async def _show(self, request: Request) -> Response:
        _, model = await self._named(await _body(request))
        return JSONResponse(shown(model, await self._asked("/props"), embeds=await self._embeds()))

    async def _embeds(self) -> bool:
        """Whether the engine makes embeddings: it then finds fault with an empty list, and not with the question."""
        try:
            await self._asked("/v1/embeddings", {"input": []})
        except _Refused as refused:
            return refused.status == _BAD_REQUEST and "ooling" not in refused.text
        return True

    async def _chat(self, request: Request) -> Response:
        body = await _body(request)
        asked, model = await self._named(body)
        answer = Answer("chat", asked)
        if not body.get("messages"):
            return JSONResponse(_loaded(body, answer))
        return await self._answer(request, body, chat_request, answer, model)

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        asked, model = await self._named(body)
        answer = Answer("generate", asked)
        if not body.get("prompt"):
            return JSONResponse(_loaded(body, answer))
        return await self._answer(request, body, generate_request, answer, model)

    async def _answer(
        self, request: Request, body: Json, translate: "_Translate", answer: Answer, model: Json
    ) -> Response:
        try:
            wanted = translate(body, model["id"], (model.get("meta") or {}).get("n_ctx"))
        except (Untranslatable, KeyError, TypeError, AttributeError) as error:
            raise _Refused(_BAD_REQUEST, str(error)) from error
        if body.get("format") and wanted.path == _CHAT_PATH and await self._forgets_formats():
            wanted = await self._held_to_format(body, wanted)
        headers = self._unheeded(wanted)
        lines = self._lines(wanted, answer)
        try:
            if body.get("stream") is not False:  # null is as good as nothing
                # What goes wrong before the first line still has a status of its own.
                first = await while_there(request, anext(lines))
                return StreamingResponse(written(first, lines), headers=headers, media_type="application/x-ndjson")
            await while_there(request, drained(lines))
        except EngineError as error:
            raise _Refused(500, str(error)) from error
        return JSONResponse(answer.whole(), headers=headers)

    async def _forgets_formats(self) -> bool:
        """Whether the engine parses K3's own chat format, whose parser (build 11434) takes a format and drops it."""
        try:
            template = str((await self._asked("/props")).get("chat_template"))
        except _Refused:
            return False  # no llama-server
        return missing_marker(template) is None

    async def _held_to_format(self, body: Json, wanted: Wanted) -> Wanted:
        if body.get("tools"):
            return replace(wanted, unheeded=(*wanted.unheeded, "format: this engine does not keep to one beside tools"))
        found = await self._asked("/apply-template", format_template(wanted))
        return format_request(body, wanted, found["prompt"])

    async def _lines(self, wanted: Wanted, answer: Answer) -> AsyncGenerator[str, None]:
        """Ollama's lines, as many at a time as the engine's events had come in one piece.

        Raises:
            _Refused: The engine refused, or did not answer.
            EngineError: It failed after it had begun.
        """
        events = Events()
        begun = False
        try:
            async with self._engine.ask(wanted.path, json.dumps(wanted.body).encode()) as reply:
                if reply.status >= _ERROR:
                    raise _Refused(reply.status, message_of(_json(await reply.read_all())))
                begun = True
                while data := await reply.read():
                    if made := "".join([answer.add(payload) for payload in events.cut(data)]):
                        yield made
                        await reply.gather()
        except EngineLost as error:
            if not begun:
                raise _Refused(502, f"the engine does not answer: {error}") from error
            raise EngineError(f"the engine's answer broke off: {error}") from error
        if not answer.finished:
            raise EngineError("the engine's answer broke off")
        yield answer.end()

    def _unheeded(self, wanted: Wanted) -> dict[str, str]:
        """A header that names what a request asks for and does not get; each is also told once."""
        # Names of fields are a client's own words: they go to a terminal, and into a header.
        unheeded = [printable(phrase).replace("\n", " ")[:_PHRASE_CHARACTERS] for phrase in wanted.unheeded]
        for phrase in unheeded:
            field = phrase.partition(":")[0]
            if field not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(field)
                self._tell(f"a client of --ollama-api sent {phrase}")
        if not unheeded:
            return {}
        return {UNHEEDED_HEADER: "; ".join(unheeded[:_MOST_TOLD]).encode("ascii", "replace").decode()}

    async def _embed(self, request: Request) -> Response:
        body = await _body(request)
        asked, model = await self._named(body)
        started = time.monotonic_ns()
        found, headers = await self._embedded(embed_request(body, model["id"]))
        answer = {
            "model": asked,
            "embeddings": embeddings(found, body.get("dimensions")),
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": (found.get("usage") or {}).get("prompt_tokens", 0),
        }
        return JSONResponse(answer, headers=headers)

    async def _old_embeddings(self, request: Request) -> Response:
        body = await _body(request)
        _, model = await self._named(body)
        found, headers = await self._embedded(embed_request(body, model["id"], normalized=False))
        return JSONResponse({"embedding": next(iter(embeddings(found)), [])}, headers=headers)

    async def _embedded(self, wanted: Wanted) -> tuple[Json, dict[str, str]]:
        headers = self._unheeded(wanted)
        if not any(wanted.body["input"]):
            return {"data": []}, headers  # as Ollama answers nothing
        try:
            return await self._asked(wanted.path, wanted.body), headers
        except _Refused as refused:
            # The engine names its own flags; a user of kimigguf needs kimigguf's words for them.
            if refused.status == _NOT_SUPPORTED or "ooling" in refused.text:
                raise _Refused(_NOT_SUPPORTED, _NO_EMBEDDINGS) from refused
            if "too large to process" in refused.text:
                raise _Refused(_BAD_REQUEST, f"{refused.text}; --pooling last has no such limit") from refused
            raise


_Translate = Callable[[Mapping[str, Any], str, int | None], Wanted]


def _not_here(instead: str) -> Callable[[Request], Any]:
    async def refuse(_request: Request) -> Response:
        raise _Refused(_NOT_SUPPORTED, f"kimigguf's bridge to a running engine does not manage models: {instead}")

    return refuse


async def _unknown(request: Request) -> Response:
    raise _Refused(404, f"{request.url.path} is not among the calls of Ollama's that kimigguf's bridge answers")


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, _Refused) else 500
    return JSONResponse({"error": str(error)}, status_code=status)


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _body(request: Request) -> Json:
    try:
        body = await request.json()
    except ValueError as error:
        raise _Refused(_BAD_REQUEST, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(_BAD_REQUEST, "the request is not a JSON object")
    return body


def _json(data: bytes) -> Any:  # noqa: ANN401 -- parsed JSON
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")[:500]


def _loaded(body: Json, answer: Answer) -> Json:
    """The answer to a question without words, by which clients load a model, or unload it."""
    if str(body.get("keep_alive")).removesuffix("s") in {"0", "0.0"}:
        raise _Refused(_NOT_SUPPORTED, "the engine is not unloaded from here: kimigguf stop ends it")
    return {**answer.whole(), "done_reason": "load"}


def main() -> None:
    """Serve until stopped; the engine's key, if it has one, is read from ``KIMIGGUF_API_KEY``."""
    import uvicorn  # noqa: PLC0415 -- the application can be had without a server of its own

    parser = argparse.ArgumentParser(prog="python -m kimigguf.ollama.bridge", description=__doc__)
    parser.add_argument("--upstream", required=True, help="the engine's address, such as http://127.0.0.1:8080")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=11434, help="port to listen on (default: Ollama's, 11434)")
    chosen = parser.parse_args()
    hosts = LOOPBACK if chosen.host in LOOPBACK else ("*",)  # whoever opens it to a network names it as they like
    bridge = Bridge(chosen.upstream, os.environ.get(KEY_VARIABLE), tell=lambda text: click.echo(text, err=True))
    uvicorn.run(bridge.app(hosts), host=chosen.host, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
