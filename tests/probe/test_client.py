import socket
from collections.abc import Callable
from typing import Any

import pytest
from fakes.openai_endpoint import Answer, Endpoint, Refuse, Say, serve

from kimigguf.engines.bench_client import BenchClient
from kimigguf.engines.bench_target import look_at
from kimigguf.engines.endpoint import build_in
from kimigguf.errors import NetworkError, UsageError
from kimigguf.probe.calls import Fault, FaultKind, Outcome, Reply, Shape
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.suites import Item, Message


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://", "--reference http://127.0.0.1:8080"),
        ("http://sk-key@host", "export KIMIGGUF_REFERENCE_API_KEY=... and give the bare address"),
    ],
)
def test_a_bad_address_or_one_with_a_key_in_it_is_refused_in_the_words_of_its_side(url: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        Asker("reference", url, {}, Settings())
    assert (error.value.code, error.value.hint) == ("bad-url", hint)


def ask(
    answer: Answer,
    *,
    settings: Settings | None = None,
    max_tokens: int | None = 100,
    item: Item | None = None,
    look: Callable[[Endpoint], None] | None = None,
    waited: list[float] | None = None,
) -> Outcome:
    sleep = (waited if waited is not None else []).append
    with serve(answer) as endpoint:
        asker = Asker("candidate", endpoint.url, {}, settings or Settings(timeout_seconds=5), sleep=sleep)
        try:
            return asker.ask(asker.endpoint(None), item or Item(id="a", prompt="2+2?"), max_tokens)
        finally:
            asker.close()
            if look is not None:
                look(endpoint)


def test_a_reply_carries_content_thinking_tokens_and_times() -> None:
    reply = ask(lambda _body, _n: Say(content="It is 4.", thinking="two and two make four"))
    assert isinstance(reply, Reply)
    assert (reply.content, reply.thinking, reply.finish_reason) == ("It is 4.", "two and two make four", "stop")
    assert (reply.shape, reply.prompt_tokens, reply.completion_tokens) == (Shape.ANSWERED, 11, 8)
    assert reply.first_token_seconds is not None
    assert 0 < reply.first_token_seconds <= reply.seconds
    assert reply.tokens_per_second is not None


def test_the_whole_conversation_is_sent_and_nothing_that_was_not_asked_for() -> None:
    item = Item(id="a", messages=(Message(role="system", content="Be brief."), Message(role="user", content="Hi")))
    seen: list[dict[str, Any]] = []
    ask(lambda _body, _n: Say(content="Hi."), item=item, max_tokens=None, look=lambda there: seen.extend(there.bodies))
    assert seen[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert set(seen[0]) == {"model", "messages", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("said", "shape"),
    [
        (Say(content="  "), Shape.EMPTY),
        (Say(thinking="hm"), Shape.EMPTY),
        (Say(tool_calls=2), Shape.CALLED_TOOL),
        (Say(content="It is", finish_reason="length"), Shape.CUT_OFF),
        (Say(content="x", finish_reason="content_filter"), Shape.FILTERED),
    ],
)
def test_what_a_reply_looks_like_is_kept_apart(said: Say, shape: Shape) -> None:
    reply = ask(lambda _body, _n: said)
    assert isinstance(reply, Reply)
    assert reply.shape is shape


def test_an_answer_cut_off_while_thinking_is_asked_for_once_more_with_more_room() -> None:
    budgets: list[int] = []

    def answer(body: dict[str, Any], _number: int) -> Say:
        budgets.append(body["max_tokens"])
        return Say(content="4") if body["max_tokens"] > 100 else Say(thinking="let me think", finish_reason="length")

    reply = ask(answer)
    assert isinstance(reply, Reply)
    assert (reply.shape, reply.max_tokens, budgets) == (Shape.ANSWERED, 400, [100, 400])


def test_an_answer_that_is_still_cut_off_is_told_as_that_and_not_asked_for_again() -> None:
    seen: list[dict[str, Any]] = []
    said = Say(thinking="let me think", finish_reason="length")
    reply = ask(lambda _body, _n: said, look=lambda there: seen.extend(there.bodies))
    assert isinstance(reply, Reply)
    assert (reply.shape, len(seen)) == (Shape.CUT_OFF_THINKING, 2)


@pytest.mark.parametrize(
    ("said", "kind", "status", "tries"),
    [
        (Refuse(status=401), FaultKind.KEY, 401, 1),
        (Refuse(status=403), FaultKind.KEY, 403, 1),
        (Refuse(status=400, message="temperature must be 1.0"), FaultKind.REQUEST, 400, 1),
        (Refuse(status=404), FaultKind.REQUEST, 404, 1),
        (Refuse(status=429), FaultKind.RATE_LIMIT, 429, 3),
        (Refuse(status=500), FaultKind.SERVER, 500, 3),
        (Refuse(status=503), FaultKind.SERVER, 503, 3),
        (Say(content="It is", cut=True), FaultKind.CUT_STREAM, None, 3),
        (Say(content="", finish_reason=""), FaultKind.CUT_STREAM, None, 3),
    ],
)
def test_every_fault_is_its_own_kind_and_only_what_may_pass_is_tried_again(
    said: Say | Refuse, kind: FaultKind, status: int | None, tries: int
) -> None:
    fault = ask(lambda _body, _n: said)
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.status, fault.tries) == (kind, status, tries)


def test_a_stalled_answer_is_a_timeout() -> None:
    fault = ask(lambda _body, _n: Say(stall_seconds=0.6), settings=Settings(timeout_seconds=0.2, tries=1))
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.TIMEOUT


def test_a_closed_port_is_a_connection_fault() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        asker = Asker("candidate", f":{closed.getsockname()[1]}", {}, Settings(tries=1))
        try:
            fault = asker.ask(asker.endpoint("k3"), Item(id="a", prompt="?"), None)
            with pytest.raises(NetworkError) as error:
                asker.endpoint(None)
        finally:
            asker.close()
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.CONNECTION
    assert error.value.code == "endpoint-unreachable"


def test_waiting_follows_the_endpoint_and_else_doubles() -> None:
    waited: list[float] = []
    answers: list[Say | Refuse] = [Refuse(status=429, retry_after="7"), Refuse(status=500), Say(content="4")]
    reply = ask(lambda _body, n: answers[n], waited=waited)
    assert isinstance(reply, Reply)
    assert waited == [7.0, 2.0]


def test_an_endpoint_that_knows_no_usage_in_streams_is_asked_without() -> None:
    def answer(body: dict[str, Any], _number: int) -> Say | Refuse:
        return (
            Refuse(status=400, message="unknown field stream_options") if "stream_options" in body else Say(content="4")
        )

    reply = ask(answer)
    assert isinstance(reply, Reply)
    assert (reply.content, reply.completion_tokens, reply.tokens_per_second) == ("4", None, None)


def test_the_key_comes_from_its_own_variable_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-somebody-else")
    monkeypatch.setenv("OPENAI_ORG_ID", "somebody")
    with serve(lambda _body, _n: Say(content="4")) as endpoint:
        for environ in ({"KIMIGGUF_REFERENCE_API_KEY": "right"}, {}):
            asker = Asker("reference", endpoint.url, environ, Settings())
            asker.ask(asker.endpoint("k3"), Item(id="a", prompt="?"), None)
            asker.close()
        assert endpoint.keys == ["Bearer right", "Bearer none"]


def test_the_model_is_the_only_one_there_or_must_be_named() -> None:
    with serve(lambda _body, _n: Say(content="4"), models=("a", "b")) as endpoint:
        asker = Asker("candidate", endpoint.url, {}, Settings())
        with pytest.raises(UsageError) as error:
            asker.endpoint(None)
        assert (error.value.code, error.value.hint) == ("model-not-given", "--candidate-model a")
        endpoint.models = ("only",)
        assert asker.endpoint(None).model == "only"
        endpoint.lists_models = False
        with pytest.raises(UsageError, match="does not list"):
            asker.endpoint(None)
        asker.close()


@pytest.mark.parametrize("echo", ["Incorrect API key: sk-secret-1", "\x1b]0;owned\x07 sk-secret-1 \x1b[2J"])
def test_an_endpoint_that_repeats_the_key_does_not_put_it_into_logs_nor_commands_the_terminal(echo: str) -> None:
    with serve(lambda _body, _n: Refuse(status=400, message=echo)) as endpoint:
        environ = {"KIMIGGUF_REFERENCE_API_KEY": "sk-secret-1"}
        asker = Asker("reference", endpoint.url, environ, Settings(tries=1))
        fault = asker.ask(asker.endpoint("k3"), Item(id="a", prompt="?"), None)
        asker.close()
    assert isinstance(fault, Fault)
    assert "sk-secret" not in fault.text
    assert "(the key)" in fault.text
    assert "\x1b" not in fault.text


def test_halves_of_characters_do_not_end_a_run_after_the_call_was_paid() -> None:
    """A lone surrogate is legal in JSON and in no UTF-8: it could not be written down."""
    said = Say(content="half \ud83d", thinking="\udc00", calls=(("f", '{"a": "\ud800"}'),))
    reply = ask(lambda _body, _n: said)
    assert isinstance(reply, Reply)
    for text in (reply.content, reply.thinking, reply.calls[0].arguments):
        assert text.encode().decode() == text
    assert reply.content == "half \ufffd"


@pytest.mark.parametrize(("told", "build"), [("b7-abc", "b7-abc"), ("b0-unknown", None), ("", None), (7, None)])
def test_a_build_that_the_server_does_not_know_itself_is_unknown(told: object, build: str | None) -> None:
    assert build_in({"build_info": told}) == build
    assert build_in({}) is None


def test_a_measured_server_that_does_not_know_its_build_is_shown_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"/props": {"build_info": "b0-unknown"}, "/v1/models": {"data": [{"id": "k3"}]}}
    monkeypatch.setattr(BenchClient, "look", lambda _self, path: told[path])
    with BenchClient("http://127.0.0.1:9") as client:
        target = look_at(client, None, ())
    assert target.engine == "llama.cpp (build unknown)"
