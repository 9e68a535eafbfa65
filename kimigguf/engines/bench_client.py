"""Asks a server one thing at a time and looks at the clock: llama-server's own endpoints, or OpenAI's for another.

No request is ever repeated: a server of one slot must not be asked twice at once.
"""

import json
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from kimigguf.engines.command import is_loopback
from kimigguf.engines.endpoint import base_url, broke_off, in_words, refusal
from kimigguf.engines.printable import printable
from kimigguf.engines.turn import Turn, end, take
from kimigguf.errors import KimiggufError, NetworkError, UsageError

_CONNECT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 30.0
"""Of a question about the server itself: it answers between two batches, and those of a large model take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A streamed answer as it came; ``tokens`` are those that were generated, where the server names them."""

    turn: Turn
    tokens: tuple[int, ...]


class BenchClient:
    """A connection to the server at ``url``; ``tls`` is whom it trusts.

    Paths are llama-server's own; those below /v1 lie wherever ``url`` says that the OpenAI-compatible API does.

    Raises:
        UsageError: ``bad-url``.
    """

    def __init__(self, url: str, key: str | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self._api = base_url(url)
        self.root = self._api.removesuffix("/v1")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            # llama-server closes a connection that was idle for 5 s, sometimes just as the next request is sent.
            limits=httpx.Limits(max_keepalive_connections=0),
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=not is_loopback(urlsplit(self.root).hostname or ""),
            verify=True if tls is None else tls,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._client.close()

    def address(self, path: str) -> str:
        """The full address of ``path``."""
        return self._api + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path

    def page(self, path: str) -> str | None:
        """The text behind ``path``; None where the server has no such page.

        Raises:
            NetworkError: ``server-unreachable``, ``bad-key``.
            ServerError: ``still-loading``.
        """
        with self._mapped():
            response = self._client.get(self.address(path), timeout=_LOOK_SECONDS)
            if response.status_code in {401, 403, 503}:
                raise self._refused(response)
            return response.text if response.is_success else None

    def look(self, path: str) -> Any:  # noqa: ANN401 -- parsed JSON
        """The JSON behind ``path``; None where the server has none. Raises as ``page`` does."""
        return _json(self.page(path))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- parsed JSON
        """The JSON of the answer; None where the server does not know ``path``. Raises as ``page`` does."""
        with self._mapped():
            response = self._client.post(self.address(path), json=body, timeout=_LOOK_SECONDS)
            if response.status_code in {401, 403, 503}:
                raise self._refused(response)
            return _json(response.text) if response.is_success else None

    def stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request and read its answer to the end.

        Raises:
            UsageError: ``depth-beyond-context`` where the server says so.
            NetworkError: ``server-unreachable``, ``bad-key``, ``http-error`` with what the server said.
            ServerError: ``still-loading``, ``answer-broke-off``.
        """
        turn, tokens = Turn(), list[int]()
        with self._mapped():
            began = time.perf_counter()
            with self._client.stream("POST", self.address(path), json={**body, "stream": True}) as response:
                if not response.is_success:
                    response.read()
                    raise self._refused(response)
                for piece in _events(response.iter_bytes()):
                    if piece.get("error"):
                        raise broke_off(self.root, in_words(piece["error"]) or "it sent an error without words")
                    turn, _ = take(turn, _as_chat(piece), seconds=time.perf_counter() - began)
                    tokens += _tokens(piece)
        if not turn.is_complete:
            raise broke_off(self.root, "the connection was closed before the end of the answer")
        return Answer(turn=end(turn)[0], tokens=tuple(tokens))

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise NetworkError(
                f"there is no server at {self.root}",
                code="server-unreachable",
                cause=str(error),
                hint="kimigguf status shows the servers of this machine",
            ) from error
        except httpx.TimeoutException as error:
            raise NetworkError(f"{self.root} does not answer", code="server-unreachable", cause=str(error)) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise broke_off(self.root, printable(str(error)) or type(error).__name__) from error

    def _refused(self, response: httpx.Response) -> KimiggufError:
        body = _json(response.text)
        error = body.get("error", body) if isinstance(body, dict) else response.text
        said = in_words(error) or ""
        if response.status_code == HTTPStatus.BAD_REQUEST and "context" in said.lower():
            hint = "ask for a smaller one with --depths"
            return UsageError(f"{self.root} refuses this depth", code="depth-beyond-context", cause=said, hint=hint)
        wait = response.headers.get("retry-after")
        return refusal(self._api, response.status_code, error, retry_after=wait)


def _events(pieces: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    """The JSON of each event in a stream; what is none is passed over.

    Lines end at a line feed alone: httpx ends them at U+2028 and its like as well, which stand in JSON as they are.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            event = _json(line.removeprefix(b"data:")) if line.startswith(b"data:") else None
            if isinstance(event, dict):
                yield event


def _as_chat(piece: Mapping[str, Any]) -> Mapping[str, Any]:
    """A piece of llama-server's own endpoint as one of OpenAI's, which are left as they are."""
    if "choices" in piece:
        return piece
    choice = {"delta": {"content": piece.get("content")}, "finish_reason": "stop" if piece.get("stop") else None}
    return {**piece, "choices": [choice]}


def _tokens(piece: Mapping[str, Any]) -> list[int]:
    found = piece.get("tokens")
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []


def _json(text: str | bytes | None) -> Any:  # noqa: ANN401 -- parsed JSON
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None
