"""The engine's streamed answers in Ollama's lines. Pure, and lean: this runs once for every token."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kimigguf.ollama.translate import Json

_NANOSECONDS: Final = 1_000_000_000
_quote: Final = json.JSONEncoder().encode
"""All but ASCII is escaped: Ollama's Python client splits lines at U+0085 and U+2028 too."""
_parse: Final = json.JSONDecoder().decode


class EngineError(Exception):
    """The engine's own words for what went wrong in the middle of an answer."""


class Answer:
    """Turns the events of one streamed answer into Ollama's lines. ``kind`` is ``chat`` or ``generate``."""

    def __init__(self, kind: str, model: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._chat = kind == "chat"
        self._model = model
        # What is the same in every line is put together once.
        self._head = f'{{"model":{_quote(model)},"created_at":"'
        self._open = 'Z","message":{"role":"assistant","content":' if self._chat else 'Z","response":'
        self._close = "}" if self._chat else ""
        self._second = (0, "")
        self._started = clock()
        self._first: int | None = None
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._logprobs: list[Json] = []
        self._all_logprobs: list[Json] = []
        self._calls: dict[int, list[str]] = {}
        self._reason: str | None = None
        self._usage: Mapping[str, int] = {}
        self._timings: Mapping[str, float] = {}

    def add(self, payload: bytes) -> str:
        """The line that one event makes, or nothing.

        Raises:
            EngineError: It is an error of the engine's.
        """
        try:
            event = _parse(payload.decode("utf-8", "replace"))
        except ValueError as error:
            raise EngineError(f"the engine sent what is not JSON: {error}") from error
        choices = event.get("choices")
        if "usage" in event or not choices:
            self._counted(event)
        if not choices:
            return ""
        choice = choices[0]
        delta = choice.get("delta") or {}
        content = delta.get("content") or choice.get("text") or ""  # the latter where there is no chat
        thinking = delta.get("reasoning_content") or ""
        if choice.get("finish_reason"):
            self._reason = choice["finish_reason"]
        if "tool_calls" in delta:
            self._called(delta["tool_calls"] or ())
        if choice.get("logprobs"):
            self._logprobs += [_logprob(token) for token in choice["logprobs"].get("content") or ()]
        if not content and not thinking:
            return ""
        if self._first is None:
            self._first = self._clock()
        self._content.append(content)
        self._thinking.append(thinking)
        return self._line(content, thinking)

    def end(self) -> str:
        """What follows the last event: the tool calls, whole, and the closing line with counts and durations."""
        calls = self._made_calls()
        told = self._line("", "", f',"tool_calls":{_quote(calls)}') if calls and self._chat else ""
        message = {"message": {"role": "assistant", "content": ""}} if self._chat else {"response": ""}
        return f"{told}{_quote(self._closing(message))}\n"

    def whole(self) -> Json:
        """All of it as one, for a caller that does not want a stream."""
        parts: Json = {"content" if self._chat else "response": "".join(self._content)}
        if thinking := "".join(self._thinking):
            parts["thinking"] = thinking
        if self._chat:
            if calls := self._made_calls():
                parts["tool_calls"] = calls
            parts = {"message": {"role": "assistant"} | parts}
        if logprobs := self._all_logprobs + self._logprobs:
            parts["logprobs"] = logprobs
        return self._closing(parts)

    @property
    def finished(self) -> bool:
        """Whether the engine came to an end of its own; else the stream broke."""
        return self._reason is not None

    def _line(self, content: str, thinking: str, more: str = "") -> str:
        thought = f',"thinking":{_quote(thinking)}' if thinking else ""
        close = self._close
        if self._logprobs:
            close += f',"logprobs":{_quote(self._logprobs)}'
            self._all_logprobs += self._logprobs
            self._logprobs = []
        return f'{self._head}{self._now()}{self._open}{_quote(content)}{thought}{more}{close},"done":false}}\n'

    def _now(self) -> str:
        second, rest = divmod(self._clock(), _NANOSECONDS)
        if second != self._second[0]:
            self._second = (second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)))
        return f"{self._second[1]}.{rest:09d}"

    def _closing(self, parts: Json) -> Json:
        now = self._clock()
        first = self._first or now
        timings = self._timings  # the engine's own, where it tells them
        return {"model": self._model, "created_at": f"{self._now()}Z"} | parts | {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": _nanoseconds(timings.get("prompt_ms"), first - self._started),
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": _nanoseconds(timings.get("predicted_ms"), now - first),
        }  # fmt: skip

    def _counted(self, event: Mapping[str, Any]) -> None:
        if "error" in event or "code" in event:
            raise EngineError(message_of(event))
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings

    def _called(self, calls: Sequence[Json]) -> None:
        for call in calls:
            kept = self._calls.setdefault(call["index"], ["", ""])
            kept[0] += (call.get("function") or {}).get("name") or ""
            kept[1] += (call.get("function") or {}).get("arguments") or ""

    def _made_calls(self) -> list[Json]:
        return [
            {"function": {"name": name, "arguments": _arguments(text)}}
            for _, (name, text) in sorted(self._calls.items())
        ]


def message_of(error: Any) -> str:  # noqa: ANN401 -- parsed JSON
    """The sentence in an engine's error, or all of it."""
    found = error.get("error", error) if isinstance(error, dict) else error
    if isinstance(found, dict) and "message" in found:
        # What a template refuses, such as an effort that K3 does not have, comes wrapped in the place in its source.
        return str(found["message"]).rpartition("Jinja Exception: ")[2]
    return found if isinstance(found, str) else json.dumps(error)[:500]


def _nanoseconds(told_ms: float | None, seen: int) -> int:
    """What the engine measured, else what was seen here."""
    return seen if told_ms is None else int(told_ms * 1e6)


def _arguments(text: str) -> Json:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _logprob(token: Json) -> Json:
    kept: Json = {name: token[name] for name in ("token", "logprob", "bytes") if name in token}
    if token.get("top_logprobs"):
        kept["top_logprobs"] = [_logprob(other) for other in token["top_logprobs"]]
    return kept
