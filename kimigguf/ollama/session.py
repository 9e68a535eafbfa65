"""One conversation with an Ollama server: the client opened as it should be, its failures in our words."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
from ollama import Client, ResponseError

from kimigguf.errors import KimiggufError, MachineError, NetworkError, ServerError
from kimigguf.ollama.server import OllamaServer

_ANSWER_SECONDS: Final = 30.0
_LOAD_SIGNS: Final = (
    "model architecture",
    "llama-server",
    "llama runner",
    "out of memory",
    "system memory",
    "load model",
)
"""Words in Ollama's errors that mean: its engine could not load the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """``client`` speaks JSON; ``blobs`` does what it has no call for: ask for a blob, send one with progress."""

    server: OllamaServer
    client: Client
    blobs: httpx.Client

    def names(self) -> frozenset[str]:
        """The names of all models that the server has."""
        with mapped(self.server):
            return frozenset(model.model for model in self.client.list().models if model.model)

    def has_blob(self, digest: str) -> bool | None:
        """Whether the server has a blob; None when it does not say."""
        try:
            status = self.blobs.head(f"/api/blobs/{digest}").status_code
        except httpx.HTTPError:
            return None
        return {200: True, 404: False}.get(status)


@contextlib.contextmanager
def open_session(server: OllamaServer, *, load_minutes: int = 5) -> Iterator[Session]:
    """Connect to a server. ``load_minutes`` bounds the silence before an answer begins: a model may be loading."""
    patient: Any = httpx.Timeout(_ANSWER_SECONDS, read=load_minutes * 60 + _ANSWER_SECONDS)
    trust: dict[str, Any] = {"trust_env": not server.local}  # a proxy is for the world outside
    with (
        Client(host=server.url, timeout=patient, **trust) as client,
        httpx.Client(base_url=server.url, timeout=httpx.Timeout(_ANSWER_SECONDS, read=None), **trust) as blobs,
    ):
        yield Session(server=server, client=client, blobs=blobs)


@contextlib.contextmanager
def mapped(server: OllamaServer) -> Iterator[None]:
    """Turn the client's failures into ours.

    Raises:
        NetworkError: ``ollama-connection-lost``.
        MachineError: ``ollama-no-space``.
        ServerError: ``ollama-load-timeout``, ``ollama-load-failed`` or ``ollama-refused``, with Ollama's own words.
    """
    try:
        yield
    except ResponseError as error:
        raise refusal(server, error.error, error.status_code) from error
    except (httpx.HTTPError, ConnectionError) as error:  # the client turns a refused connection into ConnectionError
        raise lost(server, error) from error


def lost(server: OllamaServer, error: Exception) -> NetworkError:
    """The connection broke, or nothing came for too long."""
    return NetworkError(
        f"the connection to Ollama at {server.url} was lost",
        code="ollama-connection-lost",
        cause=str(error) or type(error).__name__,
        hint="run the same command again: what Ollama has is not sent twice",
    )


def refusal(server: OllamaServer, text: str, status: int) -> KimiggufError:
    """Ollama said no, in ``text``."""
    words = text.lower()
    if "no space left" in words or "disk quota" in words:
        return MachineError(
            "Ollama's disk is full", code="ollama-no-space", cause=text, hint="make room there and run the same again"
        )
    if "timed out waiting" in words:
        return ServerError(
            "Ollama gave up loading the model", code="ollama-load-timeout", cause=text,
            hint="set OLLAMA_LOAD_TIMEOUT=2h for `ollama serve`, then: kimigguf ollama-register --check NAME",
        )  # fmt: skip
    if any(sign in words for sign in _LOAD_SIGNS):
        return ServerError(
            "Ollama could not load the model", code="ollama-load-failed", cause=text,
            hint="its log says more: journalctl -u ollama -n 100, or ~/.ollama/logs/server.log",
        )  # fmt: skip
    return ServerError(f"Ollama at {server.url} refused (HTTP {status})", code="ollama-refused", cause=text)
