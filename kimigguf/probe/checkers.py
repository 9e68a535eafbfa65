"""What an answer says, and whether it is right. Pure.

Agreement is judged on what the checker reads from an answer (its number, its JSON), so that two answers that say the
same in other words agree; without a checker on the whole text, normalised.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kimigguf.probe.calls import MadeCall, Reply, Shape
from kimigguf.probe.suites import (
    Checker,
    Exact,
    Item,
    JsonSchema,
    Number,
    PythonTest,
    Regex,
    Rubric,
    Tool,
    ToolCalls,
)

_NUMBER: Final = re.compile(r"[-+\u2212]?(?:\d{1,3}(?:[,\u00a0\u202f]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_FENCE: Final = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)
_WRAPPING: Final = "*_`\"'\u201c\u201d\u2018\u2019\u00ab\u00bb"


def normalised(text: str) -> str:
    """The text without what does not change its meaning: case, runs of blanks, wrapping marks, a full stop."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return _unwrapped(" ".join(text.split()))


def _unwrapped(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = text.strip().strip(_WRAPPING).removesuffix(".").strip()
    return text


def last_number(text: str) -> float | None:
    """The last number in the text; None if there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    digits = re.sub(r"[,\u00a0\u202f]", "", found[-1].replace("\u2212", "-"))
    number = float(digits)
    return number if math.isfinite(number) else None


def json_in(text: str) -> Any:  # noqa: ANN401 -- JSON is of any type
    """The JSON that the text is, or that stands in its one fenced block.

    Raises:
        ValueError: There is none.
    """
    fenced = _FENCE.findall(text)
    return json.loads(fenced[0] if len(fenced) == 1 else text.strip())


def passed(item: Item, reply: Reply) -> bool | None:
    """Whether a reply passes the item's check; None where nothing can be said: no check, or one that was not run."""
    match item.check:
        case None | Rubric():
            return None
        case ToolCalls() as check:
            return calls_right(check, item.tools, reply)
        case PythonTest():
            return None if reply.tested is None else reply.tested.passed
    return reply.shape is Shape.ANSWERED and right(item, reply.content) is True


def right(item: Item, answer: str) -> bool | None:
    """Whether the answer passes the item's check; None where it has none that its text alone can pass."""
    match item.check:
        case None | ToolCalls() | PythonTest() | Rubric():
            return None
        case Exact() as check:
            wanted = check.values if check.value is None else (check.value, *check.values)
            if check.ignore_case:
                return normalised(answer) in {normalised(value) for value in wanted}
            return _unwrapped(answer) in {_unwrapped(value) for value in wanted}
        case Regex(pattern=pattern):
            return re.search(pattern, answer) is not None
        case Number() as check:
            number = last_number(answer)
            return number is not None and abs(number - check.value) <= check.tolerance
        case JsonSchema() as check:
            return _fits(check, answer)


def _fits(check: JsonSchema, answer: str) -> bool:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 -- needed by suites that use it only

    try:
        value = json_in(answer)
    except ValueError:
        return False
    if check.value is not None and value != json.loads(json.dumps(check.value)):
        return False
    return bool(Draft202012Validator(json.loads(json.dumps(check.schema))).is_valid(value))


def meaning(check: Checker | None, answer: str) -> str:
    """What the answer says in a form that can be compared: equal strings mean the same."""
    match check:
        case Number():
            number = last_number(answer)
            if number is not None:
                return repr(number)
        case Regex(pattern=pattern):
            found = re.search(pattern, answer)
            if found is not None:
                return normalised(found[1] if found.re.groups and found[1] is not None else found[0])
        case JsonSchema():
            try:
                return json.dumps(json_in(answer), sort_keys=True)
            except ValueError:
                pass
        case Exact() | ToolCalls() | PythonTest() | Rubric() | None:
            pass
    return normalised(answer)


def calls_right(check: ToolCalls, tools: Sequence[Tool], reply: Reply) -> bool:
    """Whether the calls are the wanted ones, in any order and with arguments that their tools allow."""
    if not check.calls:
        return not reply.calls and bool(reply.content.strip())
    left = list(reply.calls)
    for wanted in check.calls:
        found = next((call for call in left if _is_wanted(call, wanted.name, wanted.arguments)), None)
        if found is None or not call_valid(found, tools):
            return False
        left.remove(found)
    return not left


def _is_wanted(call: MadeCall, name: str, arguments: Mapping[str, Any] | None) -> bool:
    return call.name == name and (arguments is None or _arguments(call) == json.loads(json.dumps(arguments)))


def _arguments(call: MadeCall) -> Any:  # noqa: ANN401 -- JSON is of any type
    try:
        return json.loads(call.arguments)
    except ValueError:
        return None


def call_valid(call: MadeCall, tools: Sequence[Tool]) -> bool:
    """Whether a call names one of the tools, with arguments that are JSON and fit its schema."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 -- needed by suites that use it only

    tool = next((tool for tool in tools if tool.name == call.name), None)
    arguments = _arguments(call)
    if tool is None or not isinstance(arguments, dict):
        return False
    return bool(Draft202012Validator(json.loads(json.dumps(tool.parameters))).is_valid(arguments))


def said(item: Item, reply: Reply) -> str:
    """What a reply says in a form that can be compared: its calls where it may make some, else its answer's meaning."""
    if not item.tools:
        return meaning(item.check, reply.content)
    made = sorted(json.dumps([call.name, _arguments(call)], sort_keys=True) for call in reply.calls)
    return json.dumps(made)


def code_in(text: str) -> str:
    """The Python of an answer: its fenced blocks one after the other, else all of it."""
    return "\n".join(_FENCE.findall(text)) or text
