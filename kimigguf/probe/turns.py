"""Conversations of more than one turn: how they are sent, and a tool loop asked to its end.

Kimi K3 needs its own thinking and its own calls back in later turns, so both are sent as they came.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from kimigguf.probe.calls import MadeCall, Outcome, Reply
from kimigguf.probe.checkers import call_valid
from kimigguf.probe.suites import Item, Message, ToolResult

MOST_TURNS: Final = 8
"""A model that calls tools for longer than this goes round in circles."""
_NO_SUCH_RESULT: Final = json.dumps({"error": "no result for these arguments"})
_BAD_CALL: Final = json.dumps({"error": "no such tool, or arguments that it does not take"})

AskOnce: TypeAlias = Callable[[Item], Outcome]


def as_sent(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the API takes them; a tool's turn is tied to its call by an id."""
    sent: list[dict[str, Any]] = []
    calls: tuple[MadeCall, ...] = ()
    for index, message in enumerate(conversation):
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.role == "assistant":
            calls = tuple(
                replace(call, id=call.id or f"call-{index}-{place}") for place, call in enumerate(message.calls)
            )
            if calls:
                one["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ]
        if message.role == "tool" and message.call is not None and message.call < len(calls):
            one["tool_call_id"] = calls[message.call].id
        sent.append(one)
    return sent


def ask_on(item: Item, ask: AskOnce) -> Outcome:
    """Ask; while it calls tools that the item has results for, give them back and ask on.

    The outcome is the last reply with what all of them thought, called and cost; a fault in any turn is the outcome.
    """
    said: list[Reply] = []
    asked = item
    while True:
        outcome = ask(asked)
        if not isinstance(outcome, Reply):
            return outcome
        said.append(outcome)
        if not item.results or not outcome.calls or len(said) == MOST_TURNS:
            return outcome if len(said) == 1 else together(said)
        asked = replace(asked, prompt=None, messages=(*asked.conversation, *_answered(item, outcome)))


def _answered(item: Item, reply: Reply) -> tuple[Message, ...]:
    turn = Message(role="assistant", content=reply.content, thinking=reply.thinking, calls=reply.calls)
    results = (Message(role="tool", content=_result(item, call), call=place) for place, call in enumerate(reply.calls))
    return (turn, *results)


def _result(item: Item, call: MadeCall) -> str:
    """What the tool gives back: for just these arguments, else for any; never an answer to a call that is none."""
    if not call_valid(call, item.tools):
        return _BAD_CALL
    arguments = json.loads(call.arguments)

    def fits(result: ToolResult) -> bool:
        return result.arguments is not None and json.loads(json.dumps(result.arguments)) == arguments

    named = [result for result in item.results if result.name == call.name]
    exact = next((result for result in named if fits(result)), None)
    found = exact or next((result for result in named if result.arguments is None), None)
    return _NO_SUCH_RESULT if found is None else found.content


def together(said: Sequence[Reply]) -> Reply:
    """Several turns as one reply: the last one's answer, everyone's calls, thoughts, tokens and time."""
    return replace(
        said[-1],
        thinking="\n\n".join(reply.thinking for reply in said if reply.thinking),
        tool_calls=sum(reply.tool_calls for reply in said),
        calls=tuple(call for reply in said for call in reply.calls),
        prompt_tokens=_sum([reply.prompt_tokens for reply in said]),
        completion_tokens=_sum([reply.completion_tokens for reply in said]),
        first_token_seconds=said[0].first_token_seconds,
        seconds=sum(reply.seconds for reply in said),
        turns=len(said),
        thinking_tokens=_sum([reply.thinking_tokens for reply in said]),
        earlier=tuple(spent for reply in said for spent in reply.earlier),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
