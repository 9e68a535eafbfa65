"""A talk keeps all that was said, in order, and its file gives it back."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimigguf.engines.talk import (
    Talk,
    answered,
    ask,
    beginning,
    load_talk,
    load_tools,
    new_talk,
    open_calls,
    save_talk,
    saved,
    with_result,
    without_last_answer,
)
from kimigguf.engines.turn import Call, Turn
from kimigguf.errors import UsageError

CALLS = tuple(Call(index=n, id="", name=name, arguments="{}") for n, name in enumerate(("f", "g")))


def roles(talk: Talk) -> str:
    return " ".join(message["role"] for message in talk.messages)


def test_open_calls_are_answered_one_after_the_other_also_where_they_have_no_ids() -> None:
    talk = answered(ask(new_talk("Be brief."), "Hello"), Turn(calls=CALLS))
    assert [call["function"]["name"] for call in open_calls(talk)] == ["f", "g"]
    assert not talk.waits_for_an_answer
    talk = with_result(talk, "42")
    assert [call["function"]["name"] for call in open_calls(talk)] == ["g"]
    talk = with_result(talk, None)
    assert open_calls(talk) == ()
    assert talk.waits_for_an_answer
    assert [message["content"] for message in talk.messages[3:]] == ["42", "The user declined this call."]
    talk = answered(talk, Turn(content="Done."))
    assert not talk.waits_for_an_answer
    assert roles(talk) == "system user assistant tool tool assistant"


def test_taking_an_answer_back_keeps_the_results_it_was_given() -> None:
    first = answered(ask(new_talk(None), "Hello"), Turn(calls=CALLS[:1]))
    talk = answered(with_result(first, "42"), Turn(content="Do", cut=True))
    assert talk.cut == (3,)
    shorter = without_last_answer(talk)
    assert shorter is not None
    assert (roles(shorter), shorter.cut, shorter.waits_for_an_answer) == ("user assistant tool", (), True)
    assert without_last_answer(ask(new_talk("Be brief."), "Hello")) is None


def test_a_new_talk_keeps_what_it_began_with() -> None:
    talk = answered(ask(new_talk("Be brief."), "Hello"), Turn(content="Hi."))
    assert roles(beginning(talk)) == "system"
    assert beginning(new_talk(None)) == Talk()


def keep(talk: Talk, path: Path, *, overwrite: bool = False) -> None:
    save_talk(saved(talk, model="k3", effort="low", tools=({"type": "function"},)), path, overwrite=overwrite)


def test_a_saved_talk_comes_back_whole_and_private(tmp_path: Path) -> None:
    turn = Turn(content="数量", thinking="Hm.", field="reasoning_content", calls=CALLS, cut=True)
    talk = answered(ask(new_talk("Be brief."), "Hello \ud83d"), turn)
    path = tmp_path / "talk.json"
    keep(talk, path)
    read = load_talk(path)
    assert (read.talk, read.model, read.effort, read.tools) == (talk, "k3", "low", ({"type": "function"},))
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_there_is_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("precious")
    with pytest.raises(UsageError) as caught:
        keep(new_talk("Be brief."), path)
    assert (caught.value.code, path.read_text()) == ("file-exists", "precious")
    keep(new_talk("Be brief."), path, overwrite=True)
    assert load_talk(path).talk == new_talk("Be brief.")


@pytest.mark.parametrize("name", ["no/talk.json", "file/talk.json", "a" * 300])
def test_a_place_that_cannot_be_written_is_told_and_ends_no_talk(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError) as caught:
        keep(new_talk(None), tmp_path / name)
    assert caught.value.code == "cannot-write"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_answer_without_calls_may_say_so(tmp_path: Path) -> None:
    """OpenAI's own client writes ``"tool_calls": null``."""
    path = tmp_path / "talk.json"
    nothing: tuple[Any, ...] = (None, [], {})
    for none in nothing:
        message = {"role": "assistant", "content": "Hi.", "tool_calls": none}
        path.write_text(json.dumps({"schema": "kimigguf.talk/1", "messages": [message]}))
        assert open_calls(load_talk(path).talk) == ()


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("no json", "the file"),
        ("[]", "the file"),
        ('{"schema": "kimigguf.plan/1", "messages": []}', "schema"),
        ('{"schema": "kimigguf.talk/1"}', "messages"),
        (json.dumps({"schema": "kimigguf.talk/1", "messages": [{"role": "robot"}]}), "messages.0: its role"),
        (
            json.dumps({"schema": "kimigguf.talk/1", "messages": [{"role": "user", "content": 1}]}),
            "messages.0: its content",
        ),
        (json.dumps({"schema": "kimigguf.talk/1", "messages": [CALL]}), "messages.0: a tool call"),
        (
            json.dumps({"schema": "kimigguf.talk/1", "messages": [{"role": "assistant", "tool_calls": 3}]}),
            "a tool call",
        ),
        (
            json.dumps(
                {
                    "schema": "kimigguf.talk/1",
                    "messages": [{"role": "assistant", "tool_calls": {"function": {"name": "f", "arguments": ""}}}],
                }
            ),
            "a tool call",
        ),
        (json.dumps({"schema": "kimigguf.talk/1", "messages": [{"role": ["user"]}]}), "messages.0: its role"),
    ],
)
def test_a_file_that_holds_no_talk_says_why(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_talk(path)
    assert caught.value.code == "bad-talk"
    assert cause in str(caught.value.cause)


def test_a_file_that_is_not_there_is_no_bug(tmp_path: Path) -> None:
    for load, code in ((load_talk, "bad-talk"), (load_tools, "bad-tools")):
        with pytest.raises(UsageError) as caught:
            load(tmp_path / "none")
        assert caught.value.code == code


@pytest.mark.parametrize(
    "read",
    [
        [{"name": "f", "parameters": {}}],
        [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        {"name": "f", "parameters": {}},
    ],
)
def test_tools_are_taken_as_people_have_them(tmp_path: Path, read: Any) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(read))
    assert load_tools(tmp_path / "tools.json") == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


@pytest.mark.parametrize("text", ["no json", "[1]", '[{"parameters": {}}]', '[{"function": 3}]', '[{"name": 1}]'])
def test_tools_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_tools(tmp_path / "tools.json")
    assert caught.value.code == "bad-tools"
