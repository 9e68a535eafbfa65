"""An OpenAI-compatible server: its address as people type it, its models and limits, and its failures in words."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kimigguf.engines.command import is_loopback
from kimigguf.engines.printable import printable
from kimigguf.engines.tls import trusting
from kimigguf.errors import KimiggufError, NetworkError, ServerError, UsageError

if TYPE_CHECKING:
    from openai import OpenAI

_CONNECT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 5.0
_SAID_CHARACTERS: Final = 300
"""What is longer is a page or a dump, and no reason."""


def base_url(
    url: str,
    *,
    hint: str = "kimigguf chat --url http://127.0.0.1:8080",
    key_hint: str = "give the bare address, and the file that holds the key with --api-key-file",
) -> str:
    """The API's base address for what a user typed: with a scheme, ending in /v1 or the path that was given.

    ``:8080`` is this machine. ``hint`` shows what would be an address, ``key_hint`` where a key belongs.

    Raises:
        UsageError: ``bad-url``, also for a bare word: it names no port, and is no domain that anybody could mean; and
            for an address with a key in it, for addresses end up in logs.
    """
    text = url if "://" in url else f"http://{'127.0.0.1' if url.startswith(':') else ''}{url}"
    shown = url.rpartition("@")[2]  # what stands before it is a name and a password
    problem = UsageError(f"{shown!r} is no address of a server", code="bad-url", hint=hint)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no number, a bracket that is left open
        problem.cause = str(error)
        raise problem from error
    sound = parts.scheme in {"http", "https"} and re.fullmatch(r"[\w.:%-]+", host)
    if not sound or not ("://" in url or port is not None or host == "localhost" or "." in host or ":" in host):
        raise problem
    if "@" in parts.netloc or parts.query:
        raise UsageError("the address of the server carries a key or a query", code="bad-url", hint=key_hint)
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def sent_in_the_clear(url: str, key: str | None) -> str | None:
    """What to tell whoever sends a key over a network without TLS; None where there is no key, or no network."""
    parts = urlsplit(base_url(url))
    if not key or parts.scheme != "http" or is_loopback(parts.hostname or ""):
        return None
    return (
        f"warning: the key goes to {parts.netloc} unencrypted, and so do questions and answers: use https, or a tunnel"
    )


def connect(url: str, *, api_key: str | None = None, certificate: str | None = None) -> "OpenAI":
    """A client for the server at ``url``. It never retries: a server of one slot must not be asked twice at once.

    ``certificate`` is the file of the server's own, which is then trusted and no other.
    """
    import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

    base = base_url(url)
    # A proxy from the environment cannot reach this machine's loopback.
    from_environment = not is_loopback(urlsplit(base).hostname or "")
    trust = True if certificate is None else trusting(certificate)
    transport = openai.DefaultHttpxClient(trust_env=from_environment, verify=trust)
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
        cause = printable(str(error.__cause__ or error))
        raise NetworkError(
            f"there is no server at {url}", code="server-unreachable", cause=cause, hint=_start_hint(url)
        ) from error
    except openai.APIStatusError as error:
        wait = error.response.headers.get("retry-after")
        raise refusal(url, error.status_code, error.body, retry_after=wait) from error
    except openai.APIError as error:
        raise broke_off(url, printable(error.message)) from error


@contextmanager
def mapped_within(url: str) -> Iterator[None]:
    """Like ``mapped``, for an answer that has begun: whatever fails now, the server was there."""
    import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        yield
    except openai.APIConnectionError as error:  # a time-out is one
        raise broke_off(url, printable(str(error.__cause__ or error))) from error
    except openai.APIError as error:
        raise broke_off(url, printable(error.message)) from error
    except json.JSONDecodeError as error:  # the client lets it through
        raise broke_off(url, f"what it sent is no JSON: {error}") from error


def broke_off(url: str, cause: str) -> ServerError:
    """An answer that ended before it was done."""
    here = is_loopback(urlsplit(url).hostname or "")
    return ServerError(
        f"the answer from {url} broke off",
        code="answer-broke-off",
        cause=cause,
        hint="kimigguf doctor" if here else "ask again; if it happens again, the server's log says why",
    )


def _start_hint(url: str) -> str:
    """A command that helps: here a server can be started, elsewhere only be looked for."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return f"kimigguf recommend says what fits here; then kimigguf serve QUANT --port {parts.port or 8080}"
    return _look_hint(url)


def _look_hint(url: str) -> str:
    return shlex.join(["curl", f"{url.rstrip('/')}/models"])


def in_words(body: object) -> str | None:
    """What the server said of a failure, from its error; None where it said nothing that a person could read."""
    if isinstance(body, dict):
        found = next((body[key] for key in ("message", "detail", "error") if isinstance(body.get(key), str)), None)
        return printable(found.strip()) or None if found else None
    # A page for a browser explains nothing here.
    if not isinstance(body, str) or "<" in body or len(body) > _SAID_CHARACTERS:
        return None
    return printable(body.strip()) or None


def _phrase(status: int) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return "nothing answers at this address there: it is no OpenAI-compatible API, or that lies under another path"
    try:
        return f"it gives no reason; this number means: {HTTPStatus(status).phrase}"
    except ValueError:
        return "it gives no reason, and this number means nothing in HTTP"


def refusal(url: str, status: int, error: object, *, retry_after: str | None = None) -> KimiggufError:
    """What an answer of ``status`` means; ``error`` is what its JSON holds under that name, else all of it."""
    body = error if isinstance(error, dict) else {}
    said = in_words(error)
    text = said or _phrase(status)
    match status:
        case 401 | 403:
            return NetworkError(
                f"{url} wants an API key" if status == 401 else f"{url} refuses this API key",  # noqa: PLR2004 -- HTTP
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
        case 429:
            return NetworkError(
                f"{url} takes no more requests for now",
                code="rate-limited",
                cause=text,
                hint=f"ask again in {retry_after} seconds"
                if retry_after and retry_after.isdecimal()
                else "ask again in a while",
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
            if code >= HTTPStatus.INTERNAL_SERVER_ERROR and is_loopback(urlsplit(url).hostname or ""):
                hint = "kimigguf doctor"
            return NetworkError(f"{url} answered with HTTP {code}", code="http-error", cause=text, hint=hint)


def listed_models(client: "OpenAI") -> tuple[Mapping[str, Any], ...]:
    """What the server lists of its models, each with an ``id``.

    Raises:
        NetworkError, ServerError: See ``mapped``; ``http-error`` also from a server that has no list, ``no-api`` from
            one that answers with something else, such as a page for a browser.
    """
    url = str(client.base_url)
    with mapped(url):
        # As text: the client itself trips over an answer that is not JSON.
        text = client.models.with_raw_response.list().text
    try:
        return tuple(model | {"id": printable(str(model["id"]))} for model in json.loads(text)["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"{url} answers, but not as an OpenAI-compatible API",
            code="no-api",
            cause="its list of models is none",
            hint=_look_hint(url),
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server tells about one conversation: the tokens that fit, and whether it is a llama-server.

    A llama-server tells how far it has come with a prompt, if it is asked; others may refuse such a request. It tells
    its ``build`` and the name of its model's file too.
    """

    context_tokens: int | None = None
    is_llama_server: bool = False
    build: str | None = None
    model_file: str | None = None


def limits(client: "OpenAI", listed: Mapping[str, Any]) -> Limits:
    """The limits of a model, from its entry in the list, else from llama-server's own ``/props``; never an error."""
    import httpx2  # noqa: PLC0415 -- kept out of `kimigguf --help`
    import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

    for key in ("max_model_len", "context_length"):  # vLLM's and OpenRouter's
        if isinstance(listed.get(key), int):
            return Limits(context_tokens=listed[key])
    root = str(client.base_url).rstrip("/").removesuffix("/v1")
    try:
        answer = client.get(f"{root}/props", cast_to=httpx2.Response, options={"timeout": _LOOK_SECONDS})
        props = json.loads(answer.text)
        tokens = props["default_generation_settings"]["n_ctx"]
    except (openai.OpenAIError, ValueError, KeyError, TypeError):
        return Limits()
    path = props.get("model_path")
    file = path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""
    return Limits(
        context_tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,
        is_llama_server=True,
        build=build_in(props),
        model_file=printable(file) or None,
    )


def build_in(props: Mapping[str, Any]) -> str | None:
    """Which build of llama.cpp answers, from its ``/props``: ``b7-abc``; None where it does not know that itself.

    A copy that was built without its repository, such as the embedded engine's, calls itself ``b0-unknown``.
    """
    build = props.get("build_info")
    return (printable(build) or None) if isinstance(build, str) and build != "b0-unknown" else None


def first_model(client: "OpenAI") -> Mapping[str, Any]:
    """The first entry of the list of models.

    Raises:
        NetworkError, ServerError: See ``listed_models``; ``no-model`` if it is empty.
    """
    listed = listed_models(client)
    if not listed:
        raise NetworkError(f"{client.base_url} offers no model", code="no-model", hint="name one with --model")
    return listed[0]
