"""Measures a running server: conversations of two turns at each depth, the first cold, the second warm.

K3's recurrent layers can only go on from where a conversation stands, so "warm" is what it is in use: the next turn.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kimigguf.engines.bench_client import BenchClient
from kimigguf.engines.bench_target import Target
from kimigguf.engines.observe import metrics
from kimigguf.engines.turn import Turn
from kimigguf.errors import ServerError, UsageError
from kimigguf.events import Listener, Step
from kimigguf.speed.samples import Rejected, Sample, Warmth, by_the_client, by_the_server, judge

DEFAULT_DEPTHS: Final = (0, 4096)
_WORDS: Final = tuple(
    """
    river stone paper window morning engine letter garden number winter bridge silver market signal mountain answer
    forest carbon island mirror copper needle harbor valley lantern orbit meadow thunder cotton ladder marble pepper
    rocket saddle temple tunnel velvet willow anchor basket candle desert falcon glacier hammer jacket kettle magnet
    opens follows carries crosses measures watches gathers repairs holds turns the a this every another slowly
    """.split()  # noqa: SIM905 -- a list of quoted words is no easier to read
)
_SENTENCE: Final = 0.1
"""How likely a word is to be a sentence's last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much is asked for: new tokens of prompt in each turn, and tokens to generate."""

    prompt_tokens: int = 512
    made_tokens: int = 64

    def room_tokens(self, depth_tokens: int) -> int:
        """The context that both turns at a depth take."""
        return depth_tokens + 2 * (self.prompt_tokens + self.made_tokens)


def chosen_depths(asked: Sequence[int] | None, target: Target, shape: Shape) -> tuple[int, ...]:
    """The depths to measure: those asked for, or those of the usual ones that the served context holds.

    Raises:
        UsageError: ``depth-beyond-context``, naming each such depth and the largest possible one, before any request.
    """
    context = target.context_tokens
    wanted = tuple(dict.fromkeys(asked if asked is not None else DEFAULT_DEPTHS))
    if context is None:
        return wanted
    largest = context - shape.room_tokens(0)
    too_deep = [depth for depth in wanted if depth > largest]
    if largest >= 0 and (asked is None or not too_deep):
        return tuple(depth for depth in wanted if depth <= largest)
    names = " and ".join(f"{depth:,}" for depth in too_deep)
    beside = f"two turns of {shape.prompt_tokens} + {shape.made_tokens} tokens come on top of the depth"
    hint = f"--depths {largest} is the deepest" if largest >= 0 else "serve it with a larger --context"
    raise UsageError(
        f"a depth of {names} tokens is beyond the served context of {context:,} per slot",
        code="depth-beyond-context",
        cause=beside,
        hint=hint,
    )


def measure(
    client: BenchClient, target: Target, depths: Sequence[int], *, repeat: int, shape: Shape, listen: Listener
) -> Iterator[Sample | Rejected]:
    """Yield what each request measured, as it ends.

    Raises:
        UsageError, NetworkError, ServerError: As ``BenchClient.stream`` has it.
    """
    talk = _Native(client, shape) if target.is_native else _Chat(client, target.model_name, shape)
    for depth in depths:
        for turn in range(1, repeat + 1):
            for warmth in Warmth:
                new = shape.prompt_tokens + (depth if warmth is Warmth.COLD else 0)
                listen(Step(text=f"depth {depth:,}, {turn} of {repeat}: {warmth}, {new:,} new tokens"))
                before = _load(client, target)
                answer = talk.first(depth) if warmth is Warmth.COLD else talk.second()
                sample = _with_others(_sample(answer, depth, warmth), before, _load(client, target), target.slots)
                yield judge(sample) or sample


def _sample(turn: Turn, depth: int, warmth: Warmth) -> Sample:
    if turn.timings is not None:
        return by_the_server(turn.timings, depth_tokens=depth, warmth=warmth, client_seconds=turn.first_seconds)
    return by_the_client(
        turn.usage,
        depth_tokens=depth,
        warmth=warmth,
        first_seconds=turn.first_seconds,
        last_seconds=turn.last_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server has done so far, in tokens, and how many of its slots are at work; None is unknown."""

    done_tokens: int | None = None
    busy_slots: int | None = None


def _load(client: BenchClient, target: Target) -> Load:
    """Nothing is asked of a server that is not llama.cpp's: it has no such pages, and may log each as an error."""
    if not target.is_native:
        return Load()
    numbers = metrics(client.page("/metrics") or "")
    done = [numbers.get(name) for name in ("prompt_tokens_total", "tokens_predicted_total")]
    slots = client.look("/slots")
    busy = [slot for slot in slots if isinstance(slot, dict) and slot.get("is_processing")] if slots else None
    return Load(
        done_tokens=None if None in done else round(sum(one for one in done if one is not None)),
        busy_slots=len(busy) if isinstance(slots, list) and busy is not None else None,
    )


def _with_others(sample: Sample, before: Load, after: Load, slots: int | None) -> Sample:
    """The sample with what other clients had of the server meanwhile.

    Tokens are counted when a request ends, so one that went on all the while shows as a busy slot alone. In a server
    of one slot others only wait, or make this one wait: its own figures stay what they are.
    """
    sample = replace(sample, is_watched=after.done_tokens is not None or after.busy_slots is not None)
    said = []
    if before.done_tokens is not None and after.done_tokens is not None:
        ours = (sample.prompt_tokens or 0) + (sample.made_tokens or 0)
        if (theirs := after.done_tokens - before.done_tokens - ours) > 0:
            said.append(f"{theirs:,} tokens of other requests")
    if busy := max(before.busy_slots or 0, after.busy_slots or 0):
        said.append(f"{busy} slot{'s' if busy > 1 else ''} at work for others")
    if not said:
        return sample
    return replace(sample, others=" and ".join(said), is_disturbed=slots != 1)


class _Native:
    """Talks in tokens, to llama-server's own endpoint: the depths are exact, and nothing is added by a template."""

    def __init__(self, client: BenchClient, shape: Shape) -> None:
        self._client = client
        self._shape = shape
        self._so_far: list[int] = []

    def first(self, depth: int) -> Turn:
        return self._ask(self._tokens(depth + self._shape.prompt_tokens), cache=False)

    def second(self) -> Turn:
        return self._ask([*self._so_far, *self._tokens(self._shape.prompt_tokens)], cache=True)

    def _ask(self, prompt: list[int], *, cache: bool) -> Turn:
        answer = self._client.stream(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": self._shape.made_tokens,
                "cache_prompt": cache,
                "ignore_eos": True,
                "return_tokens": True,
                # As the model is used: greedy decoding of no real question repeats itself, and so its experts.
                "temperature": 1.0,
            },
        )
        self._so_far = [*prompt, *answer.tokens]
        return answer.turn

    def _tokens(self, count: int) -> list[int]:
        words = count
        while True:
            data = self._client.post("/tokenize", {"content": new_text(words)})
            tokens = data.get("tokens") if isinstance(data, dict) else None
            if not isinstance(tokens, list) or not tokens:
                raise ServerError(f"{self._client.root} no longer turns text into tokens", code="answer-broke-off")
            if len(tokens) >= count:
                return tokens[:count]
            words *= 2


class _Chat:
    """Talks as any OpenAI-compatible server understands it: the depth is as near as words come to tokens."""

    def __init__(self, client: BenchClient, model: str, shape: Shape) -> None:
        self._client = client
        self._model = model
        self._shape = shape
        self._messages: list[Mapping[str, Any]] = []

    def first(self, depth: int) -> Turn:
        self._messages = []
        return self._ask(depth + self._shape.prompt_tokens)

    def second(self) -> Turn:
        return self._ask(self._shape.prompt_tokens)

    def _ask(self, words: int) -> Turn:
        self._messages.append({"role": "user", "content": new_text(words)})
        answer = self._client.stream(
            "/v1/chat/completions",
            {
                "model": self._model,
                "messages": self._messages,
                "max_tokens": self._shape.made_tokens,
                "stream_options": {"include_usage": True},
            },
        )
        self._messages.append(answer.turn.message)
        return answer.turn


def new_text(words: int) -> str:
    """So many everyday words in sentences, never the same twice: their tokens are in no cache."""
    chance = random.SystemRandom()
    return " ".join(chance.choice(_WORDS) + ("." if chance.random() < _SENTENCE else "") for _ in range(words))
