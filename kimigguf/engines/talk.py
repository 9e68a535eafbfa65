"""A talk with an assistant as a value, and the file it is saved in.

All that the assistant said stays in it as it came, thinking and tool calls included: Kimi K3 expects both back in later
turns, and gets worse without any error where they are missing.
"""

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from kimigguf.engines.printable import sendable
from kimigguf.engines.turn import Turn
from kimigguf.errors import UsageError
from kimigguf.hardware.machines import give_name

Message = Mapping[str, Any]
SCHEMA: Final = "kimigguf.talk/1"
_MAX_BYTES: Final = 256 << 20
_ROLES: Final = ("system", "user", "assistant", "tool")
"""No set: what stands in a file need not be hashable."""
_DECLINED: Final = "The user declined this call."


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """The messages so far, oldest first, as the API has them. ``cut`` are the places of answers that were stopped."""

    messages: tuple[Message, ...] = ()
    cut: tuple[int, ...] = ()

    @property
    def questions(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def waits_for_an_answer(self) -> bool:
        """Whether the assistant has the word: after a question, or after the result of its last open tool call."""
        return bool(self.messages) and self.messages[-1]["role"] in {"user", "tool"} and not open_calls(self)


def new_talk(system: str | None) -> Talk:
    """A talk that has not begun, with the system message if there is one."""
    return Talk(messages=({"role": "system", "content": sendable(system)},) if system else ())


def beginning(talk: Talk) -> Talk:
    """The talk before its first question: what ``/new`` goes back to."""
    return Talk(messages=tuple(itertools.takewhile(lambda message: message["role"] == "system", talk.messages)))


def ask(talk: Talk, text: str) -> Talk:
    """The talk with a question."""
    return replace(talk, messages=(*talk.messages, {"role": "user", "content": sendable(text)}))


def answered(talk: Talk, turn: Turn) -> Talk:
    """The talk with the whole of an answer."""
    cut = (*talk.cut, len(talk.messages)) if turn.cut else talk.cut
    return Talk(messages=(*talk.messages, turn.message), cut=cut)


def open_calls(talk: Talk) -> tuple[Message, ...]:
    """The tool calls of the last answer that have no result yet, in order."""
    for place in range(len(talk.messages) - 1, -1, -1):
        match talk.messages[place]:
            case {"role": "tool"}:
                continue
            case {"role": "assistant", "tool_calls": [*calls]}:
                done = len(talk.messages) - 1 - place  # by place: not every server gives its calls an id
                return tuple(calls[done:])
            case _:
                break
    return ()


def with_result(talk: Talk, result: str | None) -> Talk:
    """The talk with the result of its first open tool call; None declines it."""
    call = open_calls(talk)[0]
    message = {
        "role": "tool",
        "tool_call_id": call.get("id", ""),
        "name": call["function"]["name"],
        "content": _DECLINED if result is None else sendable(result),
    }
    return replace(talk, messages=(*talk.messages, message))


def without_last_answer(talk: Talk) -> Talk | None:
    """The talk up to where its last answer began; None where there is no answer to take back."""
    for place in range(len(talk.messages) - 1, -1, -1):
        if talk.messages[place]["role"] == "assistant":
            return Talk(messages=talk.messages[:place], cut=tuple(cut for cut in talk.cut if cut < place))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTalk:
    """A talk as it lies in a file, with what was asked of the server beside the messages."""

    schema: Literal["kimigguf.talk/1"]
    messages: tuple[dict[str, Any], ...]
    cut: tuple[int, ...] = ()
    model: str | None = None
    effort: str | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def talk(self) -> Talk:
        return Talk(messages=self.messages, cut=self.cut)


def saved(talk: Talk, *, model: str, effort: str | None, tools: tuple[Message, ...]) -> SavedTalk:
    """What ``save_talk`` writes."""
    messages = tuple(dict(message) for message in talk.messages)
    return SavedTalk(
        schema=SCHEMA, messages=messages, cut=talk.cut, model=model, effort=effort, tools=tuple(map(dict, tools))
    )


def save_talk(talk: SavedTalk, path: Path, *, overwrite: bool = False) -> None:
    """Write a talk whole or not at all, readable by its owner alone.

    Raises:
        UsageError: ``file-exists`` unless ``overwrite``, ``cannot-write`` with the system's reason.
    """
    from pydantic import TypeAdapter  # noqa: PLC0415 -- kept out of `kimigguf --help`

    record = TypeAdapter(SavedTalk).dump_python(talk, mode="json", exclude_none=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    exists = UsageError(f"{path} exists", code="file-exists", hint="choose another name")
    try:
        if path.exists() and not overwrite:
            raise exists
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        give_name(temporary, path, overwrite=overwrite)
    except FileExistsError as error:  # another process was quicker
        raise exists from error
    except OSError as error:
        hint = "choose a folder that is there and that you may write"
        raise UsageError(f"cannot write {path}", code="cannot-write", cause=error.strerror, hint=hint) from error
    finally:
        with suppress(OSError):  # gone by its own name, or never there
            temporary.unlink()


def load_talk(path: Path) -> SavedTalk:
    """The talk in a file that ``/save`` wrote.

    Raises:
        UsageError: ``bad-talk``, naming what is wrong with it.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    hint = "/save FILE in a chat writes one"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large to be a talk", code="bad-talk", hint=hint)
        read = TypeAdapter(SavedTalk).validate_json(path.read_bytes(), extra="ignore")
    except OSError as error:
        raise UsageError(f"cannot read the talk {path}", code="bad-talk", cause=error.strerror, hint=hint) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        cause = f"{where}: {first['msg']}"
        raise UsageError(f"{path} holds no talk", code="bad-talk", cause=cause, hint=hint) from error
    if problem := _problem(read.messages):
        raise UsageError(f"{path} holds no talk", code="bad-talk", cause=problem, hint=hint)
    return read


def _problem(messages: tuple[Message, ...]) -> str | None:
    """What no server would take of the messages, in words."""
    for place, message in enumerate(messages):
        if message.get("role") not in _ROLES:
            return f"messages.{place}: its role is none of system, user, assistant and tool"
        if not isinstance(message.get("content", ""), str | list | None):
            return f"messages.{place}: its content is no text"
        calls = message.get("tool_calls") or []
        for call in calls if isinstance(calls, list) else [None]:
            match call:
                case {"function": {"name": str(), "arguments": str()}}:
                    continue
            return f"messages.{place}: a tool call without name and arguments"
    return None


def load_tools(path: Path) -> tuple[Message, ...]:
    """The tool definitions in a JSON file: a list as the API takes it, or of the bare functions.

    Raises:
        UsageError: ``bad-tools``.
    """
    hint = 'as in: [{"name": "get_time", "parameters": {"type": "object", "properties": {}}}]'
    try:
        read = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the tools {path}", code="bad-tools", cause=error.strerror, hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON", code="bad-tools", cause=str(error), hint=hint) from error
    tools: list[Message] = []
    for place, entry in enumerate(read if isinstance(read, list) else [read]):
        tool = {"type": "function", "function": entry} if isinstance(entry, dict) and "function" not in entry else entry
        match tool:
            case {"function": {"name": str()}}:
                tools.append({"type": "function"} | tool)
            case _:
                raise UsageError(
                    f"{path} holds no tools", code="bad-tools", cause=f"entry {place} has no name", hint=hint
                )
    return tuple(tools)
