"""Does an endpoint speak the protocol as Kimi K3 needs it? A dozen short requests, and what their replies show.

What is looked for is what went wrong in the field: markers of K3's format left in the text, everything in
``reasoning_content`` and nothing in the answer, a thought that was cut off shown as the answer, tool calls that come
with streaming only, thinking that is not taken back in later turns.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kimigguf.probe.calls import Arm, Call, Fault, MadeCall, Outcome, Reply, Shape
from kimigguf.probe.checkers import call_valid, last_number
from kimigguf.probe.parity import prompt_parity
from kimigguf.probe.suites import Item, Message, Tool, ToolResult

_MARKER: Final = re.compile(r"<\|[a-z_]+\|>|</?think>|<tool_call>|<\|tool_calls?_", re.IGNORECASE)
"""What belongs to a chat format and never into a text."""
_SHORT: Final = 8
_TEMPLATE_SLACK: Final = 2
_TIMER: Final = Tool(
    name="set_timer",
    description="Start a timer.",
    parameters={
        "type": "object",
        "required": ["minutes"],
        "additionalProperties": False,
        "properties": {"minutes": {"type": "integer"}},
    },
)
_STOCK: Final = Tool(
    name="stock",
    description="How many of an article are in store.",
    parameters={"type": "object", "required": ["article"], "properties": {"article": {"type": "string"}}},
)
_SUM: Final = Item(id="sum", prompt="What is 17 + 25? Answer with the number alone.")
_ONE_TIMER: Final = Item(id="timer", prompt="Set a timer for 7 minutes.", tools=(_TIMER,))
_PUZZLE: Final = Item(
    id="puzzle",
    prompt="Five friends sit in a row. Ann sits left of Bo, Bo left of Cy, Di between Ann and Bo, Ed at the right end. "
    "Who sits in the middle? Answer with the name alone.",
)
_THOUGHT: Final = (
    "The user wants me to keep the code word in mind. I will remember heron and answer briefly with OK, and nothing "
    "else, since that is all that was asked of me in this turn."
)


def _second_turn(thinking: str) -> Item:
    said = Message(role="assistant", content="OK", thinking=thinking)
    first = Message(role="user", content="Remember the code word heron. Reply with OK.")
    return Item(id="turn", messages=(first, said), prompt="What was the code word?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request. ``bound`` None: as many tokens as the run allows; ``loop``: ask on until no tool is called."""

    item: Item
    bound: int | None = None
    stream: bool = True
    effort: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    loop: bool = False


STEPS: Final[Mapping[str, Step]] = {
    "text": Step(item=_SUM),
    "text-whole": Step(item=_SUM, stream=False),
    "cut": Step(item=_PUZZLE, bound=_SHORT),
    "tool": Step(item=_ONE_TIMER),
    "tool-whole": Step(item=_ONE_TIMER, stream=False),
    "two-tools": Step(item=Item(id="two", prompt="Set two timers: 7 minutes and 3 minutes.", tools=(_TIMER,))),
    "loop": Step(
        item=Item(
            id="loop",
            prompt="How many saws are in store? Answer with the number alone.",
            tools=(_STOCK,),
            results=(ToolResult(name="stock", content="4179"),),
        ),
        loop=True,
    ),
    "turn-without-thought": Step(item=_second_turn(""), bound=_SHORT),
    "turn-with-thought": Step(item=_second_turn(_THOUGHT), bound=_SHORT),
    "sampling": Step(item=_SUM, bound=_SHORT, extra={"temperature": 1.0, "top_p": 0.95}),
    "low": Step(item=_PUZZLE, effort="low"),
    "max": Step(item=_PUZZLE, effort="max"),
}


class Status(StrEnum):
    PASS = "pass"  # noqa: S105 -- no password
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at on one side, and what was seen."""

    name: str
    status: Status
    seen: str


Found = tuple[Status, str]
Outcomes = Mapping[str, Outcome]


def checks(outcomes: Outcomes) -> tuple[Check, ...]:
    """Everything that the outcomes of ``STEPS`` show. Pure."""
    return tuple(Check(name=name, status=(found := look(outcomes))[0], seen=found[1]) for name, look in _CHECKS.items())


def worse(candidate: tuple[Check, ...], reference: tuple[Check, ...] | None) -> tuple[str, ...]:
    """What fails here and, where there is a reference, does not fail there too."""
    also = {one.name for one in reference or () if one.status is Status.FAIL}
    return tuple(one.name for one in candidate if one.status is Status.FAIL and one.name not in also)


def _reply(outcomes: Outcomes, name: str) -> Reply | None:
    found = outcomes.get(name)
    return found if isinstance(found, Reply) else None


def _missing(outcomes: Outcomes, *names: str) -> Found:
    for name in names:
        found = outcomes.get(name)
        if isinstance(found, Fault):
            return Status.UNKNOWN, f"{found.kind}: {found.text[:120]}"
    return Status.UNKNOWN, "was not asked"


def _finish(outcomes: Outcomes) -> Found:
    wanted = {"text": "stop", "cut": "length", "tool": "tool_calls"}
    seen = {name: reply.finish_reason for name in wanted if (reply := _reply(outcomes, name)) is not None}
    if len(seen) < len(wanted):
        return _missing(outcomes, *wanted)
    tool = _reply(outcomes, "tool")
    if tool is not None and not tool.calls:
        del wanted["tool"]  # it made no call, so it has none to finish with
    cut = _reply(outcomes, "cut")
    if cut is not None and cut.completion_tokens is not None and cut.completion_tokens < _SHORT:
        del wanted["cut"]  # it came to its end before the bound
    if seen["text"] == "length":
        return Status.UNKNOWN, "even a sum did not end within the bound: give a higher --max-tokens"
    wrong = [f"{name}: {seen[name]} for {reason}" for name, reason in wanted.items() if seen[name] != reason]
    return (Status.FAIL, "; ".join(wrong)) if wrong else (Status.PASS, ", ".join(wanted.values()))


def _bound(outcomes: Outcomes) -> Found:
    cut = _reply(outcomes, "cut")
    if cut is None or cut.completion_tokens is None:
        return _missing(outcomes, "cut") if cut is None else (Status.UNKNOWN, "it counts no tokens")
    status = Status.PASS if cut.completion_tokens <= _SHORT + _TEMPLATE_SLACK else Status.FAIL
    return status, f"{cut.completion_tokens} tokens where {_SHORT} were allowed"


def _content(outcomes: Outcomes) -> Found:
    seen = 0
    for name in ("text", "text-whole", "loop"):
        reply = _reply(outcomes, name)
        if reply is None or reply.shape in {Shape.CUT_OFF_THINKING, Shape.FILTERED}:
            continue
        seen += 1
        if reply.shape is Shape.EMPTY:
            where = "all of it stands in reasoning_content" if reply.thinking.strip() else "nor any thinking"
            return Status.FAIL, f"{name}: no content, {where}"
    return (Status.PASS, f"{seen} answers have content") if seen else _missing(outcomes, "text", "text-whole", "loop")


def _markers(outcomes: Outcomes) -> Found:
    replies = [(name, reply) for name in STEPS if (reply := _reply(outcomes, name)) is not None]
    for name, reply in replies:
        for where, text in (("content", reply.content), ("reasoning_content", reply.thinking)):
            found = _MARKER.search(text)
            if found is not None:
                return Status.FAIL, f"{name}: {found[0]!r} in {where}"
    return (Status.PASS, f"none in {len(replies)} replies") if replies else _missing(outcomes, *STEPS)


def _thinking(outcomes: Outcomes) -> Found:
    text = _reply(outcomes, "text")
    if text is None:
        return _missing(outcomes, "text")
    if not text.thinking.strip():
        return Status.UNKNOWN, "no reasoning_content: a model that does not think, or a server that hides it"
    return Status.PASS, f"{len(text.thinking)} characters of reasoning_content"


def _cut_thought(outcomes: Outcomes) -> Found:
    cut, text = _reply(outcomes, "cut"), _reply(outcomes, "text")
    if cut is None or text is None:
        return _missing(outcomes, "cut", "text")
    if not text.thinking.strip():
        return Status.UNKNOWN, "it shows no thinking at all"
    if cut.content.strip() and not cut.thinking.strip():
        return Status.FAIL, f"a thought that was cut off came as the answer: {cut.content.strip()[:60]!r}"
    return Status.PASS, "a thought that was cut off stays a thought"


def _streaming(outcomes: Outcomes) -> Found:
    pairs = [(_reply(outcomes, name), _reply(outcomes, f"{name}-whole")) for name in ("text", "tool")]
    for streamed, whole in pairs:
        if streamed is None or whole is None:
            return _missing(outcomes, "text", "text-whole", "tool", "tool-whole")
        if bool(streamed.thinking.strip()) != bool(whole.thinking.strip()):
            where = "streamed" if streamed.thinking.strip() else "unstreamed"
            return Status.FAIL, f"reasoning_content comes {where} only"
        if None not in {streamed.prompt_tokens, whole.prompt_tokens} and streamed.prompt_tokens != whole.prompt_tokens:
            return Status.FAIL, f"{streamed.prompt_tokens} prompt tokens streamed, {whole.prompt_tokens} not"
    streamed, whole = pairs[1]
    if streamed is not None and whole is not None and bool(streamed.calls) != bool(whole.calls):
        silent = whole if streamed.calls else streamed
        if not silent.content.strip():
            return Status.FAIL, "a tool call comes one way only, and the other way nothing does"
        return Status.UNKNOWN, "it called the tool one way only; that may be chance: ask again"
    return Status.PASS, "the same shape both ways"


def _tool(outcomes: Outcomes) -> Found:
    reply = _reply(outcomes, "tool")
    if reply is None:
        return _missing(outcomes, "tool")
    return _right_calls(reply, _TIMER, 1)


def _two_tools(outcomes: Outcomes) -> Found:
    reply = _reply(outcomes, "two-tools")
    if reply is None:
        return _missing(outcomes, "two-tools")
    if len(reply.calls) == 1:
        return Status.UNKNOWN, "one call where two were asked for: it may want to see a result first"
    return _right_calls(reply, _TIMER, 2)


def _right_calls(reply: Reply, tool: Tool, count: int) -> Found:
    bad = [call for call in reply.calls if not call_valid(call, (tool,))]
    if bad:
        return Status.FAIL, f"arguments that {tool.name} does not take: {_shown(bad[0])}"
    if not reply.calls:
        status = Status.UNKNOWN if reply.shape is Shape.CUT_OFF_THINKING else Status.FAIL
        return status, f"no call ({reply.shape})"
    return (Status.PASS if len(reply.calls) == count else Status.FAIL), "; ".join(map(_shown, reply.calls))


def _shown(call: MadeCall) -> str:
    return f"{call.name} {call.arguments}"[:80]


def _loop(outcomes: Outcomes) -> Found:
    reply = _reply(outcomes, "loop")
    if reply is None:
        return _missing(outcomes, "loop")
    if reply.shape is Shape.CUT_OFF_THINKING:
        return Status.UNKNOWN, "cut off while thinking: give a higher --max-tokens"
    if not reply.calls:
        return Status.FAIL, "it never called the tool"
    if last_number(reply.content) != 4179:  # noqa: PLR2004 -- the tool's result above
        return Status.FAIL, f"the tool's result is not in the answer: {reply.content.strip()[:60]!r}"
    return Status.PASS, f"called, told, answered in {reply.turns} turns"


def _preserved(outcomes: Outcomes) -> Found:
    plain, thought = _reply(outcomes, "turn-without-thought"), _reply(outcomes, "turn-with-thought")
    if plain is None or thought is None:
        return _missing(outcomes, "turn-with-thought", "turn-without-thought")
    if plain.prompt_tokens is None or thought.prompt_tokens is None:
        return Status.UNKNOWN, "it counts no prompt tokens"
    more = thought.prompt_tokens - plain.prompt_tokens
    if more > 10:  # noqa: PLR2004 -- the thought has about 40 tokens
        return Status.PASS, f"a thought of an earlier turn adds {more} prompt tokens"
    seen = f"a thought of an earlier turn adds {more} prompt tokens: it is dropped"
    text = _reply(outcomes, "text")
    thinks = text is not None and bool(text.thinking.strip())
    return (Status.FAIL, seen) if thinks else (Status.UNKNOWN, f"{seen}, by a model that shows no thinking")


def _effort(outcomes: Outcomes) -> Found:
    low, most = _reply(outcomes, "low"), _reply(outcomes, "max")
    if low is None or most is None:
        return _missing(outcomes, "low", "max")
    if low.completion_tokens is None or most.completion_tokens is None:
        return Status.UNKNOWN, "it counts no tokens"
    seen = f"{low.completion_tokens} tokens at low, {most.completion_tokens} at max"
    if most.finish_reason == "length" and low.finish_reason != "length":
        return Status.PASS, f"{seen}, where the bound ended it"
    if not (low.thinking.strip() or most.thinking.strip()) or low.finish_reason == "length":
        return Status.UNKNOWN, seen
    # One question each: chance may turn a small difference round, so only a plain one says something.
    if low.completion_tokens < most.completion_tokens:
        return Status.PASS, seen
    return Status.UNKNOWN, f"{seen}: no more thought at max for this question"


def _sampling(outcomes: Outcomes) -> Found:
    found = outcomes.get("sampling")
    if isinstance(found, Reply):
        return Status.PASS, "temperature 1.0 and top_p 0.95 are taken"
    if isinstance(found, Fault) and found.status is not None and 400 <= found.status < 500:  # noqa: PLR2004 -- HTTP's own
        return Status.FAIL, f"HTTP {found.status}: {found.text[:100]}"
    return _missing(outcomes, "sampling")


_CHECKS: Final[Mapping[str, Callable[[Outcomes], Found]]] = {
    "finish reasons": _finish,
    "the bound on tokens holds": _bound,
    "an answer has content": _content,
    "no markers in the text": _markers,
    "thinking comes apart": _thinking,
    "a cut thought stays a thought": _cut_thought,
    "streaming changes nothing": _streaming,
    "a tool is called": _tool,
    "two tools at once": _two_tools,
    "a tool loop comes to its end": _loop,
    "thinking is taken back": _preserved,
    "effort changes the length": _effort,
    "K3's sampling is taken": _sampling,
}


def parity(candidate: Outcomes, reference: Outcomes) -> str:
    """Whether both count the same prompts alike, in words."""
    sides = ((Arm.CANDIDATE, candidate), (Arm.REFERENCE, reference))
    asked = [
        Call(arm=arm, item=name, repeat=0, outcome=outcome)
        for arm, outcomes in sides
        for name, outcome in outcomes.items()
        if STEPS[name].effort is None and not STEPS[name].loop
    ]
    return prompt_parity(asked).sentence
