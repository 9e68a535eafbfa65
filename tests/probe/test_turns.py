import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_endpoint import Refuse, Say, serve

from kimigguf.errors import UsageError
from kimigguf.probe.calls import Fault, MadeCall, Outcome, Reply
from kimigguf.probe.checkers import passed
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.suites import Item, Message, Number, Tool, ToolResult, load_suite
from kimigguf.probe.turns import MOST_TURNS, as_sent

STOCK = Tool(
    name="stock",
    description="How many of an article are in store.",
    parameters={"type": "object", "required": ["article"], "properties": {"article": {"type": "string"}}},
)
ITEM = Item(
    id="loop",
    prompt="How many saws and drills are there together?",
    tools=(STOCK,),
    results=(
        ToolResult(name="stock", content="17", arguments={"article": "saw"}),
        ToolResult(name="stock", content="25", arguments={"article": "drill"}),
    ),
    check=Number(value=42),
)


def asked(answer: Callable[[dict[str, Any], int], Say | Refuse], item: Item = ITEM) -> tuple[Outcome, list[Any]]:
    with serve(answer) as endpoint, closing(Asker("candidate", endpoint.url, {}, Settings(tries=1))) as asker:
        return asker.ask(asker.endpoint(None), item, None), endpoint.bodies


def one_by_one(body: dict[str, Any], _number: int) -> Say:
    """A model that asks for one article at a time and adds up what it was told."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if len(results) == 2:
        return Say(content=f"There are {sum(map(int, results))}.", thinking="Both are here.")
    article = ("saw", "drill")[len(results)]
    call = ("stock", json.dumps({"article": article}))
    return Say(thinking=f"The {article} next.", calls=(call,), finish_reason="tool_calls")


def test_a_tool_loop_is_asked_to_its_end() -> None:
    got, bodies = asked(one_by_one)
    assert isinstance(got, Reply)
    assert (got.content, got.turns, len(bodies)) == ("There are 42.", 3, 3)
    assert [json.loads(call.arguments)["article"] for call in got.calls] == ["saw", "drill"]
    assert passed(ITEM, got) is True
    assert got.prompt_tokens == 33


def test_thinking_and_calls_go_back_in_later_turns_as_they_came() -> None:
    _, bodies = asked(one_by_one)
    turn, result = bodies[1]["messages"][1:]
    assert turn["reasoning_content"].strip() == "The saw next."
    assert turn["tool_calls"][0]["function"] == {"name": "stock", "arguments": '{"article": "saw"}'}
    assert (result["role"], result["content"]) == ("tool", "17")
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"] == "c0"


def test_calls_made_at_once_get_each_its_own_result() -> None:
    def at_once(body: dict[str, Any], _number: int) -> Say:
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if results:
            assert results == ["25", "17"]
            return Say(content="42")
        calls = tuple(("stock", json.dumps({"article": article})) for article in ("drill", "saw"))
        return Say(calls=calls, finish_reason="tool_calls")

    got, bodies = asked(at_once)
    assert isinstance(got, Reply)
    assert (got.turns, len(got.calls), passed(ITEM, got)) == (2, 2, True)
    ids = [call["id"] for call in bodies[1]["messages"][1]["tool_calls"]]
    assert [message["tool_call_id"] for message in bodies[1]["messages"][2:]] == ids


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"article": "anvil"}', "no result"), ("{", "no such tool"), ('{"name": "saw"}', "no such")],
)
def test_a_call_that_has_no_result_is_told_so_and_not_helped(arguments: str, told: str) -> None:
    def answer(_body: dict[str, Any], number: int) -> Say:
        return Say(calls=(("stock", arguments),), finish_reason="tool_calls") if number == 0 else Say(content="unknown")

    got, bodies = asked(answer)
    assert isinstance(got, Reply)
    assert told in bodies[1]["messages"][-1]["content"]
    assert passed(ITEM, got) is False


def test_a_model_that_never_stops_calling_is_wrong_and_not_asked_for_ever() -> None:
    got, bodies = asked(
        lambda _body, _number: Say(calls=(("stock", '{"article": "saw"}'),), finish_reason="tool_calls")
    )
    assert isinstance(got, Reply)
    assert (len(bodies), got.turns, passed(ITEM, got)) == (MOST_TURNS, MOST_TURNS, False)


def test_a_fault_in_a_later_turn_is_no_wrong_answer() -> None:
    got, _ = asked(lambda body, n: one_by_one(body, n) if n == 0 else Refuse(status=500))
    assert isinstance(got, Fault)


def test_without_results_a_call_ends_the_question() -> None:
    got, bodies = asked(one_by_one, Item(id="x", prompt="?", tools=(STOCK,)))
    assert isinstance(got, Reply)
    assert (len(bodies), got.turns) == (1, 1)


def test_a_written_conversation_keeps_its_thinking_and_ties_its_results() -> None:
    conversation = (
        Message(role="user", content="?"),
        Message(role="assistant", content="", thinking="Hm.", calls=(MadeCall(name="stock", arguments="{}"),)),
        Message(role="tool", content="3", call=0),
    )
    sent = as_sent(conversation)
    assert sent[1]["reasoning_content"] == "Hm."
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"] != ""
    assert "tool_calls" not in sent[0]


def test_results_of_a_tool_that_there_is_not_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "b", "results": [{"name": "fly", "content": "up"}]}))
    with pytest.raises(UsageError, match="fly"):
        load_suite(str(path), {})
