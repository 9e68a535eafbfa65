"""Ollama's lines from the engine's events: every line parses, and what is streamed adds up to what is whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.ollama.answers import Answer, EngineError

PIECES = st.lists(st.tuples(st.text(), st.text()), max_size=8)


def event(delta: dict[str, Any], **choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, **choice}]}).encode()


def lines(answer: Answer, *events: bytes) -> list[dict[str, Any]]:
    text = "".join(answer.add(one) for one in events) + answer.end()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]  # at U+0085 and U+2028 too, as Ollama's client does


@given(pieces=PIECES, model=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_both_ways_of_asking(pieces: list[tuple[str, str]], model: str) -> None:
    answer = Answer("chat", model)
    made = lines(answer, *(event({"reasoning_content": thought, "content": said}) for thought, said in pieces))
    assert all(line["model"] == model for line in made)
    whole = answer.whole()["message"]
    assert "".join(line["message"]["content"] for line in made) == whole["content"] == "".join(p[1] for p in pieces)
    assert "".join(line["message"].get("thinking", "") for line in made) == whole.get("thinking", "")
    assert [line["done"] for line in made] == [False] * (len(made) - 1) + [True]


def test_a_generated_text_is_a_response_and_no_message() -> None:
    answer = Answer("generate", "k3")
    raw = json.dumps({"choices": [{"text": "6 7", "finish_reason": "length"}]}).encode()
    first, last = lines(answer, raw)
    assert (first["response"], "message" in first) == ("6 7", False)
    assert (last["response"], last["done_reason"]) == ("", "length")
    assert answer.whole()["response"] == "6 7"


def test_counts_and_the_engines_own_times_close_it() -> None:
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    timings = {"timings": {"prompt_ms": 2.5, "predicted_ms": 4.0}}
    answer = Answer("chat", "k3", clock=iter(range(0, 10**9, 10)).__next__)
    last = lines(answer, event({"content": "a"}), json.dumps({"choices": [], **usage, **timings}).encode())[-1]
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 3)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_500_000, 4_000_000)


def test_without_the_engines_times_those_seen_here_stand() -> None:
    ticks = iter([0, 100, 100, 250, 250, 250])
    answer = Answer("chat", "k3", clock=ticks.__next__)
    last = lines(answer, event({"content": "a"}))[-1]
    assert (last["prompt_eval_duration"], last["eval_duration"], last["total_duration"]) == (100, 150, 250)


def test_calls_in_pieces_come_back_whole_in_their_order() -> None:
    def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
        return {"index": index, "function": {"name": name, "arguments": arguments}}

    answer = Answer("chat", "k3")
    made = lines(
        answer,
        event({"tool_calls": [call(1, "b", "")]}),
        event({"tool_calls": [call(0, "a", '{"x"')]}),
        event({"tool_calls": [call(0, None, ": 1}"), call(1, None, "broken")]}, finish_reason="tool_calls"),
    )
    calls = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {}}}]
    assert made[0]["message"]["tool_calls"] == calls
    assert answer.whole()["message"]["tool_calls"] == calls


def test_logprobs_stand_on_the_lines_of_their_tokens() -> None:
    token = {
        "id": 5,
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [{"id": 6, "token": "b", "logprob": -1.5}],
    }
    kept = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.5}]}
    answer = Answer("chat", "k3")
    made = lines(answer, event({"content": "a"}, logprobs={"content": [token]}), event({"content": "c"}))
    assert (made[0]["logprobs"], "logprobs" in made[1]) == ([kept], False)
    assert answer.whole()["logprobs"] == [kept]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b'{"error":{"code":500,"message":"device lost"}}', "device lost"),
        (b'{"code":500,"message":"device lost","type":"server_error"}', "device lost"),
        (b'{"error":"device lost"}', "device lost"),
        (b"{broken", "not JSON"),
    ],
)
def test_an_error_among_the_events_is_one(payload: bytes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        Answer("chat", "k3").add(payload)
