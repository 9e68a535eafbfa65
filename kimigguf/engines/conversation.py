"""A conversation with an OpenAI-compatible server that gives back everything the assistant said.

Kimi K3 expects its own reasoning and tool calls in the history (preserved thinking): a client that drops
``reasoning_content`` makes later turns worse without any error.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kimigguf.engines.command import is_loopback
from kimigguf.errors import KimiggufError, NetworkError, ServerError, UsageError

if TYPE_CHECKING:
    from openai import OpenAI

_CONNECT_SECONDS: Final = 10.0
_SAID_CHARACTERS: Final = 300
"""What is longer is a page or a dump, and no reason."""


class Kind(StrEnum):
    """What a piece of a streamed answer is."""

    THINKING = "thinking"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of an answer as it arrives."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer. ``message`` is what goes back to the server in later turns, reasoning and tool calls included.

    ``usage`` and ``timings`` are the server's own, None where it sends none; rates are tokens per second.
    """

    message: Mapping[str, Any]
    finish_reason: str | None
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None

    @property
    def answer(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def thinking(self) -> str:
        return str(self.message.get("reasoning_content") or "")

    @property
    def used_up_by_thinking(self) -> bool:
        """Whether the token limit was reached before the answer began: no fault of the server."""
        return self.finish_reason == "length" and not self.answer and bool(self.thinking)


def base_url(url: str) -> str:
    """The API's base address for what a user typed: with a scheme, ending in /v1; ``:8080`` is this machine.

    Raises:
        UsageError: ``bad-url``, also for a bare word: it names no port, and is no domain that anybody could mean.
    """
    text = url if "://" in url else f"http://{'127.0.0.1' if url.startswith(':') else ''}{url}"
    problem = UsageError(
        f"{url!r} is no address of a server", code="bad-url", hint="kimigguf chat --url http://127.0.0.1:8080"
    )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no number, a bracket that is left open
        problem.cause = str(error)
        raise problem from error
    sound = parts.scheme in {"http", "https"} and re.fullmatch(r"[\w.:%-]+", host)
    if not sound or not ("://" in url or port is not None or host == "localhost" or "." in host or ":" in host):
        raise problem
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def connect(url: str, *, api_key: str | None = None) -> "OpenAI":
    """A client for the server at ``url``. It never retries: a server of one slot must not be asked twice at once."""
    import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

    base = base_url(url)
    # A proxy from the environment cannot reach this machine's loopback.
    transport = openai.DefaultHttpxClient(trust_env=not is_loopback(urlsplit(base).hostname or ""))
    return openai.OpenAI(
        base_url=base,
        api_key=api_key or "none",
        max_retries=0,
        timeout=openai.Timeout(None, connect=_CONNECT_SECONDS),
        http_client=transport,
    )


@contextmanager
def mapped(url: str) -> Iterator[None]:
    """Turn the client's exceptions into this program's."""
    import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        yield
    except openai.APITimeoutError as error:
        raise NetworkError(f"{url} does not answer", code="server-unreachable", hint=_start_hint(url)) from error
    except openai.APIConnectionError as error:
        cause = str(error.__cause__ or error)
        raise NetworkError(
            f"there is no server at {url}", code="server-unreachable", cause=cause, hint=_start_hint(url)
        ) from error
    except openai.APIStatusError as error:
        raise _of_status(error, url) from error
    except openai.APIError as error:
        raise ServerError(
            f"the answer from {url} broke off",
            code="answer-broke-off",
            cause=str(error),
            hint="the server's log says why; kimigguf serve names it",
        ) from error


def _start_hint(url: str) -> str:
    """A command that helps: here a server can be started, elsewhere only be looked for."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return f"kimigguf serve UD-IQ1_M --port {parts.port or 8080}"
    return _look_hint(url)


def _look_hint(url: str) -> str:
    return shlex.join(["curl", f"{url.rstrip('/')}/models"])


def _in_words(error: Any) -> str | None:  # noqa: ANN401 -- openai's type, imported only when it is raised
    """What the server said of a failure; None where it said nothing that a person could read."""
    body = error.body
    if isinstance(body, dict):
        found = next((body[key] for key in ("message", "detail", "error") if isinstance(body.get(key), str)), None)
        return found.strip() or None if found else None
    # A page for a browser explains nothing here.
    return body.strip() or None if isinstance(body, str) and "<" not in body and len(body) <= _SAID_CHARACTERS else None


def _phrase(status: int) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return "nothing answers at this address there: it is no OpenAI-compatible API, or that lies under another path"
    try:
        return f"it gives no reason; this number means: {HTTPStatus(status).phrase}"
    except ValueError:
        return "it gives no reason, and this number means nothing in HTTP"


def _of_status(error: Any, url: str) -> KimiggufError:  # noqa: ANN401 -- openai's type, imported only when it is raised
    body = error.body if isinstance(error.body, dict) else {}
    said = _in_words(error)
    text = said or _phrase(error.status_code)
    match error.status_code:
        case 401 | 403:
            return NetworkError(
                f"{url} wants an API key" if error.status_code == 401 else f"{url} refuses this API key",  # noqa: PLR2004 -- HTTP
                code="bad-key",
                cause=text,
                hint="name the file that holds it with --api-key-file",
            )
        case 400 if body.get("type") == "exceed_context_size_error":
            used, room = body.get("n_prompt_tokens"), body.get("n_ctx")
            return UsageError(
                f"the conversation has {used} tokens, and the server's slot holds {room}",
                code="context-full",
                cause=text,
                hint="start a new one with /new, or serve with a larger --context",
            )
        case 503:
            return ServerError(
                f"the server at {url} is still loading its model",
                code="still-loading",
                cause=text,
                hint="try again when kimigguf serve says that it is ready",
            )
        case code:
            hint = _look_hint(url) if code == HTTPStatus.NOT_FOUND and said is None else None
            return NetworkError(f"{url} answered with HTTP {code}", code="http-error", cause=text, hint=hint)


class Conversation:
    """The messages so far, and the next turn."""

    def __init__(
        self,
        client: "OpenAI",
        model: str,
        *,
        system: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._system = system
        self.extra_body = dict(extra_body or {})
        self.messages: list[dict[str, Any]] = []
        self.clear()

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    def clear(self) -> None:
        """Begin anew."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def undo(self) -> str | None:
        """Take the last question and its answer back; returns the question, None if there is none."""
        while self.messages and self.messages[-1]["role"] != "user":
            if self.messages[-1]["role"] == "system":
                return None
            self.messages.pop()
        return str(self.messages.pop()["content"]) if self.messages else None

    def ask(self, text: str, watch: Callable[[Piece], None]) -> Reply:
        """Say ``text``, hand on the answer as it arrives, and keep both. An answer that fails leaves no trace.

        Raises:
            NetworkError, ServerError, UsageError: See ``mapped``.
        """
        import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

        question = {"role": "user", "content": text}
        # Untyped: reasoning_content is no field of the client's own message types.
        messages: Any = [*self.messages, question]
        with mapped(self.url):
            stream = self._client.chat.completions.create(
                model=self._model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self.extra_body,
                max_tokens=self._max_tokens if self._max_tokens is not None else openai.omit,
            )
            gathered = _Gathered()
            with stream:
                for chunk in stream:
                    gathered.add(chunk.model_dump(exclude_none=True), watch)
        reply = gathered.reply()
        self.messages += [question, dict(reply.message)]
        return reply


class _Gathered:
    """Puts the chunks of a stream together into one message."""

    def __init__(self) -> None:
        self._thinking: list[str] = []
        self._answer: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._timings: Mapping[str, Any] | None = None

    def add(self, chunk: Mapping[str, Any], watch: Callable[[Piece], None]) -> None:
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        for choice in chunk.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            if text := delta.get("reasoning_content"):
                self._thinking.append(text)
                watch(Piece(kind=Kind.THINKING, text=text))
            if text := delta.get("content"):
                self._answer.append(text)
                watch(Piece(kind=Kind.ANSWER, text=text))
            for part in delta.get("tool_calls") or ():
                self._add_call(part)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(int(part.get("index", 0)), empty)
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def reply(self) -> Reply:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._answer)}
        if self._thinking:
            message["reasoning_content"] = "".join(self._thinking)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return Reply(message=message, finish_reason=self._finish, usage=self._usage, timings=self._timings)


def model_names(client: "OpenAI") -> tuple[str, ...]:
    """The names of the models that the server lists.

    Raises:
        NetworkError, ServerError: See ``mapped``; ``http-error`` also from a server that has no list, ``no-api`` from
            one that answers with something else, such as a page for a browser.
    """
    url = str(client.base_url)
    with mapped(url):
        # As text: the client itself trips over an answer that is not JSON.
        text = client.models.with_raw_response.list().text
    try:
        return tuple(str(model["id"]) for model in json.loads(text)["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{url} answers, but not as an OpenAI-compatible API",
            code="no-api",
            cause="its list of models is none",
            hint=_look_hint(url),
        ) from error


def first_model(client: "OpenAI") -> str:
    """The name of the first model that the server offers.

    Raises:
        NetworkError, ServerError: See ``mapped``; ``no-model`` if it offers none.
    """
    names = model_names(client)
    if not names:
        raise NetworkError(f"{client.base_url} offers no model", code="no-model", hint="name one with --model")
    return names[0]
