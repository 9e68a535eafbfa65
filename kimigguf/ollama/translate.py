"""Ollama's chat and generate calls in OpenAI's words, and the answers back. Pure; nothing else is decided here.

Ollama's own field names are documented in https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

Json = dict[str, Any]

_OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty",
}
"""Ollama's options that the engine takes by request; the others (num_ctx, num_gpu, ...) are settled by its start."""


class Untranslatable(Exception):  # noqa: N818 -- it is the answer 400
    """A request that has no like in OpenAI's protocol, in one sentence."""


def chat_request(body: Mapping[str, Any], model: str) -> Json:
    """The body of ``/v1/chat/completions`` for one of ``/api/chat``; always streamed.

    Raises:
        Untranslatable: It carries images.
    """
    made: Json = {"model": model, "messages": list(_messages(body.get("messages") or ())), **_common(body)}
    if body.get("tools"):
        made["tools"] = body["tools"]
    return made


def generate_request(body: Mapping[str, Any], model: str) -> Json:
    """The body of ``/v1/chat/completions`` for one of ``/api/generate``; always streamed.

    Raises:
        Untranslatable: It carries images, is raw, or asks for what comes between two texts.
    """
    for field in ("images", "raw", "suffix"):
        if body.get(field):
            raise Untranslatable(f"{field} is not supported here")
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    messages.append({"role": "user", "content": body.get("prompt") or ""})
    return {"model": model, "messages": messages, **_common(body)}


def _common(body: Mapping[str, Any]) -> Json:
    made: Json = {"stream": True, "stream_options": {"include_usage": True}}
    options = body.get("options") or {}
    made |= {theirs: options[ours] for ours, theirs in _OPTIONS.items() if options.get(ours) is not None}
    if isinstance(options.get("num_predict"), int) and options["num_predict"] >= 0:
        made["max_tokens"] = options["num_predict"]
    wanted = body.get("format")
    if wanted == "json":
        made["response_format"] = {"type": "json_object"}
    elif isinstance(wanted, dict):
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    think = body.get("think")
    if isinstance(think, bool):
        made["chat_template_kwargs"] = {"thinking": think}
    elif isinstance(think, str):  # an effort, in both spellings that K3's templates know
        made["chat_template_kwargs"] = {"thinking_effort": think, "reasoning_effort": think}
    return made


def _messages(messages: Iterator[Json] | Any) -> Iterator[Json]:  # noqa: ANN401 -- parsed JSON
    """Thinking goes back as reasoning_content, and a tool's answer to the call of that name that is still open."""
    open_calls: list[tuple[str, str]] = []
    made_calls = 0
    for message in messages:
        if message.get("images"):
            raise Untranslatable("images are not supported here")
        made: Json = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            made["tool_calls"] = []
            for call in message["tool_calls"]:
                function, name = call["function"], f"call_{made_calls}"
                made_calls += 1
                open_calls.append((function["name"], name))
                arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                made["tool_calls"].append(
                    {"id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
                )
        if message["role"] == "tool":
            wanted = message.get("tool_name")
            index = next((i for i, (name, _) in enumerate(open_calls) if wanted in {None, name}), None)
            made["tool_call_id"] = open_calls.pop(index)[1] if index is not None else "call_0"
        yield made


class Answer:
    """Turns the chunks of one streamed OpenAI answer into Ollama's lines. ``kind`` is ``chat`` or ``generate``."""

    def __init__(self, kind: str, model: str) -> None:
        self._kind = kind
        self._model = model
        self._started = time.monotonic_ns()
        self._first: int | None = None
        self._calls: dict[int, list[str]] = {}
        self._reason: str | None = None
        self._usage: Mapping[str, int] = {}

    def lines(self, chunk: Mapping[str, Any]) -> Iterator[Json]:
        """The lines that one chunk makes: none, or one of thinking, content or both."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._reason = choice.get("finish_reason") or self._reason
            for call in delta.get("tool_calls") or ():
                kept = self._calls.setdefault(call["index"], ["", ""])
                kept[0] += (call.get("function") or {}).get("name") or ""
                kept[1] += (call.get("function") or {}).get("arguments") or ""
            thinking, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            if thinking or content:
                if self._first is None:
                    self._first = time.monotonic_ns()
                yield self._line(content, thinking, done=False)

    def last(self) -> list[Json]:
        """What follows the last chunk: the tool calls, whole, and the closing line with counts and durations."""
        now = time.monotonic_ns()
        first = self._first or now
        calls = [
            {"function": {"name": name, "arguments": _arguments(text)}}
            for _, (name, text) in sorted(self._calls.items())
        ]
        made = []
        if calls and self._kind == "chat":
            line = self._line("", "", done=False)
            line["message"]["tool_calls"] = calls
            made.append(line)
        closing = self._line("", "", done=True) | {
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": first - self._started,
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": now - first,
        }
        return [*made, closing]

    @property
    def finished(self) -> bool:
        """Whether the engine came to an end of its own; else the stream broke."""
        return self._reason is not None

    def _line(self, content: str, thinking: str, *, done: bool) -> Json:
        line: Json = {"model": self._model, "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        if self._kind == "chat":
            line["message"] = {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})
        else:
            line |= {"response": content} | ({"thinking": thinking} if thinking else {})
        return line | {"done": done}


def _arguments(text: str) -> Json:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def whole(lines: list[Json]) -> Json:
    """One answer of all lines, for a caller that does not want a stream."""
    made = dict(lines[-1])
    if "message" in made:
        parts = [line["message"] for line in lines]
        message: Json = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
        if thinking := "".join(part.get("thinking", "") for part in parts):
            message["thinking"] = thinking
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            message["tool_calls"] = calls
        made["message"] = message
    else:
        made["response"] = "".join(line["response"] for line in lines)
        if thinking := "".join(line.get("thinking", "") for line in lines):
            made["thinking"] = thinking
    return made
