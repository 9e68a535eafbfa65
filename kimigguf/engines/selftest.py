"""Proof after the load: what a server must do before it is called ready, each check with its evidence.

A server can load, answer /health, and still be useless: template without parser, second turns that answer the first
question, memory that ends with the first long prompt.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kimigguf.engines.evidence import Check, State
from kimigguf.events import Listener, Step, ignore

_MARKERS: Final = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_SHORT: Final = {"max_tokens": 24, "temperature": 0.0}
"""Greedy, so that the same server gives the same evidence each time."""
_CALL_TOKENS: Final = 192
_SECONDS: Final = 3600.0
"""Of one request. Prompts of a terabyte model on slow memory take minutes, and a dead server is noticed at once."""
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Tokens per second by the server's own clock; None where it does not say."""

    prompt_per_second: float | None = None
    decode_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The checks in order, and the speeds of the longest prompt and of the first answer."""

    checks: tuple[Check, ...]
    measured: Measured

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.state is State.FAILED)


Post = Callable[[str, Mapping[str, Any]], dict[str, Any]]


class Refused(Exception):  # noqa: N818 -- caught in this module, where the name reads well
    """The server answered with an error, whose HTTP status is ``status``, or no longer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def poster(url: str, key: str | None, tls: ssl.SSLContext | None = None, *, seconds: float = _SECONDS) -> Post:
    """A function that posts JSON to the server at ``url`` and returns the JSON of its answer; ``tls`` is its trust."""
    trust = () if tls is None else (urllib.request.HTTPSHandler(context=tls),)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *trust)

    def post(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)  # noqa: S310 -- our own server
        try:
            with opener.open(request, timeout=seconds) as answer:
                result: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
                raise Refused(f"HTTP {error.code}: {said}", error.code) from error
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from error
        return result

    return post


def selftest(post: Post, *, ubatch_tokens: int, slot_tokens: int, listen: Listener = ignore) -> Result:
    """Run every check against a loaded server. Never raises for what the server does: that is the result."""
    checks = [_numbers(post)]
    if checks[0].state is State.FAILED:  # nothing that it answers means anything
        return Result(checks=tuple(checks), measured=Measured())
    listen(Step(text="self-test: a short turn"))
    question = {"role": "user", "content": "Say hello."}
    try:
        first = post("/v1/chat/completions", {"messages": [question], **_SHORT})
    except Refused as refused:
        failed = Check(what="first turn", state=State.FAILED, evidence=str(refused))
        return Result(checks=(*checks, failed), measured=Measured())
    checks.append(check_turn(first))
    listen(Step(text="self-test: a second turn with the whole first message"))
    checks.append(_second_turn(post, question, first))
    listen(Step(text="self-test: a tool call"))
    checks.append(_tool_call(post))
    listen(Step(text=f"self-test: a prompt of {ubatch_tokens} tokens"))
    long_check, prompt_speed = _long_prompt(post, ubatch_tokens, slot_tokens)
    checks.append(long_check)
    timings = first.get("timings") or {}
    decode = timings.get("predicted_per_second") if (timings.get("predicted_n") or 0) > 1 else None
    return Result(checks=tuple(checks), measured=Measured(prompt_per_second=prompt_speed, decode_per_second=decode))


def _message(answer: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def check_turn(answer: Mapping[str, Any]) -> Check:
    """Whether an answer has the shape of K3's: thinking apart from text, no markers of its format in either."""
    what = "first turn"
    try:
        message = _message(answer)
    except (KeyError, IndexError, TypeError):
        return Check(what=what, state=State.FAILED, evidence="the answer holds no message")
    thinking, text = message.get("reasoning_content") or "", message.get("content") or ""
    if found := [marker for marker in _MARKERS if marker in thinking + text]:
        # A parser takes the thinking out; without one, all of the format stays in the text.
        return Check(
            what=what,
            state=State.UNKNOWN if thinking else State.FAILED,
            evidence=f"{found[0]} stands in the text"
            + ("" if thinking else ": this engine has no parser for K3's format"),
        )
    if not thinking and not text:
        return Check(what=what, state=State.FAILED, evidence="the answer is empty")
    if not thinking:
        return Check(what=what, state=State.UNKNOWN, evidence="it answered, and showed no thinking apart from it")
    return Check(what=what, state=State.PASSED, evidence="it answered, its thinking apart in reasoning_content")


def _second_turn(post: Post, question: Mapping[str, Any], first: Mapping[str, Any]) -> Check:
    what = "second turn"
    try:
        messages = [question, _message(first), {"role": "user", "content": "Now say goodbye."}]
        second = post("/v1/chat/completions", {"messages": messages, **_SHORT})
        before, after = first["usage"]["prompt_tokens"], second["usage"]["prompt_tokens"]
        message = _message(second)
    except (Refused, KeyError, IndexError, TypeError) as problem:
        return Check(what=what, state=State.FAILED, evidence=str(problem) or "the answer is incomplete")
    if not (message.get("reasoning_content") or message.get("content")):
        return Check(what=what, state=State.FAILED, evidence="the answer is empty")
    if after <= before:
        return Check(
            what=what,
            state=State.FAILED,
            evidence=f"its prompt has {after} tokens, the first had {before}: the history was dropped",
        )
    timings = second.get("timings") or {}
    seen = (timings.get("cache_n") or 0) + (timings.get("prompt_n") or 0)
    if timings and seen != after:
        return Check(
            what=what, state=State.FAILED, evidence=f"{seen} prompt tokens were processed or reused, of {after}"
        )
    reused = timings.get("cache_n") or 0
    return Check(
        what=what, state=State.PASSED, evidence=f"{after} prompt tokens after {before}, {reused} of them from the cache"
    )


def _tool_call(post: Post) -> Check:
    what = "tool call"
    body = {
        "messages": [{"role": "user", "content": "What time is it in Paris? Use the tool."}],
        "tools": [_TOOL],
        **_SHORT,
        "max_tokens": _CALL_TOKENS,
    }
    try:
        message = _message(post("/v1/chat/completions", body))
        calls = message.get("tool_calls") or []
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    except (Refused, KeyError, IndexError, TypeError, ValueError) as problem:
        return Check(what=what, state=State.FAILED, evidence=str(problem) or "the answer is incomplete")
    if not calls and "<|open|>call" in (message.get("content") or ""):
        return Check(what=what, state=State.FAILED, evidence="the call stands unparsed in the text")
    if not calls:
        return Check(what=what, state=State.UNKNOWN, evidence="tools were accepted; the model called none")
    return Check(what=what, state=State.PASSED, evidence=f"get_time({arguments[0]})")


def _long_prompt(post: Post, ubatch_tokens: int, slot_tokens: int) -> tuple[Check, float | None]:
    what = "long prompt"
    wanted = min(ubatch_tokens + 16, slot_tokens - 8)
    try:
        tokens = post("/tokenize", {"content": " the" * wanted}).get("tokens") or []
        answer = post("/completion", {"prompt": tokens[:wanted], "n_predict": 1, "cache_prompt": False})
    except Refused as refused:
        return Check(what=what, state=State.FAILED, evidence=f"{wanted} tokens: {refused}"), None
    timings = answer.get("timings") or {}
    count = timings.get("prompt_n")
    evidence = f"{count} tokens in batches of {ubatch_tokens}"
    state = State.PASSED if isinstance(count, int) and count >= min(ubatch_tokens, wanted) else State.UNKNOWN
    return Check(what=what, state=state, evidence=evidence), timings.get("prompt_per_second")


def _numbers(post: Post) -> Check:
    try:
        return check_numbers(post("/completion", ONE_TOKEN))
    except Refused as refused:  # the first turn will tell what is wrong
        return Check(what="numbers", state=State.UNKNOWN, evidence=str(refused))


ONE_TOKEN: Final = {"prompt": "Hello", "n_predict": 1, "n_probs": 1, "cache_prompt": False}
"""What to ask of /completion for an answer that ``check_numbers`` can judge."""


def check_numbers(answer: Mapping[str, Any]) -> Check:
    """Whether the model computes numbers, from a /completion answer with ``n_probs``.

    llama.cpp (build 11434) samples from NaN without a word: the answer is one token again and again, under status 200.
    JSON has no NaN, so the log-probability of such a token is null.
    """
    what = "numbers"
    try:
        first = answer["completion_probabilities"][0]
        value = first["logprob"]
    except (KeyError, IndexError, TypeError):
        return Check(what=what, state=State.UNKNOWN, evidence="the server tells no log-probabilities")
    if value is None:
        return Check(
            what=what,
            state=State.FAILED,
            evidence=f"the log-probability of its token {first.get('token')!r} is no number (NaN)",
            hint="with CUDA 13.2.0 or 13.2.1 use an engine built with another version; else: kimigguf verify QUANT",
        )
    return Check(what=what, state=State.PASSED, evidence=f"a log-probability of {value:.2f}")
