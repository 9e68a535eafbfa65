import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_endpoint import Say, serve

from kimigguf.errors import UsageError
from kimigguf.events import ignore
from kimigguf.probe.calls import MadeCall, Reply, Shape
from kimigguf.probe.checkers import call_valid, calls_right, said
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.session import Request, probe
from kimigguf.probe.suites import Exact, Item, Number, Tool, ToolCalls, ToolResult, WantedCall, load_suite
from kimigguf.probe.triggers import Triggers

TIMER = Tool(
    name="set_timer",
    description="Start a timer.",
    parameters={"type": "object", "required": ["minutes"], "properties": {"minutes": {"type": "integer"}}},
)
SEVEN = WantedCall(name="set_timer", arguments={"minutes": 7})
THREE = WantedCall(name="set_timer", arguments={"minutes": 3})


def reply(*calls: tuple[str, str], content: str = "") -> Reply:
    return Reply(
        content=content, thinking="", finish_reason="tool_calls" if calls else "stop", tool_calls=len(calls),
        prompt_tokens=None, completion_tokens=None, first_token_seconds=None, seconds=1.0, max_tokens=None,
        calls=tuple(MadeCall(name=name, arguments=arguments) for name, arguments in calls),
    )  # fmt: skip


def made_of(result: ToolResult) -> MadeCall:
    return MadeCall(name=result.name, arguments=json.dumps(dict(result.arguments or {})))


@pytest.mark.parametrize(
    ("wanted", "made", "right"),
    [
        ((SEVEN,), reply(("set_timer", '{"minutes": 7}')), True),
        ((SEVEN,), reply(("set_timer", '{"minutes":7}'), content="Starting it."), True),
        ((SEVEN,), reply(("set_timer", '{"minutes": 8}')), False),
        ((SEVEN,), reply(("set_timer", '{"minutes": "7"}')), False),
        ((SEVEN,), reply(("set_timer", '{"minutes": 7')), False),
        ((SEVEN,), reply(("start_timer", '{"minutes": 7}')), False),
        ((SEVEN,), reply(("set_timer", '{"minutes": 7}'), ("set_timer", '{"minutes": 7}')), False),
        ((SEVEN,), reply(content="I set it."), False),
        ((SEVEN, THREE), reply(("set_timer", '{"minutes": 3}'), ("set_timer", '{"minutes": 7}')), True),
        ((SEVEN, THREE), reply(("set_timer", '{"minutes": 7}')), False),
        ((WantedCall(name="set_timer"),), reply(("set_timer", '{"minutes": 99}')), True),
        ((WantedCall(name="set_timer"),), reply(("set_timer", '{"hours": 99}')), False),
        ((), reply(content="Oslo."), True),
        ((), reply(), False),
        ((), reply(("set_timer", '{"minutes": 7}')), False),
    ],
)
def test_calls_are_right_in_any_order_and_wrong_in_any_detail(
    wanted: tuple[WantedCall, ...], made: Reply, right: bool
) -> None:
    assert calls_right(ToolCalls(calls=wanted), (TIMER,), made) is right


@pytest.mark.parametrize("arguments", ["", "7", "[]", "null", "{", '{"minutes": 1.5}'])
def test_arguments_that_their_schema_does_not_allow_are_invalid(arguments: str) -> None:
    assert call_valid(MadeCall(name="set_timer", arguments=arguments), (TIMER,)) is False


def test_two_replies_agree_when_their_calls_do_whatever_they_chat() -> None:
    item = Item(id="x", prompt="?", tools=(TIMER,))
    one = reply(("set_timer", '{"minutes": 7}'), content="On it!")
    assert said(item, one) == said(item, reply(("set_timer", '{ "minutes":7 }')))
    assert said(item, one) != said(item, reply(content="On it!"))


def test_tools_are_declared_and_calls_put_together_from_their_pieces() -> None:
    with serve(lambda _body, _n: Say(calls=(("set_timer", '{"minutes": 7}'),), finish_reason="tool_calls")) as endpoint:
        with closing(Asker("candidate", endpoint.url, {}, Settings())) as asker:
            got = asker.ask(asker.endpoint(None), Item(id="a", prompt="?", tools=(TIMER,)), None)
        assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "set_timer"
    assert isinstance(got, Reply)
    assert (got.shape, got.calls) == (Shape.CALLED_TOOL, (MadeCall(name="set_timer", arguments='{"minutes": 7}'),))


def test_the_shipped_suite_gives_its_tools_to_every_item() -> None:
    suite = load_suite("tools", {})
    loops = [item for item in suite.items if item.results]
    assert (len(suite.items), len(loops)) == (26, 6)
    assert {len(item.tools) for item in suite.items} == {3}
    for item in suite.items:
        if item.results:
            assert all(call_valid(made_of(result), item.tools) for result in item.results)
            continue
        assert isinstance(item.check, ToolCalls)
        wanted = [(call.name, json.dumps(dict(call.arguments or {}))) for call in item.check.calls]
        assert calls_right(item.check, item.tools, reply(*wanted, content="" if wanted else "Oslo."))


def test_a_call_of_a_tool_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'name = "bad"\n[[items]]\nid = "a"\nprompt = "b"\ncheck = { kind = "tool-calls", calls = [{ name = "fly" }] }\n'
    )
    with pytest.raises(UsageError, match="fly"):
        load_suite(str(path), {})


def test_a_candidate_whose_calls_come_as_text_is_found(tmp_path: Path) -> None:
    """K3's own failure: the markers of a tool call in the content, and no call."""
    items = {item.conversation[-1].content: item for item in load_suite("tools", {}).items}

    def good(body: dict[str, Any], _number: int) -> Say:
        item = items[body["messages"][0]["content"]]
        check = item.check
        if item.results and len(body["messages"]) == 1:
            calls = tuple((call.name, call.arguments) for call in map(made_of, item.results))
            return Say(calls=calls, finish_reason="tool_calls")
        if not isinstance(check, ToolCalls):
            assert isinstance(check, Number | Exact)
            return Say(content=str(check.value))
        made = tuple((call.name, json.dumps(dict(call.arguments or {}))) for call in check.calls)
        return Say(content="" if made else "Gladly.", calls=made, finish_reason="tool_calls" if made else "stop")

    def leaking(body: dict[str, Any], number: int) -> Say:
        right = good(body, number)
        return right if not right.calls else Say(content='<|open|>call tool="set_timer"<|sep|>')

    with serve(leaking) as candidate, serve(good) as reference:
        request = Request(candidate=candidate.url, reference=reference.url, suite="tools", parallel=4)
        found = probe(request, {}, agree=lambda *_: False, listen=ignore)
    assert found.scores.verdict is Verdict.WORSE
    ours, theirs = found.scores.arms[0], found.scores.arms[1]
    assert (found.scores.triggers.recall, found.scores.triggers.f1) == (0.0, 0.0)
    assert found.answer["tool_triggers_noise"]["f1"] == 1.0
    assert (ours.right, ours.calls_made, theirs.right, theirs.calls_valid, theirs.calls_made) == (6, 0, 26, 31, 31)


@pytest.mark.parametrize(
    ("counts", "precision", "recall", "f1"),
    [((6, 2, 2, 5), 0.75, 0.75, 0.75), ((3, 0, 3, 0), 1.0, 0.5, 2 / 3), ((0, 0, 0, 4), None, None, None)],
)
def test_trigger_shares_are_those_of_the_textbook(
    counts: tuple[int, int, int, int], precision: float | None, recall: float | None, f1: float | None
) -> None:
    found = Triggers(both=counts[0], only_here=counts[1], only_reference=counts[2], neither=counts[3])
    assert (found.precision, found.recall, found.f1) == (precision, recall, f1)
