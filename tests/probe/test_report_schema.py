import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_endpoint import Refuse, Say, serve
from fakes.perplexity import SAID
from jsonschema import Draft202012Validator

import kimigguf.probe
from kimigguf.events import ignore
from kimigguf.probe.calls import Arm, FaultKind, Shape
from kimigguf.probe.divergence import Logits, parse
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.session import Request, probe
from kimigguf.probe.teacher_forced import Exact, record, write

SCHEMA: dict[str, Any] = json.loads((Path(kimigguf.probe.__file__).parent / "report.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def problems(report: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(report)]


def suite(folder: Path) -> str:
    tool = {"name": "stock", "description": "What is in store.", "parameters": {"type": "object"}}
    rows: list[dict[str, Any]] = [
        {"id": f"i{n}", "prompt": f"{n}+{n}?", "category": f"c{n % 2}", "check": {"kind": "number", "value": 2 * n}}
        for n in range(12)
    ]
    rows += [{"id": f"r{n}", "prompt": "A letter.", "check": {"kind": "rubric", "rubric": "Kind."}} for n in range(3)]
    rows.append({"id": "tool", "prompt": "How many saws?", "tools": [tool]})
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answer(body: dict[str, Any], number: int) -> Say | Refuse:
    if number % 11 == 5 and not body.get("logprobs"):
        return Refuse(status=400)
    if body.get("tools"):
        return Say(calls=(("stock", "{}"),), finish_reason="tool_calls")
    question = str(body["messages"][0]["content"])
    place = {"token": "4", "bytes": [52], "logprob": -0.1}
    told = ({**place, "top_logprobs": [place]},)
    if "+" not in question:
        return Say(content="Dear you", logprobs=told)
    return Say(content=str(2 * int(question.split("+", maxsplit=1)[0])), thinking="Hm.", logprobs=told)


def plain_run(folder: Path) -> Path:
    out = folder / "plain"
    with serve(answer) as candidate:
        request = Request(candidate=candidate.url, reference=candidate.url, suite=suite(folder), out=out)
        probe(request, {}, agree=lambda *_: True, listen=ignore)
    return out / "report.json"


def full_run(folder: Path) -> Path:
    """Compared token by token, exactly and by a judge, with prices."""
    out, costs = folder / "full", folder / "costs.toml"
    costs.write_text(
        "tasks_per_month = 1000\ncorrection_usd = 2\n[candidate]\nusd_per_hour = 2\noperations_usd_per_month = 50\n"
        "[reference]\nusd_per_million_input = 1\nusd_per_million_output = 10\n"
    )
    found = parse(SAID)
    assert found is not None
    logits = Logits(context_tokens=256, vocabulary=49152, chunks=8)
    write(out, record(Exact(candidate="a.gguf", candidate_bytes=7, reference=None, logits=logits, tool="tool",
                            divergence=found)))  # fmt: skip
    with serve(answer) as candidate, serve(lambda _b, _n: Say(content="VERDICT: B")) as judge:
        candidate.file = "/models/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf"
        request = Request(candidate=candidate.url, reference=candidate.url, suite=suite(folder), out=out, costs=costs,
                          judge=judge.url, token_level=3, repeats=2, max_tokens=32)  # fmt: skip
        probe(request, {}, agree=lambda *_: True, listen=ignore)
    return out / "report.json"


def test_the_schema_is_one_and_says_what_is_what() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema"] == {"const": "kimigguf.quality-probe/1"}
    ours = [one for one in objects(SCHEMA) if "properties" in one]
    assert len(ours) > 15
    for one in ours:
        assert one["additionalProperties"] is False
        optional = {"note"}  # an exact.json that lies in the folder may be older than it
        assert one["required"] == [name for name in one["properties"] if name not in optional]
    numbers = [one for one in objects(SCHEMA["$defs"]) if one.get("type") in ("number", ["number", "null"])]
    assert [one for one in numbers if "description" not in one and "minimum" not in one] == []


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "type" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)


def test_a_new_verdict_shape_or_fault_is_in_the_schema_too() -> None:
    arm = SCHEMA["$defs"]["arm"]["properties"]
    assert SCHEMA["$defs"]["verdict"]["enum"] == list(Verdict)
    assert arm["shapes"]["propertyNames"]["enum"] == list(Shape)
    assert arm["faults"]["propertyNames"]["enum"] == list(FaultKind)
    assert arm["arm"]["enum"] == list(Arm)


def test_a_plain_run_is_as_the_schema_says(tmp_path: Path) -> None:
    report = json.loads(plain_run(tmp_path).read_text("utf-8"))
    assert problems(report) == []
    assert (report["token_level"], report["exact"], report["judged"]) == (None, None, None)
    assert sum(len(arm["faults"]) for arm in report["arms"]) > 0


def test_a_run_with_everything_is_as_the_schema_says_and_nothing_more_or_less(tmp_path: Path) -> None:
    report = json.loads(full_run(tmp_path).read_text("utf-8"))
    assert problems(report) == []
    for part in ("token_level", "cost", "exact", "judged"):
        assert report[part] is not None
    assert report["token_level"]["pair"] is not None
    assert report["cost"]["candidate"]["usd_per_solved_task"] is not None
    assert report["judged"]["difference"] is not None
    for path in paths(report):
        more, less = copy.deepcopy(report), copy.deepcopy(report)
        at(more, path)["surprise"] = 1
        assert problems(more), path
        if (whole := at(less, path)) and path[-1:] not in (("shapes",), ("faults",), ("finish_reasons",)):
            del whole[next(iter(whole))]
            assert problems(less), path


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def paths(value: Any, here: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where an object of ours lies; of a list, in its first element. Finish reasons are the endpoint's own names."""
    if isinstance(value, list) and value:
        yield from paths(value[0], (*here, 0))
    if isinstance(value, dict) and here[-1:] != ("finish_reasons",):
        yield here
        for key, one in value.items():
            yield from paths(one, (*here, key))


@pytest.mark.parametrize("candidate", [Refuse(status=400), Say(thinking="Hm", finish_reason="length")])
def test_a_run_in_which_nothing_could_be_compared_is_as_the_schema_says(tmp_path: Path, candidate: Any) -> None:
    def said(_body: dict[str, Any], number: int) -> Say | Refuse:
        return Say(content="4") if number == 0 else candidate

    with serve(said) as left, serve(lambda _b, _n: Say(content="4", usage=False)) as right:
        request = Request(candidate=left.url, reference=right.url, suite=suite(tmp_path), token_level=2)
        report = probe(request, {}, agree=lambda *_: True, listen=ignore).answer
    assert problems(json.loads(json.dumps(report))) == []
    assert report["token_level"]["pair"] is None
