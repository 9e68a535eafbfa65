"""Ollama's chat, generate and embed calls in the engine's words. Pure; nothing else is decided here.

Ollama's own field names are documented in https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

_OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "num_keep": "n_keep",
}
"""Ollama's options that the engine takes by request, and what they are called there."""
_ELSEWHERE: Final = frozenset({"num_predict", "num_ctx"})
"""Options with a rule of their own below."""
_COMMON: Final = frozenset({"model", "stream", "options", "format", "think", "keep_alive", "logprobs", "top_logprobs"})
_CHAT: Final = _COMMON | {"messages", "tools"}
_GENERATE: Final = _COMMON | {"prompt", "system", "raw", "images", "suffix", "template", "context"}
_EMBED: Final = frozenset({"model", "input", "prompt", "truncate", "dimensions", "options", "keep_alive"})
_KEPT_LOADED: Final = "keep_alive: the model stays loaded as long as it is served"


class Untranslatable(Exception):  # noqa: N818 -- it is the answer 400
    """A request that has no like in the engine's protocol, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to post to the engine, and what of the request goes unheeded: per field, a phrase that begins with it."""

    path: str
    body: Json
    unheeded: tuple[str, ...] = ()


def chat_request(body: Mapping[str, Any], model: str, context_tokens: int | None) -> Wanted:
    """The like of ``/api/chat``, always streamed. ``context_tokens`` is what the engine was started with.

    Raises:
        Untranslatable: It carries images, or a message without a role.
    """
    made: Json = {"model": model, "messages": list(_messages(body.get("messages") or ())), **_common(body)}
    if body.get("tools"):
        made["tools"] = body["tools"]
    made |= _answer_format(body) | _thinking(body) | _logprobs(body)
    return Wanted(path="/v1/chat/completions", body=made, unheeded=_unheeded(body, _CHAT, context_tokens))


def generate_request(body: Mapping[str, Any], model: str, context_tokens: int | None) -> Wanted:
    """The like of ``/api/generate``, always streamed: a chat of one turn, or the prompt as it stands where it is raw.

    Raises:
        Untranslatable: It carries images, a template or a context of its own, or asks for what comes between two texts.
    """
    for field, instead in (
        ("images", "the engine was started without them"),
        ("suffix", "K3 was not trained to fill in"),
        ("template", "the model's own is used; send the text as it shall stand with raw"),
        ("context", "it is not kept here; send the messages to /api/chat"),
    ):
        if body.get(field):
            raise Untranslatable(f"{field} is not supported here: {instead}")
    unheeded = _unheeded(body, _GENERATE, context_tokens)
    if body.get("raw"):
        unheeded += tuple(f"{field}: raw text has none" for field in ("system", "think") if body.get(field))
        made: Json = {"model": model, "prompt": body.get("prompt") or "", **_common(body)}
        made |= _raw_format(body)
        return Wanted(path="/v1/completions", body=made, unheeded=unheeded)
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    messages.append({"role": "user", "content": body.get("prompt") or ""})
    made = {"model": model, "messages": messages, **_common(body)}
    made |= _answer_format(body) | _thinking(body) | _logprobs(body)
    return Wanted(path="/v1/chat/completions", body=made, unheeded=unheeded)


def format_template(wanted: Wanted) -> Json:
    """What to ask the engine's template for, where its chat takes a format and does not keep to it."""
    return {"messages": wanted.body["messages"], "chat_template_kwargs": {"thinking": False}}


def format_request(body: Mapping[str, Any], wanted: Wanted, prompt: str) -> Wanted:
    """The same as a completion of the templated ``prompt``, which the engine does hold to a format."""
    made: Json = {"model": wanted.body["model"], "prompt": prompt, **_common(body), **_raw_format(body)}
    unheeded = wanted.unheeded
    if body.get("think") or body.get("think") is None:
        unheeded += ("think: what keeps to a format is answered without thinking here",)
    return Wanted(path="/v1/completions", body=made, unheeded=unheeded)


def embed_request(body: Mapping[str, Any], model: str, *, normalized: bool = True) -> Wanted:
    """The like of ``/api/embed``, or of the older ``/api/embeddings`` with its one ``prompt``."""
    texts = body.get("input") if "input" in body else body.get("prompt")
    made: Json = {"model": model, "input": [texts] if isinstance(texts, str) else list(texts or ())}
    if not normalized:
        made["embd_normalize"] = -1
    unheeded = _strangers(body, _EMBED) + tuple(
        f"options.{name}: it does not bear on embeddings" for name in _given(body)
    )
    return Wanted(path="/v1/embeddings", body=made, unheeded=unheeded)


def embeddings(found: Mapping[str, Any], dimensions: int | None = None) -> list[list[float]]:
    """The vectors of the engine's reply in the order that was asked in; cut to ``dimensions``, again of length 1."""
    vectors = [item["embedding"] for item in sorted(found["data"], key=lambda item: item["index"])]
    return [_cut(vector, dimensions) for vector in vectors] if dimensions else vectors


def _cut(vector: Sequence[float], dimensions: int) -> list[float]:
    kept = list(vector[:dimensions])
    length = math.hypot(*kept)
    return [value / length for value in kept] if length else kept


def _common(body: Mapping[str, Any]) -> Json:
    made: Json = {"stream": True, "stream_options": {"include_usage": True}}
    options = _given(body)
    made |= {theirs: options[ours] for ours, theirs in _OPTIONS.items() if ours in options}
    limit = options.get("num_predict")
    if isinstance(limit, int) and limit >= 0:  # below: no limit, as the engine has it
        made["max_tokens"] = limit
    return made


def _given(body: Mapping[str, Any]) -> Json:
    options = body.get("options") or {}
    if not isinstance(options, dict):
        raise Untranslatable("options must be an object")
    return {name: value for name, value in options.items() if value is not None}


def _answer_format(body: Mapping[str, Any]) -> Json:
    wanted = body.get("format")
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(wanted, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}}
    if wanted:
        raise Untranslatable('format must be "json" or a JSON schema')
    return {}


def _raw_format(body: Mapping[str, Any]) -> Json:
    schema = (_answer_format(body).get("response_format") or {}).get("json_schema") or {}
    return {"json_schema": schema.get("schema") or {"type": "object"}} if body.get("format") else {}


def _thinking(body: Mapping[str, Any]) -> Json:
    think = body.get("think")
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"thinking": think}}
    if isinstance(think, str) and think:  # an effort, in both spellings that K3's templates know
        return {"chat_template_kwargs": {"thinking_effort": think, "reasoning_effort": think}}
    return {}


def _logprobs(body: Mapping[str, Any]) -> Json:
    if not body.get("logprobs"):
        return {}
    return {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}


def _unheeded(body: Mapping[str, Any], known: frozenset[str], context_tokens: int | None) -> tuple[str, ...]:
    options = _given(body)
    asked = options.get("num_ctx")
    told = [f"options.{name}: settled when the engine was started" for name in options.keys() - _OPTIONS.keys()]
    told = [phrase for phrase in sorted(told) if phrase.partition(":")[0].removeprefix("options.") not in _ELSEWHERE]
    if isinstance(asked, int) and context_tokens is not None and asked > context_tokens:
        told.append(f"options.num_ctx: {asked} asked, the engine was started with {context_tokens}")
    if body.get("keep_alive") is not None:
        told.append(_KEPT_LOADED)
    return (*_strangers(body, known), *told)


def _strangers(body: Mapping[str, Any], known: frozenset[str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: not known here" for name in sorted(body.keys() - known) if body[name] not in (None, False, "")
    )


def _messages(messages: Any) -> Iterator[Json]:  # noqa: ANN401 -- parsed JSON
    """Thinking goes back as reasoning_content, and a tool's answer to the call of that name that is still open."""
    open_calls: list[tuple[str, str]] = []
    made_calls = 0
    for message in messages:
        if not isinstance(message, dict) or not message.get("role"):
            raise Untranslatable("every message needs a role")
        if message.get("images"):
            raise Untranslatable("images are not supported here: the engine was started without them")
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
