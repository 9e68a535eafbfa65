"""Listens to what a client sends, so that a record holds the requests themselves and not what was meant to be sent."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import httpx2

from kimigguf.probe.calls import Sent

MOST_BYTES: Final = 32 * 1024
"""Of a body that is kept whole; a longer one's conversation is in the run's questions already."""


def brief(body: bytes, item: str) -> dict[str, Any]:
    """A request's body for the record. Pure.

    Where it has more than ``MOST_BYTES``, ``messages`` holds the item's id and the SHA-256 of the messages as compact
    JSON with sorted keys in UTF-8.
    """
    whole: dict[str, Any] = json.loads(body)
    if len(body) <= MOST_BYTES:
        return whole
    text = json.dumps(whole["messages"], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return {**whole, "messages": {"item": item, "sha256": hashlib.sha256(text.encode()).hexdigest()}}


class Listening:
    """Keeps what the current thread sends, while somebody wants it; a client calls ``heard`` before each request."""

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def to(self, item: str) -> Iterator[list[Sent]]:
        """The requests that this thread sends for ``item`` until the end of the block, in order."""
        kept: list[Sent] = []
        self._here.kept, self._here.item = kept, item
        try:
            yield kept
        finally:
            self._here.kept = None

    def heard(self, request: httpx2.Request) -> None:
        """Keep the time and the body alone: the key is in the headers."""
        kept: list[Sent] | None = getattr(self._here, "kept", None)
        if kept is not None and request.content:
            began = datetime.now(UTC).isoformat(timespec="milliseconds")
            kept.append(Sent(began=began, body=brief(request.content, self._here.item)))
