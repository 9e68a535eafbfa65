"""The proof after a load finds the servers that look alive and are useless."""

from collections.abc import Mapping
from typing import Any

import pytest

from kimigguf.engines.evidence import Check, State
from kimigguf.engines.selftest import Refused, check_numbers, check_turn, selftest


def answer(
    content: str = "Hi.", thinking: str | None = "Hm.", *, prompt: int = 10, cached: int = 0, **more: Any
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    return {
        "choices": [{"message": message | more, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt},
        "timings": {"cache_n": cached, "prompt_n": prompt - cached, "predicted_n": 5, "predicted_per_second": 9.5},
    }


class Server:
    """Answers as told; ``turns`` are the chat answers in order, an exception is raised."""

    def __init__(self, *turns: dict[str, Any] | Refused, long: dict[str, Any] | Refused | None = None) -> None:
        self.turns = list(turns)
        self.long = long or {"timings": {"prompt_n": 528, "prompt_per_second": 100.0}}
        self.number: float | None = -1.8
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((path, body))
        if path == "/tokenize":
            return {"tokens": list(range(1000))}
        if "n_probs" in body:
            return {"completion_probabilities": [{"token": "a", "logprob": self.number}]}
        found = self.long if path == "/completion" else self.turns.pop(0)
        if isinstance(found, Refused):
            raise found
        return found


def states(server: Server) -> dict[str, State]:
    return {check.what: check.state for check in selftest(server, ubatch_tokens=512, slot_tokens=4096).checks}


CALL: Mapping[str, Any] = {"tool_calls": [{"function": {"name": "get_time", "arguments": '{"city": "Paris"}'}}]}


def test_a_good_server_passes_with_its_speeds() -> None:
    server = Server(answer(), answer(prompt=30, cached=8), answer(**CALL))
    result = selftest(server, ubatch_tokens=512, slot_tokens=4096)
    assert [check.state for check in result.checks] == [State.PASSED] * 5
    assert (result.measured.prompt_per_second, result.measured.decode_per_second) == (100.0, 9.5)
    second = server.asked[2][1]["messages"][1]
    assert second["reasoning_content"] == "Hm."  # the whole message goes back
    path, body = server.asked[-1]
    assert path == "/completion"
    assert len(body["prompt"]) == 528  # more than one physical batch


def test_an_engine_without_k3s_parser_is_found() -> None:
    found = check_turn(answer("<|open|>think<|sep|>Hm.<|close|>think<|sep|>", None))
    assert found.state is State.FAILED
    assert "no parser" in found.evidence


@pytest.mark.parametrize(
    ("turn", "state"),
    [
        (answer("", None), State.FAILED),
        (answer("", "Hm."), State.PASSED),  # thinking used up the tokens: no fault
        (answer("Hi.", None), State.UNKNOWN),
        ({}, State.FAILED),
    ],
)
def test_the_shape_of_the_first_turn_is_judged(turn: dict[str, Any], state: State) -> None:
    assert check_turn(turn).state is state


def test_a_server_that_drops_the_history_is_found() -> None:
    assert states(Server(answer(), answer(prompt=10), answer()))["second turn"] is State.FAILED


def test_a_prompt_that_was_not_processed_whole_is_found() -> None:
    second = answer(prompt=30, cached=8)
    second["timings"]["prompt_n"] = 2
    assert states(Server(answer(), second, answer()))["second turn"] is State.FAILED


def test_a_call_left_unparsed_in_the_text_is_found() -> None:
    text = '<|open|>call tool="get_time" index="1"<|sep|>'
    assert states(Server(answer(), answer(prompt=30), answer(text)))["tool call"] is State.FAILED


def test_no_call_is_unknown_and_broken_arguments_are_a_failure() -> None:
    assert states(Server(answer(), answer(prompt=30), answer()))["tool call"] is State.UNKNOWN
    broken: dict[str, Any] = {"tool_calls": [{"function": {"name": "get_time", "arguments": '{"city": '}}]}
    assert states(Server(answer(), answer(prompt=30), answer(**broken)))["tool call"] is State.FAILED


def test_a_server_that_dies_of_the_first_long_prompt_is_found() -> None:
    server = Server(answer(), answer(prompt=30), answer(), long=Refused("connection reset"))
    assert states(server)["long prompt"] is State.FAILED


def test_a_server_that_does_not_answer_at_all_is_not_asked_further() -> None:
    server = Server(Refused("HTTP 500: boom"))
    result = selftest(server, ubatch_tokens=512, slot_tokens=4096)
    assert result.failed == (Check(what="first turn", state=State.FAILED, evidence="HTTP 500: boom"),)
    assert len(server.asked) == 2


def test_a_small_slot_is_not_asked_for_more_than_it_holds() -> None:
    server = Server(answer(), answer(prompt=30), answer())
    selftest(server, ubatch_tokens=512, slot_tokens=256)
    assert len(server.asked[-1][1]["prompt"]) == 248


@pytest.mark.parametrize(
    ("probabilities", "state"),
    [
        ([{"token": "a", "logprob": -1.8}], State.PASSED),
        ([{"token": "\x1e", "logprob": None}], State.FAILED),  # as build 11434 answers with a weight that is NaN
        ([], State.UNKNOWN),
        (None, State.UNKNOWN),
        ([{"token": "a"}], State.UNKNOWN),
    ],
)
def test_a_model_that_computes_nan_is_found_though_it_answers(probabilities: object, state: State) -> None:
    check = check_numbers({"completion_probabilities": probabilities})
    assert check.state is state
    assert ("verify" in (check.hint or "")) == (state is State.FAILED)


def test_of_a_model_that_computes_nan_nothing_more_is_asked() -> None:
    server = Server(answer())
    server.number = None
    assert states(server) == {"numbers": State.FAILED}
    assert len(server.asked) == 1
