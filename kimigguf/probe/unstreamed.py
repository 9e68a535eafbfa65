"""A reply that came in one piece, read as a streamed one is."""

from typing import Any

from kimigguf.engines.printable import sendable
from kimigguf.probe.calls import MadeCall, Reply


def whole_reply(completion: Any, seconds: float, max_tokens: int | None) -> Reply | None:  # noqa: ANN401 -- see below
    """The first choice as a reply; None where there is none. The library's types know no ``reasoning_content``."""
    if not completion.choices:
        return None
    choice, usage = completion.choices[0], completion.usage
    message = choice.message
    details = None if usage is None else usage.completion_tokens_details
    calls = tuple(
        MadeCall(
            name=sendable(call.function.name or ""),
            arguments=sendable(call.function.arguments or ""),
            id=sendable(call.id or ""),
        )
        for call in message.tool_calls or ()
        if getattr(call, "function", None) is not None
    )
    return Reply(
        content=sendable(message.content or ""),
        thinking=sendable(getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""),
        finish_reason=choice.finish_reason,
        tool_calls=len(message.tool_calls or ()),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        thinking_tokens=None if details is None else details.reasoning_tokens,
        first_token_seconds=None,
        seconds=seconds,
        max_tokens=max_tokens,
        calls=calls,
    )
