"""The bridge under the real `ollama` client: in front of a stand-in engine, and of a real one with the tiny K3."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_k3
import uvicorn
from fakes.openai_endpoint import Endpoint, Refuse, Say, serve
from fakes.openai_server import Script, answering
from fakes.processes import free_port
from fakes.served import plan_for, served
from ollama import Client, ResponseError

from kimigguf.ollama.bridge import Bridge

ASKED = [{"town": "Oslo"}, {"town": "Bergen"}]
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def bridged(upstream: str, tell: Callable[[str], None] = lambda _text: None) -> Iterator[Client]:
    """The real client of a bridge in front of ``upstream``."""
    port = free_port()
    app = Bridge(upstream, tell=tell).app()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with Client(host=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def both(
    answer: Callable[[dict[str, Any], int], Say | Refuse], *, tell: Callable[[str], None] = print, embeds: bool = False
) -> Iterator[tuple[Client, Endpoint]]:
    with serve(answer, models=("kimi-k3",), embeds=embeds) as engine, bridged(engine.url, tell) as client:
        yield client, engine


def test_a_chat_streams_thinking_and_content_and_ends_with_its_counts() -> None:
    with both(lambda _body, _n: Say(thinking="let me greet", content="Hello there.")) as (client, engine):
        parts = list(
            client.chat("kimi-k3", HELLO, stream=True, think=True, options={"temperature": 0.5, "num_ctx": 99})
        )
        sent = engine.bodies[0]
    assert "".join(part.message.thinking or "" for part in parts) == "let me greet"
    assert "".join(part.message.content or "" for part in parts) == "Hello there."
    last = parts[-1]
    assert (last.done, last.done_reason, last.prompt_eval_count, last.eval_count) == (True, "stop", 11, 5)
    assert (last.eval_duration or 0) > 0
    assert (sent["temperature"], sent["chat_template_kwargs"], "num_ctx" in sent) == (0.5, {"thinking": True}, False)


def test_a_chat_can_be_had_whole_and_by_its_name_with_the_tag() -> None:
    with both(lambda _body, _n: Say(thinking="hm", content="Hello there.", finish_reason="length")) as (client, _):
        reply = client.chat("kimi-k3:latest", HELLO)
    assert (reply.message.content, reply.message.thinking, reply.done_reason) == ("Hello there.", "hm", "length")


def test_tools_go_there_and_calls_come_back_and_their_answers_find_them() -> None:
    def answer(body: dict[str, Any], number: int) -> Say:
        if number:
            return Say(content="Rain.")
        return Say(
            calls=(("weather", '{"town": "Oslo"}'), ("weather", '{"town": "Bergen"}')), finish_reason="tool_calls"
        )

    def weather(town: str) -> str:
        """The weather.

        Args:
            town: Where.
        """
        return town

    with both(answer) as (client, engine):
        first = client.chat("kimi-k3", HELLO, tools=[weather])
        assert first.message.tool_calls is not None
        assert [dict(call.function.arguments) for call in first.message.tool_calls] == [
            {"town": "Oslo"},
            {"town": "Bergen"},
        ]
        results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("wet", "wetter")]
        assert client.chat("kimi-k3", [*HELLO, first.message, *results]).message.content == "Rain."
        assert engine.bodies[0]["tools"][0]["function"]["name"] == "weather"
        sent = engine.bodies[1]["messages"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["call_0", "call_1"]
    assert [message.get("tool_call_id") for message in sent[2:]] == ["call_0", "call_1"]


def test_thinking_goes_back_as_reasoning() -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, engine):
        before = {"role": "assistant", "content": "Hello.", "thinking": "greet"}
        client.chat("kimi-k3", [*HELLO, before, {"role": "user", "content": "Again"}])
        assert engine.bodies[0]["messages"][1] == {
            "role": "assistant",
            "content": "Hello.",
            "reasoning_content": "greet",
        }


def test_generate_streams_and_keeps_to_a_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with both(lambda _body, _n: Say(content='{"a": 1}')) as (client, engine):
        parts = list(client.generate("kimi-k3", "Give a.", system="Be brief.", format=schema, stream=True))
        assert "".join(part.response or "" for part in parts) == '{"a": 1}'
        assert client.generate("kimi-k3", "Give a.", format="json", think="low").response == '{"a": 1}'
        first, second = engine.bodies
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert first["response_format"]["json_schema"]["schema"] == schema
    assert second["response_format"] == {"type": "json_object"}
    assert second["chat_template_kwargs"] == {"thinking_effort": "low", "reasoning_effort": "low"}


def test_the_model_is_listed_shown_and_running() -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, _):
        assert [model.model for model in client.list().models] == ["kimi-k3:latest"]
        shown = client.show("kimi-k3")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == "{{ x }}"
        assert client.ps().models[0].context_length == 4096
        assert client.chat("kimi-k3", []).done_reason == "load"
        assert client.generate("kimi-k3").done_reason == "load"


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda client: client.chat("llama", HELLO), 404),
        (lambda client: client.generate("kimi-k3", "x", suffix="y"), 400),
        (lambda client: client.generate("kimi-k3", "x", template="{{ .Prompt }}"), 400),
        (lambda client: client.generate("kimi-k3", "x", context=[1, 2]), 400),
        (lambda client: client.chat("kimi-k3", [], keep_alive=0), 501),
        (lambda client: client.push("kimi-k3"), 501),
        (lambda client: client.create("mine", from_="kimi-k3"), 501),
        (lambda client: client.chat("kimi-k3", [{"role": "user", "content": "x", "images": [b"abc"]}]), 400),
        (lambda client: client.delete("kimi-k3"), 501),
        (lambda client: client.copy("kimi-k3", "x"), 501),
        (lambda client: client.pull("kimi-k3"), 501),
        (lambda client: list(client.pull("kimi-k3", stream=True)), 501),
        (lambda client: client.create_blob(__file__), 501),
        (lambda client: client.embed("kimi-k3", "x"), 501),
        (lambda client: client.embeddings("kimi-k3", "x"), 501),
    ],
    ids=[
        *("unknown", "suffix", "template", "context", "unload", "push", "create", "images"),
        *("delete", "copy", "pull", "pull-streamed", "blob", "embed", "embeddings"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_status(call: Callable[[Client], object], status: int) -> None:
    refuse = Refuse(status=501, message="no embeddings")
    with both(lambda _body, _n: refuse) as (client, _), pytest.raises(ResponseError) as error:
        call(client)
    assert error.value.status_code == status


def test_the_engines_own_errors_keep_status_and_words() -> None:
    with both(lambda _body, _n: Refuse(status=503, message="Loading model")) as (client, _):
        with pytest.raises(ResponseError, match="Loading model") as error:
            client.chat("kimi-k3", HELLO)
        assert error.value.status_code == 503
        with pytest.raises(ResponseError, match="Loading model"):
            list(client.chat("kimi-k3", HELLO, stream=True))


def test_what_the_template_refuses_is_told_without_its_source() -> None:
    wrapped = (
        "\n------------\nWhile executing CallExpression at line 26\nError: Jinja Exception: the effort is low or max"
    )
    with both(lambda _body, _n: Refuse(status=500, message=wrapped)) as (client, _):
        with pytest.raises(ResponseError) as error:
            client.chat("kimi-k3", HELLO, think="medium")
        assert error.value.error == "the effort is low or max"


def test_an_answer_that_breaks_off_is_an_error_and_no_end() -> None:
    with both(lambda _body, _n: Say(content="It is", cut=True)) as (client, _):
        with pytest.raises(ResponseError, match="broke off"):
            client.chat("kimi-k3", HELLO)
        with pytest.raises(ResponseError, match="broke off"):
            list(client.chat("kimi-k3", HELLO, stream=True))


def test_an_error_amid_the_answer_is_ollamas_error_line_with_the_engines_words() -> None:
    script = Script(deltas=[{"content": "It is"}], cut=True)
    with answering(script) as engine, bridged(engine.url) as client:
        parts: list[Any] = []
        with pytest.raises(ResponseError, match="device lost"):
            parts.extend(client.chat("kimi-k3", HELLO, stream=True))
        with pytest.raises(ResponseError, match="device lost") as error:
            client.chat("kimi-k3", HELLO)
        assert error.value.status_code == 500
        url = str(client._client.base_url)
        lines = httpx.post(f"{url}/api/chat", json={"model": "kimi-k3", "messages": HELLO}).text.splitlines()
    assert json.loads(lines[0])["message"]["content"] == "It is"
    assert json.loads(lines[-1]) == {"error": "device lost"}


def test_what_a_request_does_not_get_stands_in_a_header_and_is_told_once() -> None:
    told: list[str] = []
    options = {"num_gpu": 5, "temperature": 0.1}
    body = {"model": "kimi-k3", "messages": HELLO, "options": options, "keep_alive": "5m"}
    with both(lambda _body, _n: Say(content="Hi."), tell=told.append) as (client, _):
        url = f"{client._client.base_url}/api/chat"
        answers = [httpx.post(url, json=body | more) for more in ({"stream": None}, {"stream": False})]
        plain = httpx.post(url, json={"model": "kimi-k3", "messages": HELLO})
    assert [answer.headers["Content-Type"] for answer in answers] == ["application/x-ndjson", "application/json"]
    for answer in answers:
        header = answer.headers["X-Kimigguf-Unheeded"]
        assert "options.num_gpu: settled when the engine was started" in header
        assert "keep_alive" in header
        assert "temperature" not in header
    assert "X-Kimigguf-Unheeded" not in plain.headers
    assert [text.partition(" sent ")[2].partition(":")[0] for text in told] == ["options.num_gpu", "keep_alive"]


def test_a_clients_own_words_command_no_terminal_and_add_no_header() -> None:
    told: list[str] = []
    odd = {"x\r\nSet-Cookie: a=b\x1b[2J": 1} | {f"field{n}": 1 for n in range(500)}
    with both(lambda _body, _n: Say(content="Hi."), tell=told.append) as (client, _):
        url = f"{client._client.base_url}/api/chat"
        reply = httpx.post(url, json={"model": "kimi-k3", "messages": HELLO, "stream": False} | odd)
    assert reply.status_code == 200
    assert "Set-Cookie" not in reply.headers
    assert len(reply.headers["X-Kimigguf-Unheeded"]) < 8000
    assert len(told) == 50
    assert not any("\x1b" in text or "\n" in text for text in told)


def test_embeddings_come_as_ollama_gives_them_new_and_old() -> None:
    with both(lambda _body, _n: Say(), embeds=True) as (client, _):
        assert "embedding" in (client.show("kimi-k3").capabilities or ())
        found = client.embed("kimi-k3", ["a", "bb"])
        assert [list(vector) for vector in found.embeddings] == [[pytest.approx(n / 13) for n in (3, 4, 12)]] * 2
        assert found.prompt_eval_count == 3
        assert list(client.embed("kimi-k3", "a", dimensions=2).embeddings[0]) == [
            pytest.approx(0.6),
            pytest.approx(0.8),
        ]
        assert list(client.embeddings("kimi-k3", "bb").embedding) == [6, 8, 24]
        assert client.embed("kimi-k3", "").embeddings == []


def test_no_embeddings_says_how_to_get_them() -> None:
    with both(lambda _body, _n: Say()) as (client, _):
        assert "embedding" not in (client.show("kimi-k3").capabilities or ())
        with pytest.raises(ResponseError, match=r"--ollama-api -- --embeddings --pooling last"):
            client.embed("kimi-k3", "a")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_ends_what_the_engine_does_for_it(stream: bool, begun: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine, bridged(f"http://127.0.0.1:{address(engine)[1]}") as client:
        url = client._client.base_url
        engine.settimeout(10)
        with socket.create_connection((url.host, url.port or 0)) as asking:
            body = json.dumps({"model": "kimi-k3", "messages": HELLO, "stream": stream}).encode()
            head = f"POST /api/chat HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
            asking.sendall(head.encode() + body)
            models = engine.accept()[0]
            with models:
                models.recv(65536)
                models.sendall(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data":[{"id":"kimi-k3"}]}')
            chat = engine.accept()[0]
            chat.settimeout(10)
            got = chat.recv(65536)
            if begun:
                event = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
                chat.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event)
                if stream:
                    assert b"200 OK" in asking.recv(65536)
        with chat:
            while got and b"Hello" not in got:
                got = chat.recv(65536)
            assert hung_up(chat)


def address(listening: socket.socket) -> tuple[str, int]:
    host, port = listening.getsockname()
    return host, port


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side closes it, which must come within the time that the socket has."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"{x", 400), (b"[1]", 400), (b"", 400), (b'{"model": "kimi-k3", "messages": [{"content": "x"}]}', 400)],
    ids=["not-json", "no-object", "empty", "no-role"],
)
def test_a_malformed_request_is_refused_in_ollamas_shape(data: bytes, status: int) -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, _):
        reply = httpx.post(f"{client._client.base_url}/api/chat", content=data)
    assert reply.status_code == status
    assert reply.json()["error"]


def test_a_call_that_ollama_has_and_the_bridge_has_not_is_refused_in_its_shape() -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, _):
        reply = httpx.post(f"{client._client.base_url}/api/experimental", json={})
    assert reply.status_code == 404
    assert "/api/experimental" in reply.json()["error"]


def test_a_page_of_this_machine_may_read_the_answers() -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, _):
        url = f"{client._client.base_url}/api/chat"
        asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        before = httpx.options(url, headers=asked | {"Access-Control-Request-Headers": "content-type"})
        assert before.status_code == 200
        reply = httpx.post(url, json={"model": "kimi-k3", "messages": HELLO}, headers={"Origin": asked["Origin"]})
    assert before.headers["Access-Control-Allow-Origin"] == reply.headers["Access-Control-Allow-Origin"]


def test_the_model_is_asked_for_once_in_a_while_and_at_once_where_a_name_is_new() -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, engine):
        client.chat("kimi-k3", HELLO)
        engine.models = ("other",)
        assert client.chat("kimi-k3", HELLO).message.content == "Hi."
        assert client.chat("other", HELLO).message.content == "Hi."
        with pytest.raises(ResponseError, match="other:latest"):
            client.chat("kimi-k3", HELLO)


def test_an_engine_that_is_not_there_is_502() -> None:
    with bridged("http://127.0.0.1:9") as client, pytest.raises(ResponseError) as error:
        client.list()
    assert error.value.status_code == 502


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "vscode-webview://abc"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),  # a frame that a page has shut in, to hide where it is from
        ({"Host": "evil.example"}, 400),
    ],
)
def test_web_pages_from_elsewhere_are_turned_away(headers: dict[str, str], status: int) -> None:
    with both(lambda _body, _n: Say(content="Hi.")) as (client, _):
        url = str(client._client.base_url)
        assert httpx.get(f"{url}/api/version", headers=headers).status_code == status


@pytest.mark.engine
def test_a_real_k3_answers_ollamas_client_twice(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    plan = plan_for(sorted(tiny("UD-IQ1_M").glob("*.gguf")), "kimi-k3", tiny_k3.LAYERS)
    options = {"num_predict": 8}
    with served(plan, tmp_path / "engine") as url, bridged(url) as client:
        assert [model.model for model in client.list().models] == ["kimi-k3:latest"]
        assert client.show("kimi-k3").template
        assert client.ps().models[0].context_length == 2048
        first = client.chat("kimi-k3", HELLO, options=options)
        assert first.message.thinking
        assert (first.done_reason, first.eval_count) == ("length", 8)
        parts = list(client.chat("kimi-k3", [*HELLO, first.message, *HELLO], stream=True, options=options))
        assert "".join(part.message.thinking or "" for part in parts)
        assert client.generate("kimi-k3", "Hello", options=options).eval_count == 8
        # The embedded engine's K3 parser drops formats as llama-server's does.
        sure = {"sure": {"type": "boolean"}}
        schema = {"type": "object", "required": ["sure"], "properties": sure, "additionalProperties": False}
        # A grammar lets random weights put up to 22 blanks in each gap: all of them must have room.
        reply = client.chat("kimi-k3", HELLO, format=schema, options={"num_predict": 200})
        assert json.loads(reply.message.content or "")["sure"] in {True, False}
