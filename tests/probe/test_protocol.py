import json
from collections.abc import Callable
from typing import Any

import pytest
from fakes.openai_endpoint import Refuse, Say, serve

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode, NetworkError, UsageError
from kimigguf.events import ignore
from kimigguf.probe.protocol import STEPS, Status
from kimigguf.probe.protocol_session import Found, Request, look

Answer = Callable[[dict[str, Any], int], Say | Refuse]


def good(body: dict[str, Any], _number: int) -> Say:
    """An endpoint that does all that K3 needs."""
    text = str(body["messages"][-1]["content"])
    thought = any(message.get("reasoning_content") for message in body["messages"])
    prompt = 20 + 40 * thought + 30 * bool(body.get("tools"))
    long = "I think so. " * (20 if body.get("reasoning_effort") == "max" else 2)
    if body.get("max_tokens", 9999) < 10:
        return Say(thinking="Let me see", finish_reason="length", tokens=(prompt, 8))
    if body["messages"][-1]["role"] == "tool":
        return Say(thinking=long, content="There are 4179.", tokens=(prompt, 30))
    if "saws" in text:
        return Say(thinking=long, calls=(("stock", '{"article": "saw"}'),), finish_reason="tool_calls")
    if "two timers" in text:
        calls = (("set_timer", '{"minutes": 7}'), ("set_timer", '{"minutes": 3}'))
        return Say(thinking=long, calls=calls, finish_reason="tool_calls", tokens=(prompt, 30))
    if "timer" in text:
        call = (("set_timer", '{"minutes": 7}'),)
        return Say(thinking=long, calls=call, finish_reason="tool_calls", tokens=(prompt, 30))
    return Say(thinking=long, content="42", tokens=(prompt, len(long.split())))


def found(answer: Answer, reference: Answer | None = None, **told: Any) -> Found:
    with serve(answer) as candidate, serve(reference or good) as other:
        request = Request(candidate=candidate.url, reference=other.url if reference else None, **told)
        return look(request, {}, arguments=lambda level: {"e": level}, agree=lambda *_: False, listen=ignore)


def test_an_endpoint_that_does_all_passes_everything() -> None:
    seen = found(good)
    assert {one.name: (one.status, one.seen) for one in seen.here if one.status is not Status.PASS} == {}
    assert (seen.worse, seen.reference, seen.there) == ((), None, None)


def changed(step: Callable[[dict[str, Any]], bool], **changes: Any) -> Answer:
    """The good endpoint with one fault."""

    def answer(body: dict[str, Any], number: int) -> Say:
        said = good(body, number)
        if not step(body):
            return said
        return Say(**{name: changes.get(name, getattr(said, name)) for name in Say.__dataclass_fields__})

    return answer


def _always(_body: dict[str, Any]) -> bool:
    return True


def _asks(word: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: word in str(body["messages"][0]["content"])


FAULTS: dict[str, tuple[Answer, str]] = {
    "markers of the format in the content": (
        changed(_asks("7 minutes"), calls=(), content='<|open|>call tool="set_timer"<|sep|>', finish_reason="stop"),
        "no markers in the text",
    ),
    "all text in reasoning_content": (changed(_asks("17 + 25"), content=""), "an answer has content"),
    "a cut thought shown as the answer": (
        changed(lambda body: body.get("max_tokens", 9999) < 10, content="Let me see", thinking=""),
        "a cut thought stays a thought",
    ),
    "tool calls with streaming only": (
        changed(lambda body: bool(body.get("tools")) and not body.get("stream"), calls=(), finish_reason="stop"),
        "streaming changes nothing",
    ),
    "thinking with streaming only": (changed(lambda body: not body.get("stream"), thinking=""),
                                     "streaming changes nothing"),
    "thinking dropped in later turns": (changed(_asks("heron"), tokens=(20, 8)), "thinking is taken back"),
    "arguments that are no JSON": (
        changed(_asks("a timer"), calls=(("set_timer", '{"minutes": '),)), "a tool is called"),
    "arguments that the schema refuses": (
        changed(_asks("two timers"), calls=(("set_timer", '{"minutes": "7"}'),) * 2), "two tools at once"),
    "a wrong finish reason": (changed(_asks("a timer"), finish_reason="stop"), "finish reasons"),
    "a bound that is passed": (
        changed(lambda body: body.get("max_tokens", 9999) < 10, tokens=(20, 40)), "the bound on tokens holds"),
    "a tool's result that is ignored": (
        changed(lambda body: body["messages"][-1]["role"] == "tool", content="There are 12."),
        "a tool loop comes to its end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_from_the_field_is_found_and_laid_at_the_candidate(fault: str) -> None:
    answer, check = FAULTS[fault]
    seen = found(answer, good)
    assert check in seen.worse, [(one.name, one.status, one.seen) for one in seen.here]


def test_what_the_reference_does_as_well_is_no_fault_of_the_candidate() -> None:
    answer, check = FAULTS["all text in reasoning_content"]
    seen = found(answer, answer)
    assert seen.worse == ()
    assert any(one.name == check and one.status is Status.FAIL for one in seen.here)


def test_sampling_that_is_refused_is_told_and_the_rest_still_looked_at() -> None:
    def refusing(body: dict[str, Any], number: int) -> Say | Refuse:
        return Refuse(status=400, message="top_p is pinned") if "top_p" in body else good(body, number)

    seen = found(refusing, good)
    assert seen.worse == ("K3's sampling is taken",)


def test_a_model_that_does_not_think_is_unknown_and_not_at_fault() -> None:
    seen = found(changed(_always, thinking=""))
    status = {one.name: one.status for one in seen.here}
    seen_too = {one.name: one.status for one in found(changed(_always, thinking="", tokens=(20, 5))).here}
    assert (seen_too["thinking is taken back"], seen_too["finish reasons"]) == (Status.UNKNOWN, Status.PASS)
    assert status["thinking comes apart"] is status["a cut thought stays a thought"] is Status.UNKNOWN
    assert seen.worse == ()


def test_effort_is_sent_in_every_spelling_to_the_candidate_and_in_one_to_an_api() -> None:
    with serve(good) as candidate, serve(good) as reference:
        request = Request(candidate=candidate.url, reference=reference.url)
        look(request, {}, arguments=lambda level: {"thinking_effort": level}, agree=lambda *_: False, listen=ignore)
        local = [body for body in candidate.bodies if "reasoning_effort" in body]
        api = [body for body in reference.bodies if "reasoning_effort" in body]
    assert [body["chat_template_kwargs"] for body in local] == [{"thinking_effort": "low"}, {"thinking_effort": "max"}]
    assert len(api) == 2
    assert not any("chat_template_kwargs" in body for body in api)


def test_the_same_prompts_are_counted_alike_or_it_is_told() -> None:
    more = changed(_always, tokens=(25, 9))
    assert found(good, good).parity == "equal"
    assert "differs" in str(found(more, good).parity)


def test_a_server_that_is_not_there_ends_it() -> None:
    request = Request(candidate="http://127.0.0.1:1", candidate_model="k3")
    with pytest.raises(NetworkError):
        look(request, {}, arguments=lambda _e: {}, agree=lambda *_: False, listen=ignore)


def test_an_endpoint_of_unknown_price_is_asked_only_where_its_user_agrees() -> None:
    with serve(good) as candidate:
        request = Request(candidate=candidate.url, reference="comet")
        with pytest.raises(UsageError) as error:
            look(request, {"COMETAPI_API_KEY": "k"}, arguments=lambda _e: {}, agree=lambda *_: False, listen=ignore)
    assert (error.value.code, candidate.bodies) == ("cost-not-agreed", [])


def test_a_budget_without_a_price_is_refused_before_anything_is_asked() -> None:
    with serve(good) as candidate:
        request = Request(candidate=candidate.url, reference="https://api.example.org/v1", budget_usd=1.0)
        with pytest.raises(UsageError) as error:
            look(request, {}, arguments=lambda _e: {}, agree=lambda *_: True, listen=ignore)
        assert (error.value.code, candidate.bodies) == ("no-price", [])


def test_the_command_answers_no_where_the_candidate_alone_fails(capsys: pytest.CaptureFixture[str]) -> None:
    answer, check = FAULTS["markers of the format in the content"]
    with serve(answer) as candidate, serve(good) as reference:
        words = ["quality-probe", "protocol", "--candidate", candidate.url, "--reference", reference.url, "--json"]
        code = run(words, App(show=Show(), environ={}))
        told = json.loads(capsys.readouterr().out)
        assert (code, told["schema"]) == (ExitCode.ANSWERED_NO, "kimigguf.probe-protocol/1")
        assert check in told["worse"]
        words = ["quality-probe", "protocol", "--candidate", reference.url]
        assert run(words, App(show=Show(), environ={})) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "thinking is taken back" in shown
    assert "pass" in shown
    assert len(STEPS) == 12


def test_a_reference_whose_key_is_not_set_is_refused_before_anything_is_asked() -> None:
    with serve(good) as candidate:
        request = Request(candidate=candidate.url, reference="kimi")
        with pytest.raises(UsageError, match="MOONSHOT_API_KEY is not set") as error:
            look(request, {}, arguments=lambda _e: {}, agree=lambda *_: True, listen=ignore)
    assert (error.value.code, candidate.bodies) == ("no-key", [])
