"""Streams of all kinds of servers become the same turn."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigguf.engines.turn import Kind, Piece, Turn, end, take


def gathered(*deltas: dict[str, Any], finish: str | None = "stop", cut: bool = False) -> tuple[Turn, str, str]:
    """The turn, and what was shown as thinking and as the answer."""
    turn = Turn()
    shown: list[Piece] = []
    for delta in deltas:
        turn, pieces = take(turn, {"choices": [{"index": 0, "delta": delta}]}, seconds=1.0)
        shown += pieces
    turn, pieces = take(turn, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    shown += pieces
    turn, pieces = end(turn, cut=cut)
    shown += pieces
    parts = {kind: "".join(piece.text for piece in shown if piece.kind is kind) for kind in Kind}
    return turn, parts[Kind.THINKING], parts[Kind.ANSWER]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_goes_back_under_the_name_it_came_with(name: str) -> None:
    turn, thinking, answer = gathered({name: "Hm"}, {name: "."}, {"content": "Hi."})
    assert (turn.thinking, turn.answer) == (thinking, answer) == ("Hm.", "Hi.")
    assert turn.message == {"role": "assistant", "content": "Hi.", name: "Hm."}


def test_a_server_that_says_the_same_under_two_names_is_heard_once() -> None:
    turn, thinking, _ = gathered({"reasoning_content": "Hm.", "reasoning": "Hm."}, {"content": "Hi."})
    assert turn.thinking == thinking == "Hm."
    assert "reasoning" not in turn.message


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(1, 40), max_size=5))
def test_thinking_within_the_text_is_found_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    text = "\n<think>\nHm </thin </think>\n\nHi <think> there."
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [{"content": text[begin:end]} for begin, end in pairwise(places)]
    turn, thinking, answer = gathered(*deltas)
    assert (turn.thinking, turn.answer) == (thinking, answer) == ("Hm </thin ", "Hi <think> there.")
    assert turn.message == {"role": "assistant", "content": text}  # goes back as it came


@pytest.mark.parametrize("text", ["<", "<thi", "<b>bold</b>", "  <thinker>", "a <think> b </think>"])
def test_a_text_that_only_looks_like_thinking_is_an_answer(text: str) -> None:
    turn, thinking, answer = gathered(*({"content": letter} for letter in text))
    assert (thinking, answer, turn.answer) == ("", text, text)


def test_thinking_that_only_ends_in_the_text_is_told_from_the_answer() -> None:
    turn, _, _ = gathered({"content": "Hm.\n</think>\n\nHi."})
    assert (turn.thinking, turn.answer) == ("Hm.\n", "Hi.")


def test_thinking_that_never_ends_is_no_answer() -> None:
    turn, _, answer = gathered({"content": "<think>Hm, hm"}, finish="length")
    assert (turn.thinking, answer, turn.used_up_by_thinking) == ("Hm, hm", "", True)


HALF: dict[str, Any] = {"name": "f", "arguments": '{"a"'}
REST = {"arguments": ":1}"}


@pytest.mark.parametrize(
    "parts",
    [
        [{"index": 0, "id": "c", "function": HALF}, {"index": 0, "function": REST}],
        [{"index": 1, "id": "c", "function": HALF}, {"index": 1, "function": REST}],
        [{"id": "c", "function": HALF}, {"function": REST}],
        [{"index": 0, "id": "c", "function": HALF}, {"index": 0, "id": "c", "function": REST | {"name": "f"}}],
        [{"index": 0, "id": "c", "function": {"name": "f"}}, {"index": 0, "function": {"arguments": '{"a":1}'}}],
    ],
)
def test_a_tool_call_in_parts_is_one(parts: list[dict[str, Any]]) -> None:
    turn, _, _ = gathered(*({"tool_calls": [part]} for part in parts), finish="tool_calls")
    function = {"name": "f", "arguments": '{"a":1}'}
    assert turn.message["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


def test_two_calls_without_numbers_stay_two_and_parsed_arguments_become_text() -> None:
    parts = [{"id": n, "function": {"name": n, "arguments": {"n": n}}} for n in ("x", "y")]
    turn, _, _ = gathered({"tool_calls": parts})
    assert [(call.name, call.arguments) for call in turn.calls] == [("x", '{"n": "x"}'), ("y", '{"n": "y"}')]


def test_of_a_stopped_answer_a_call_without_its_end_is_not_sent_back() -> None:
    """A template that reads its arguments as JSON would fail in every later turn."""
    texts = ('{"a":1}', '{"a')
    calls = [{"index": n, "id": str(n), "function": {"name": "f", "arguments": text}} for n, text in enumerate(texts)]
    turn, _, _ = gathered({"content": "Let me see."}, {"tool_calls": calls}, finish=None, cut=True)
    assert [call["id"] for call in turn.message["tool_calls"]] == ["0"]


def test_half_a_character_does_not_end_the_talk() -> None:
    turn, _, answer = gathered({"content": "a\ud83d"})
    assert turn.message["content"] == answer == "a\ufffd"


KEYS = "choices delta content reasoning_content tool_calls function index id name arguments usage timings finish_reason"
SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split(" ")), inner, max_size=5),
    max_leaves=12,
)


@settings(deadline=None)  # a busy machine is no failure
@given(SHAPES)
def test_what_has_another_shape_is_passed_over(shape: Any) -> None:
    turn, _ = take(Turn(), {"choices": shape, "usage": shape, "prompt_progress": shape})
    turn, _ = take(turn, {"choices": [{"delta": shape}, shape], "timings": shape})
    assert end(turn)[0].message["role"] == "assistant"


def test_a_connection_that_ends_without_a_word_is_no_end() -> None:
    assert not gathered({"content": "Hi"}, finish=None)[0].is_complete
    assert gathered({"content": "Hi"})[0].is_complete
    assert take(Turn(), {"choices": [], "usage": {"completion_tokens": 1}})[0].is_complete
