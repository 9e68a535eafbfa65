"""Suites: questions with a way to check the answer, as plain files that a user can write for their own work.

TOML (one ``[[items]]`` table each) or JSONL (one item a line)::

    [[items]]
    id = "arithmetic-1"
    prompt = "What is 17 * 23? Answer with the number alone."
    check = { kind = "number", value = 391 }

Kinds of check: ``exact`` (value or values), ``regex`` (pattern), ``number`` (value, tolerance), ``json-schema``
(schema, and optionally the value itself), ``tool-calls`` (calls), ``python-test`` (code that is run after the answer's
own, in a sandbox), ``rubric`` (what a judge endpoint holds two answers against; never counted among the checked ones).
An item without a check is only compared. ``results`` of an item are what its tools give back: a call is then answered
and the model asked on until it makes no more, and the check is held against what was said and called in all.
"""

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Discriminator, TypeAdapter, ValidationError

from kimigguf import profile_files
from kimigguf.errors import UsageError
from kimigguf.home import from_home
from kimigguf.probe.calls import MadeCall

_MAX_JSONL_BYTES: Final = 64 << 20
_HINT: Final = "see the shipped ones in profiles/suites for the form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The whole answer is one of ``values``, but for case, blanks, quotes, markdown and a final full stop."""

    kind: Literal["exact"] = "exact"
    value: str | None = None
    values: tuple[str, ...] = ()
    ignore_case: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex:
    """``pattern`` is found in the answer (Python's syntax); its first group, if any, is what is compared."""

    kind: Literal["regex"] = "regex"
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The last number in the answer is ``value``, give or take ``tolerance``."""

    kind: Literal["number"] = "number"
    value: float
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema:
    """The answer is JSON (alone or in one fenced block) that ``schema`` allows, and equals ``value`` if given."""

    kind: Literal["json-schema"] = "json-schema"
    schema: Mapping[str, Any]
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCall:
    """A tool that must be called, with exactly these arguments; None: with any that its parameters allow."""

    name: str
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """Exactly these tools are called, in any order; none at all if ``calls`` is empty, and there is an answer then."""

    kind: Literal["tool-calls"] = "tool-calls"
    calls: tuple[WantedCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTest:
    """The answer's code (its fenced blocks, else all of it) runs, and then ``code`` does: nothing may raise.

    Standard library only; ``code`` sees the names that the answer defines. See ``probe.sandbox`` for the limits.
    """

    kind: Literal["python-test"] = "python-test"
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """A judge endpoint says which of two answers meets ``rubric`` better, blind and in both orders."""

    kind: Literal["rubric"] = "rubric"
    rubric: str


Checker: TypeAlias = Annotated[
    Exact | Regex | Number | JsonSchema | ToolCalls | PythonTest | Rubric, Discriminator("kind")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the tool ``name`` gives back when called with ``arguments``; None: with any that no other result has."""

    name: str
    content: str
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. An assistant's may carry its thinking and its calls; a tool's names the call that it answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thinking: str = ""
    calls: tuple[MadeCall, ...] = ()
    call: int | None = None
    """For a tool's turn: which call of the assistant's turn before it this answers, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question: ``prompt``, or ``messages`` for more turns. Without ``max_tokens`` or ``tools``: the suite's.

    Items of one ``template`` are variants of each other; statistics count them as one cluster.
    """

    id: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    check: Checker | None = None
    category: str = "general"
    template: str | None = None
    max_tokens: int | None = None
    tools: tuple[Tool, ...] = ()
    results: tuple[ToolResult, ...] = ()
    tokens: int | None = None
    """About how long it is, where it is long on purpose: a candidate that serves less context is not asked."""

    @property
    def conversation(self) -> tuple[Message, ...]:
        return self.messages if self.prompt is None else (*self.messages, Message(role="user", content=self.prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A named list of items. ``max_tokens`` bounds an answer with its thinking; None: the endpoint's own bound.

    ``generate`` maps templates (see ``probe.generators``) to counts; their items, drawn by ``seed``, follow the written
    ones when the suite is loaded.
    """

    name: str
    items: tuple[Item, ...] = ()
    tools: tuple[Tool, ...] = ()
    generate: Mapping[str, int] = field(default_factory=dict, hash=False)
    seed: int = 0
    title: str = ""
    note: str | None = None
    licence: str | None = None
    max_tokens: int | None = None
    sha256: str = field(default="", compare=False)
    """Of all its items, so that a report says which questions it stands on."""


def load_suite(text: str, environ: Mapping[str, str], *, seed: int | None = None) -> Suite:
    """The suite of that name (the user's own before the shipped ones), or the file of that path.

    ``seed`` draws other questions from the suite's templates than its own seed would.

    Raises:
        UsageError: ``unknown-profile``, ``bad-profile`` or ``bad-suite``, naming the item and what is wrong with it.
    """
    path = from_home(text)
    if path.suffix not in {".toml", ".jsonl"} and "/" not in text:
        path = profile_files.find("suites", text, environ)
    suite = _from_jsonl(path) if path.suffix == ".jsonl" else profile_files.load(path, Suite)
    suite = suite if seed is None else replace(suite, seed=seed)
    items = tuple(replace(item, tools=item.tools or suite.tools) for item in suite.items)
    suite = replace(suite, items=(*items, *_generated(suite)))
    check_suite(suite, path)
    return replace(suite, sha256=hashlib.sha256(_as_text(suite.items).encode()).hexdigest())


def sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """How many questions each suite has that is known by name; one of the user's that cannot be read is left out."""
    found = {}
    for name in profile_files.names("suites", environ):
        with suppress(UsageError):  # whoever asks it is told what is wrong with it
            suite = profile_files.read("suites", name, Suite, environ)
            found[name] = len(suite.items) + sum(suite.generate.values())
    return found


def _generated(suite: Suite) -> tuple[Item, ...]:
    from kimigguf.probe.generators import make  # noqa: PLC0415 -- it makes items of the types here

    return tuple(item for template, count in suite.generate.items() for item in make(template, count, suite.seed))


def as_jsonl(suite: Suite) -> str:
    """The suite's items as a suite of their own, with the same hash: one that is asked again wherever it came from."""
    plain = TypeAdapter(tuple[Item, ...]).dump_python(suite.items, mode="json")
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in plain)


def _as_text(items: tuple[Item, ...]) -> str:
    """The items as JSON: the same text for the same items, however the file is written."""
    plain = TypeAdapter(tuple[Item, ...]).dump_python(items, mode="json")
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _from_jsonl(path: Path) -> Suite:
    adapter = TypeAdapter(Item)
    items = []
    try:
        if path.stat().st_size > _MAX_JSONL_BYTES:
            raise UsageError(f"{path} is too large to be a suite", code="bad-suite", hint=_HINT)
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}", code="bad-suite", cause=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", code="bad-suite", cause=str(error)) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(adapter.validate_json(line, extra="forbid"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "line"
            raise UsageError(f"{path}, line {number}: {where}: {first['msg']}", code="bad-suite", hint=_HINT) from error
    return Suite(name=path.stem, items=tuple(items))


def check_suite(suite: Suite, where: object) -> None:
    """Hold a suite to what its types cannot say.

    Raises:
        UsageError: ``bad-suite``.
    """
    if not suite.items:
        raise UsageError(f"{where} has no items", code="bad-suite", hint=_HINT)
    for name, count in Counter(item.id for item in suite.items).items():
        if count > 1:
            raise UsageError(f"{where}: the id {name!r} is given to {count} items", code="bad-suite", hint=_HINT)
    for item in suite.items:
        problem = _problem(item)
        if problem is not None:
            raise UsageError(f"{where}: item {item.id!r}: {problem}", code="bad-suite", hint=_HINT)


def _problem(item: Item) -> str | None:
    if not item.conversation or item.conversation[-1].role != "user":
        return "needs a prompt, or messages that end with the user's"
    schemas = [tool.parameters for tool in item.tools]
    if isinstance(item.check, JsonSchema):
        schemas.append(item.check.schema)
    if strange := sorted({result.name for result in item.results} - {tool.name for tool in item.tools}):
        return f"it has results of {', '.join(strange)}, but no such tool"
    return _check_problem(item) or next((problem for schema in schemas if (problem := _schema_problem(schema))), None)


def _check_problem(item: Item) -> str | None:  # noqa: PLR0911 -- a table of checks
    match item.check:
        case Exact(value=None, values=()):
            return "an exact check needs value or values"
        case Regex(pattern=pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                return f"its pattern is no regular expression: {error}"
        case Number(tolerance=tolerance) if tolerance < 0:
            return "its tolerance is negative"
        case ToolCalls(calls=calls):
            known = {tool.name for tool in item.tools}
            strange = sorted({call.name for call in calls} - known)
            if not known or strange:
                return f"it is to call {', '.join(strange) or 'tools'}, but has no such tool"
        case PythonTest(code=code):
            return _code_problem(code)
        case Rubric(rubric=rubric) if not rubric.strip():
            return "its rubric is empty"
    return None


def _code_problem(code: str) -> str | None:
    if not code.strip():
        return "its test has no code"
    try:
        ast.parse(code)
    except (SyntaxError, ValueError) as error:
        return f"its test is no Python: {error}"
    return None


def _schema_problem(schema: Mapping[str, Any]) -> str | None:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 -- needed by suites that use it only
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415 -- as above
    from referencing import Registry  # noqa: PLC0415 -- as above
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 -- as above
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415 -- as above

    plain = json.loads(json.dumps(schema))
    try:
        Draft202012Validator.check_schema(plain)
    except SchemaError as error:
        return f"its schema is none: {error.message}"
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(plain))
    for reference in _references(plain):
        try:
            resolver.lookup(reference)
        except Unresolvable:  # by checking an answer with it, a file or an address would be looked for
            return f"its schema refers to {reference!r}, which is not in it"
    return None


def _references(schema: Any) -> Iterator[str]:  # noqa: ANN401 -- JSON is of any type
    """Every ``$ref`` in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
