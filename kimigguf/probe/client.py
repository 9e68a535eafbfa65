"""Asks an OpenAI-compatible endpoint one question and says what became of it; every failure of the client is mapped."""

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

import httpx2
import openai

from kimigguf.engines.command import is_loopback
from kimigguf.engines.endpoint import Limits, base_url, limits, sent_in_the_clear
from kimigguf.engines.printable import printable, sendable
from kimigguf.engines.registry import certificate_at
from kimigguf.engines.session import servers_folder
from kimigguf.engines.tls import trusting
from kimigguf.errors import KimiggufError, NetworkError, UsageError
from kimigguf.probe.calls import Fault, FaultKind, MadeCall, Outcome, Reply, Shape
from kimigguf.probe.faults import FAILURES, BudgetSpent, Cut, fault_of, wait_before
from kimigguf.probe.logprobs import Continuation
from kimigguf.probe.logprobs import read as read_logprobs
from kimigguf.probe.references import Purse
from kimigguf.probe.sent import Listening
from kimigguf.probe.suites import Item
from kimigguf.probe.turns import as_sent, ask_on
from kimigguf.probe.unstreamed import whole_reply

KEY_VARIABLES: Final[Mapping[str, str]] = {
    "candidate": "KIMIGGUF_CANDIDATE_API_KEY",
    "reference": "KIMIGGUF_REFERENCE_API_KEY",
    "judge": "KIMIGGUF_JUDGE_API_KEY",
}
_NOT_RETRIED: Final = {FaultKind.KEY, FaultKind.REQUEST, FaultKind.NONSENSE, FaultKind.BUDGET}
_MORE_ROOM: Final = 4
"""By how much the budget grows, once, when an answer was cut off while thinking."""
_CONNECT_SECONDS: Final = 15.0

Sleep: TypeAlias = Callable[[float], None]
R = TypeVar("R", Reply, Continuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How every call is made. ``timeout_seconds`` bounds the silence between two pieces of an answer.

    ``temperature`` None leaves the endpoint's own, which for K3 is the right one on both sides.
    """

    tries: int = 3
    timeout_seconds: float = 600.0
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One side: the address of its API and the model's name there."""

    role: str
    url: str
    model: str


def _trust(url: str, environ: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Whom to trust at ``url``: a server of this user's by its own certificate, any other as usual."""
    if not (url.startswith("https:") and is_loopback(urlsplit(url).hostname or "")):
        return True
    certificate = certificate_at(servers_folder(environ), url)
    return True if certificate is None else trusting(certificate)


class Asker:
    """A client of one endpoint. Safe to use from several threads; close it when done."""

    def __init__(
        self,
        role: str,
        url: str,
        environ: Mapping[str, str],
        settings: Settings,
        *,
        key_variable: str | None = None,
        purse: Purse | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """``key_variable`` holds the key where the role's own variable does not; ``purse`` pays for every request."""
        self.role = role
        self.purse = purse
        self.url = base_url(
            url,
            hint=f"--{role} http://127.0.0.1:8080",
            key_hint=f"export {KEY_VARIABLES[role]}=... and give the bare address",
        )
        self._settings = settings
        self._sleep = sleep
        self._usage_in_stream = True
        self._sending = Listening()
        self._key = environ.get(KEY_VARIABLES[role]) or environ.get(key_variable or "")
        timeout = httpx2.Timeout(settings.timeout_seconds, connect=_CONNECT_SECONDS)
        self._client = openai.OpenAI(
            base_url=self.url,
            # Servers without keys take any; without this the library would look for a variable of its own.
            api_key=self._key or "none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                timeout=timeout,
                trust_env=not is_loopback(urlsplit(self.url).hostname or ""),
                verify=_trust(self.url, environ),
                event_hooks={"request": [self._sending.heard]},
            ),
        )

        # Variables of the library's own must not reach a server that is not OpenAI's.
        self._client.organization = None
        self._client.project = None

    def close(self) -> None:
        self._client.close()

    @property
    def warning(self) -> str | None:
        """What its user should know before anything is sent, if anything."""
        return sent_in_the_clear(self.url, self._key)

    def endpoint(self, model: str | None) -> Endpoint:
        """This side with its model: the one given, or the only one that the endpoint has.

        Raises:
            UsageError: ``model-not-given`` where there are several, or the endpoint does not list them.
            NetworkError: The endpoint does not answer, or refuses the key.
        """
        if model is not None:
            return Endpoint(role=self.role, url=self.url, model=model)
        try:
            names = sorted(found.id for found in self._client.models.list())
        except FAILURES as error:
            fault = self._fault(error, tries=1)
            if fault.kind in {FaultKind.REQUEST, FaultKind.NONSENSE}:
                names = []
            else:
                raise stopped(self.role, self.url, fault) from error
        if len(names) != 1:
            raise UsageError(
                f"the {self.role} at {self.url} " + ("has several models" if names else "does not list its models"),
                code="model-not-given",
                cause=", ".join(names[:20]) or None,
                hint=f"--{self.role}-model {names[0] if names else 'NAME'}",
            )
        return Endpoint(role=self.role, url=self.url, model=names[0])

    def limits(self) -> Limits:
        """The tokens that fit into one conversation, and what serves them, where a llama-server tells."""
        return limits(self._client, {})

    def ask(self, endpoint: Endpoint, item: Item, max_tokens: int | None) -> Outcome:
        """Ask one question, to the end of its tool loop if it has one."""
        with self._sending.to(item.id) as requests:
            outcome = ask_on(item, lambda turn: self._ask_once(endpoint, turn, max_tokens))
        return replace(outcome, requests=tuple(requests)) if isinstance(outcome, Reply) else outcome

    def _ask_once(self, endpoint: Endpoint, item: Item, max_tokens: int | None) -> Outcome:
        """One turn; an answer that was cut off while thinking is asked for once more, with more room."""
        outcome = self._with_tries(item, max_tokens, lambda: self._once(endpoint, item, max_tokens))
        if isinstance(outcome, Reply) and outcome.shape is Shape.CUT_OFF_THINKING and max_tokens is not None:
            room = max_tokens * _MORE_ROOM
            again = self._with_tries(item, room, lambda: self._once(endpoint, item, room))
            return replace(again, earlier=outcome.spent) if isinstance(again, Reply) else outcome
        return outcome

    def beginning(
        self, endpoint: Endpoint, item: Item, max_tokens: int, *, top: int, greedy: bool
    ) -> Continuation | Fault:
        """The first tokens of an answer, with the ``top`` likeliest at each."""

        def once() -> Continuation:
            sent = {**self._optional(item, max_tokens), "logprobs": True, "top_logprobs": top}
            if greedy:
                sent["temperature"] = 0.0
            messages: Any = as_sent(item.conversation)
            said = self._client.chat.completions.create(model=endpoint.model, messages=messages, stream=False, **sent)
            positions, why = read_logprobs(said.choices[0].logprobs if said.choices else None)
            usage = said.usage
            return Continuation(
                positions=positions,
                why=why,
                prompt_tokens=None if usage is None else usage.prompt_tokens,
                completion_tokens=None if usage is None else usage.completion_tokens,
            )

        with self._sending.to(item.id) as requests:
            found = self._with_tries(item, max_tokens, once)
        return replace(found, requests=tuple(requests)) if isinstance(found, Continuation) else found

    def _with_tries(self, item: Item, max_tokens: int | None, once: Callable[[], R]) -> R | Fault:
        for tried in range(1, self._settings.tries + 1):
            try:
                return self._paid(item, max_tokens, once)
            except FAILURES as error:
                fault = self._fault(error, tries=tried)
                if self._may_do_without_usage(fault):
                    continue
                if fault.kind in _NOT_RETRIED or tried == self._settings.tries:
                    return fault
                self._sleep(wait_before(error, tried))
        return Fault(kind=FaultKind.REQUEST, status=None, text="was never sent", tries=0)

    def _fault(self, error: Exception, *, tries: int) -> Fault:
        """What an endpoint says of a failure ends up in logs and reports: it must not repeat the key there."""
        fault = fault_of(error, tries=tries)
        text = fault.text.replace(self._key, "(the key)") if self._key else fault.text
        return replace(fault, text=printable(text))

    def _may_do_without_usage(self, fault: Fault) -> bool:
        """Some endpoints refuse a request that asks for token counts in a stream; they are then not asked for."""
        if self._usage_in_stream and fault.kind is FaultKind.REQUEST and "stream_options" in fault.text:
            self._usage_in_stream = False
            return True
        return False

    def _paid(self, item: Item, max_tokens: int | None, once: Callable[[], R]) -> R:
        """One request, paid for; what came back without a count of tokens is taken to have cost the most."""
        if self.purse is None or max_tokens is None:
            return once()
        aside = self.purse.prices.most(item, max_tokens)
        if not self.purse.set_aside(aside):
            raise BudgetSpent("the budget does not hold another call")
        cost: float | None = None
        try:
            reply = once()
            if reply.prompt_tokens is not None and reply.completion_tokens is not None:
                cost = self.purse.prices.cost(reply.prompt_tokens, reply.completion_tokens)
        except openai.APIStatusError:
            cost = 0.0  # a refused request is not billed
            raise
        finally:
            self.purse.settle(aside, cost)
        return reply

    def _optional(self, item: Item, max_tokens: int | None) -> dict[str, Any]:
        """What a request carries besides the model and the conversation, where it is not left to the endpoint."""
        optional: dict[str, Any] = {}
        if max_tokens is not None:
            optional["max_tokens"] = max_tokens
        if self._settings.temperature is not None:
            optional["temperature"] = self._settings.temperature
        if item.tools:
            optional["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": dict(tool.parameters),
                    },
                }
                for tool in item.tools
            ]
        return optional

    def send(
        self, endpoint: Endpoint, item: Item, max_tokens: int | None, *, stream: bool, extra: Mapping[str, Any]
    ) -> Outcome:
        """One turn, taken as it comes: no second one with more room, no tool loop. ``extra`` goes into its body."""
        if stream:
            return self._with_tries(item, max_tokens, lambda: self._once(endpoint, item, max_tokens, extra))
        return self._with_tries(item, max_tokens, lambda: self._whole(endpoint, item, max_tokens, extra))

    def _whole(self, endpoint: Endpoint, item: Item, max_tokens: int | None, extra: Mapping[str, Any]) -> Reply:
        """One request whose answer comes in one piece."""
        optional = self._optional(item, max_tokens)
        messages: Any = as_sent(item.conversation)
        started = time.monotonic()
        said = self._client.chat.completions.create(
            model=endpoint.model, messages=messages, stream=False, extra_body=dict(extra), **optional
        )
        reply = whole_reply(said, time.monotonic() - started, max_tokens)
        if reply is None:
            raise Cut("the answer has no choices")
        return reply

    def _once(
        self, endpoint: Endpoint, item: Item, max_tokens: int | None, extra: Mapping[str, Any] | None = None
    ) -> Reply:
        optional = self._optional(item, max_tokens)
        if extra:
            optional["extra_body"] = dict(extra)
        if self._usage_in_stream:
            optional["stream_options"] = {"include_usage": True}
        messages: Any = as_sent(item.conversation)
        started = time.monotonic()
        gathered = _Gathered()
        stream = self._client.chat.completions.create(model=endpoint.model, messages=messages, stream=True, **optional)
        with stream:
            try:
                for chunk in stream:
                    gathered.take(chunk, time.monotonic() - started)
            except (openai.APITimeoutError, httpx2.TimeoutException):
                raise
            except (openai.APIConnectionError, httpx2.HTTPError) as error:
                raise Cut(f"the stream broke: {error}") from error
        return gathered.reply(time.monotonic() - started, max_tokens)


class _Gathered:
    """The pieces of one streamed answer."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: dict[int, list[str]] = {}
        """By index: name, arguments, id."""
        self._finish: str | None = None
        self._first: float | None = None
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._thinking_tokens: int | None = None

    def take(self, chunk: Any, seconds: float) -> None:  # noqa: ANN401 -- the library's types know no reasoning_content
        if chunk.usage is not None:
            self._prompt_tokens = chunk.usage.prompt_tokens
            self._completion_tokens = chunk.usage.completion_tokens
            details = chunk.usage.completion_tokens_details
            self._thinking_tokens = None if details is None else details.reasoning_tokens
        for choice in chunk.choices or ():
            delta = choice.delta
            thinking = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None) or ""
            content = delta.content or ""
            for call in delta.tool_calls or ():
                made = self._calls.setdefault(call.index, ["", "", ""])
                made[2] = made[2] or call.id or ""
                if call.function is not None:
                    made[0] += call.function.name or ""
                    made[1] += call.function.arguments or ""
            if (thinking or content or delta.tool_calls) and self._first is None:
                self._first = seconds
            self._thinking.append(thinking)
            self._content.append(content)
            self._finish = choice.finish_reason or self._finish

    def reply(self, seconds: float, max_tokens: int | None) -> Reply:
        if self._finish is None:
            raise Cut("the stream ended without a finish reason")
        return Reply(
            content=sendable("".join(self._content)),
            thinking=sendable("".join(self._thinking)),
            finish_reason=self._finish,
            tool_calls=len(self._calls),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            first_token_seconds=self._first,
            seconds=seconds,
            max_tokens=max_tokens,
            calls=tuple(
                MadeCall(name=sendable(name), arguments=sendable(text), id=sendable(called))
                for _, (name, text, called) in sorted(self._calls.items())
            ),
        )


def stopped(role: str, url: str, fault: Fault) -> KimiggufError:
    """A fault that makes every further call to that side pointless."""
    if fault.kind is FaultKind.KEY:
        return NetworkError(
            f"the {role} at {url} refuses the key (HTTP {fault.status})",
            code="key-refused",
            cause=fault.text,
            hint=f"export {KEY_VARIABLES[role]}=...",
        )
    return NetworkError(
        f"the {role} at {url} does not answer",
        code="endpoint-unreachable",
        cause=fault.text,
        hint=f"curl {url}/models",
    )
