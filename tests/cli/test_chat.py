"""``kimigguf chat``: everything the assistant said goes back, and every failure says what it is."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fakes.openai_server import Script, answering
from fakes.processes import free_port

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.engines.endpoint import base_url, mapped, sent_in_the_clear
from kimigguf.engines.registry import Entry, ProcessId, entered
from kimigguf.errors import NetworkError, UsageError

CALL = [
    {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"sky"}'}}]},
]


def chat(*argv: str, environ: dict[str, str] | None = None) -> int:
    return run(["chat", *argv], App(show=Show(), environ=environ or {}))


def lines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.parametrize(
    ("url", "key", "warns"),
    [
        ("http://llama.example.org:8080", "secret", True),
        ("http://192.168.1.7:8080/v1", "secret", True),
        ("https://llama.example.org", "secret", False),
        ("http://127.0.0.1:8080", "secret", False),
        (":8080", "secret", False),
        ("http://llama.example.org:8080", None, False),
    ],
)
def test_a_key_over_a_network_without_tls_is_told_of(url: str, key: str | None, *, warns: bool) -> None:
    warning = sent_in_the_clear(url, key)
    assert (warning is not None) is warns
    assert "secret" not in (warning or "")


def test_the_warning_comes_before_the_key_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("hello", "--url", "http://nowhere.invalid:8080", environ={"KIMIGGUF_API_KEY": "secret"}) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert said.index("the key goes to nowhere.invalid:8080 unencrypted") < said.index("[server-unreachable]")


def test_the_answer_is_on_stdout_and_the_thinking_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = [{"reasoning_content": "Light sca"}, {"reasoning_content": "tters."}, {"content": "Rayleigh."}]
    with answering(Script(deltas=deltas)) as server:
        assert chat("--url", server.url, "Why is the sky blue?") == 0
    out, err = capsys.readouterr()
    assert out == "Rayleigh.\n"
    assert "Light scatters." in err
    assert "5.2 tokens/s" in err


def test_reasoning_and_tool_calls_go_back_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a K3 conversation gets worse turn by turn, with no error to see."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": "Look up."}, {"content": "I look."}, *CALL]
    lines(monkeypatch, "Where is blue?\nabove\n/decline\n")
    with answering(Script(deltas=deltas, finish="tool_calls")) as server:
        assert chat("--url", server.url) == 0
    first, second, third = server.asked
    said = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Look up.",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}}],
    }
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert second["messages"][1:] == [
        said,
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "above"},
    ]
    assert third["messages"][3:] == [
        said,
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "The user declined this call."},
    ]


def test_less_thinking_is_advised_as_it_is_asked_for_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(Script(deltas=[{"reasoning_content": "Hm, hm."}], finish="length")) as server:
        assert chat("--url", server.url, "Hello") == 0
        assert "think less: --effort low" in " ".join(capsys.readouterr().err.split())
        lines(monkeypatch, "Hello\n")
        assert chat("--url", server.url) == 0
        assert "think less: /effort low" in " ".join(capsys.readouterr().err.split())
        lines(monkeypatch, "/effort low\nHello\n")
        assert chat("--url", server.url) == 0
        assert "think less" not in " ".join(capsys.readouterr().err.split())


def test_retry_asks_the_same_again_without_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lines(monkeypatch, "Hello\n/retry\n/new\nBye\n")
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url, "--system", "Be brief.") == 0
    contents = [[message["content"] for message in asked["messages"]] for asked in server.asked]
    assert contents == [["Be brief.", "Hello"], ["Be brief.", "Hello"], ["Be brief.", "Bye"]]


def test_the_talk_can_be_saved_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines(monkeypatch, f"Hello\n/save {tmp_path / 'talk.json'}\n")
    with answering(Script(deltas=[{"reasoning_content": "Hm."}, {"content": "Hi."}])) as server:
        assert chat("--url", server.url) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["schema"] == "kimigguf.talk/1"
    assert saved["messages"][1]["reasoning_content"] == "Hm."


def test_the_effort_is_sent_in_both_spellings_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url, "--effort", "low", "Hello") == 0
        assert chat("--url", server.url, "--effort", "medium", "Hello") == 2
    arguments = server.asked[0]["chat_template_kwargs"]
    assert arguments == {"reasoning_effort": "low", "thinking_effort": "low"}
    assert len(server.asked) == 1


def test_json_holds_the_whole_message(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(Script(deltas=[{"reasoning_content": "Hm."}, {"content": "Hi."}])) as server:
        assert chat("--json", "--url", server.url, "Hello") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.chat/1"
    assert data["message"] == {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    assert data["finish_reason"] == "stop"
    assert data["timings"]["predicted_n"] == 2


def test_a_prompt_can_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    lines(monkeypatch, "two\nlines\n")
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url, "-") == 0
    assert server.asked[0]["messages"][0]["content"] == "two\nlines\n"


def test_an_answer_used_up_by_thinking_is_no_fault_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(Script(deltas=[{"reasoning_content": "Hm, hm."}], finish="length")) as server:
        assert chat("--url", server.url, "--max-tokens", "2", "Hello") == 0
    assert "thinking used up all tokens" in capsys.readouterr().err
    assert server.asked[0]["max_tokens"] == 2


def failing(capsys: pytest.CaptureFixture[str], script: Script, *argv: str) -> tuple[int, dict[str, Any]]:
    with answering(script) as server:
        code = chat("--json", "--url", server.url, *argv, "Hello")
    record: dict[str, Any] = json.loads(capsys.readouterr().err)
    return code, record


@pytest.mark.parametrize(
    ("status", "error", "exit_code", "code"),
    [
        (401, {"message": "Invalid API Key", "type": "authentication_error", "code": 401}, 4, "bad-key"),
        (503, {"message": "Loading model", "type": "unavailable_error", "code": 503}, 6, "still-loading"),
        (400, {"message": "the request exceeds the available context size", "type": "exceed_context_size_error",
               "code": 400, "n_prompt_tokens": 9000, "n_ctx": 8192}, 2, "context-full"),
        (404, {"message": "File Not Found", "type": "not_found_error", "code": 404}, 4, "http-error"),
        (500, {"message": "boom", "type": "server_error", "code": 500}, 4, "http-error"),
    ],
)  # fmt: skip
def test_a_refusal_is_told_for_what_it_is(
    capsys: pytest.CaptureFixture[str], status: int, error: dict[str, Any], exit_code: int, code: str
) -> None:
    found, record = failing(capsys, Script(status=status, error=error))
    assert (found, record["code"]) == (exit_code, code)
    assert record["cause"] == error["message"]
    if code == "context-full":
        assert "9000" in record["message"]
        assert "8192" in record["message"]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (Script(deltas=[{"content": "Hi"}], hang_up=True), "peer closed connection"),
        (Script(chunks=[{"choices": [{"index": 0, "delta": {"content": "Hi"}}]}]), "before the end"),
        (Script(chunks=[]), "before the end"),
    ],
)
def test_an_answer_without_its_end_is_none(capsys: pytest.CaptureFixture[str], script: Script, cause: str) -> None:
    """A server that dies in the middle looks to a client like one that is done."""
    code, record = failing(capsys, script)
    assert (code, record["code"], record["hint"]) == (6, "answer-broke-off", "kimigguf doctor")
    assert cause in record["cause"]


def test_a_stream_that_is_no_json_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    code, record = failing(capsys, Script(raw=b"data: {nonsense\n\n"))
    assert (code, record["code"]) == (6, "answer-broke-off")
    assert "no JSON" in record["cause"]


def test_a_server_without_counts_or_clock_is_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in "abc"]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    with answering(Script(chunks=chunks, pause=0.05)) as server:
        assert chat("--url", server.url, "Hello") == 0
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert "(about 3 tokens, " in err
    assert "by this side's clock" in err
    assert "return_progress" not in server.asked[0]  # a strict server refuses what it does not know


def test_a_server_that_refuses_to_count_is_asked_again_without(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(Script(deltas=[{"content": "Hi."}], refuses="stream_options")) as server:
        assert chat("--url", server.url, "Hello") == 0
    assert capsys.readouterr().out == "Hi.\n"
    assert ["stream_options" in asked for asked in server.asked] == [True, False]


@pytest.mark.parametrize(
    ("script", "room"),
    [
        (Script(entry={"max_model_len": 4}), "3 of 4"),
        (Script(entry={"context_length": 30}), "3 of 30"),
        (Script(props={"default_generation_settings": {"n_ctx": 300}}), "3 of 300"),
        (Script(props={"default_generation_settings": None}), None),
    ],
)
def test_the_use_of_the_context_is_told_where_its_size_is(
    capsys: pytest.CaptureFixture[str], script: Script, room: str | None
) -> None:
    script.deltas = [{"content": "Hi."}]
    with answering(script) as server:
        assert chat("--url", server.url, "Hello") == 0
    err = capsys.readouterr().err
    assert f"context {room}" in err if room else "context" not in err


def test_a_talk_goes_on_where_it_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with answering(Script(deltas=[{"reasoning_content": "Hm."}, {"content": "Hi."}])) as server:
        lines(monkeypatch, f"Hello\n/save {file}\n")
        assert chat("--url", server.url, "--system", "Be brief.", "--effort", "low") == 0
        lines(monkeypatch, "And now?\n/save\n/new\nBye\n")
        assert chat("--url", server.url, "--resume", str(file)) == 0
        assert chat("--url", server.url, "--resume", str(file), "--system", "No.", "Hello") == 2
    second, third = server.asked[1:]
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "Hello", "Hi.", "And now?"]
    assert second["messages"][2]["reasoning_content"] == "Hm."
    assert second["chat_template_kwargs"]["thinking_effort"] == "low"
    assert [message["content"] for message in third["messages"]] == ["Be brief.", "Bye"]
    assert len(json.loads(file.read_text())["messages"]) == 5  # saved again under its own name


def test_a_save_never_overwrites_what_is_not_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    precious = tmp_path / "precious.json"
    precious.write_text("precious")
    lines(monkeypatch, f"Hello\n/save {precious}\n")
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url) == 2
    assert precious.read_text() == "precious"


def test_a_save_to_a_user_that_is_not_known_costs_no_talk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(monkeypatch, "Hello\n/save ~no-such-user/talk.json\n")
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url) == 2
    assert "cannot write ~no-such-user/talk.json" in capsys.readouterr().err


@pytest.mark.parametrize("utf_8", [True, False])
def test_a_diff_that_is_no_utf_8_and_a_narrow_locale_are_no_bugs(tmp_path: Path, utf_8: bool) -> None:
    with answering(Script(deltas=[{"content": "数 Hi."}])) as server:
        done = subprocess.run(
            [sys.executable, "-c", "from kimigguf.cli.app import main; main()", "chat", "--url", server.url, "-"],
            input=b"caf\xe9",
            capture_output=True,
            check=False,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8" if utf_8 else "ascii"},
        )
    assert (done.returncode, done.stdout) == (0, "数 Hi.\n".encode() if utf_8 else b"? Hi.\n")
    assert server.asked[0]["messages"][0]["content"] == "caf\ufffd"


def test_an_interrupted_question_ends_the_command(tmp_path: Path) -> None:
    with answering(Script(deltas=[{"content": "word "}] * 400, pause=0.05)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", "from kimigguf.cli.app import main; main()", "chat", "--url", server.url, "Hello"],
            stdout=subprocess.PIPE,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"word "
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        assert server.gone.wait(10)


def test_an_answer_that_breaks_off_is_a_server_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, record = failing(capsys, Script(deltas=[{"content": "Hi"}], cut=True))
    assert (code, record["code"]) == (6, "answer-broke-off")
    assert "device lost" in record["cause"]


def test_no_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert chat("--json", "--url", f"http://127.0.0.1:{port}", "Hello") == 4
    record = json.loads(capsys.readouterr().err)
    assert record["code"] == "server-unreachable"
    # No quant by name: it may be one that does not fit this machine.
    assert record["hint"] == f"kimigguf recommend says what fits here; then kimigguf serve QUANT --port {port}"


def test_a_server_elsewhere_cannot_be_started_from_here() -> None:
    url = "http://host.example:8080/v1/"
    with pytest.raises(NetworkError) as caught, mapped(url):
        raise openai.APIConnectionError(request=httpx2.Request("GET", url))
    assert (caught.value.code, caught.value.hint) == ("server-unreachable", "curl http://host.example:8080/v1/models")


@pytest.mark.parametrize(
    "typed", ["notaurl", "host:port", "host:99999", "http://[::1", "two words:80", "", "ftp://host"]
)
def test_an_address_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str], typed: str) -> None:
    assert chat("--json", "--url", typed, "Hello") == 2
    record = json.loads(capsys.readouterr().err)
    assert (record["code"], record["hint"]) == ("bad-url", "kimigguf chat --url http://127.0.0.1:8080")


def test_this_machine_is_a_port_after_a_colon() -> None:
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", f":{server.url.rpartition(':')[2]}", "Hello") == 0
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"", "no OpenAI-compatible API"),
        (b"<html><h1>Not Found</h1></html>", "no OpenAI-compatible API"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"no such route", "no such route"),
    ],
)
def test_a_server_that_is_another_is_told_in_words(capsys: pytest.CaptureFixture[str], body: bytes, cause: str) -> None:
    """ "Error code: 404" says nothing, and a page for a browser says too much."""
    with answering(Script(status=404, page=body)) as server:
        assert chat("--json", "--url", server.url, "Hello") == 4
    record = json.loads(capsys.readouterr().err)
    assert (record["code"], record["message"]) == ("http-error", f"{server.url}/v1/ answered with HTTP 404")
    assert cause in record["cause"]
    assert "Error code" not in record["cause"]
    assert "<" not in record["cause"]


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"[]", b'{"data": [1]}'])
@pytest.mark.parametrize("model", [(), ("--model", "nope")])
def test_a_web_server_that_answers_everything_is_no_api(
    capsys: pytest.CaptureFixture[str], body: bytes, model: tuple[str, ...]
) -> None:
    with answering(Script(page=body)) as server:
        assert chat("--json", "--url", server.url, *model, "Hello") == 4
    record = json.loads(capsys.readouterr().err)
    assert (record["code"], record["hint"]) == ("no-api", f"curl {server.url}/v1/models")


def test_a_model_that_the_server_does_not_list_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """llama-server answers to any name, so a wrong one goes unnoticed."""
    with answering(Script(deltas=[{"content": "Hi."}], models=("a", "b", "c", "d", "e", "f"))) as server:
        assert chat("--url", server.url, "--model", "nope", "Hello") == 0
        out, err = capsys.readouterr()
        assert out == "Hi.\n"
        assert "lists no model 'nope', only a, b, c, d and 2 more" in err
        assert chat("--url", server.url, "--model", "e", "Hello") == 0
        assert "warning" not in capsys.readouterr().err
    assert [asked["model"] for asked in server.asked] == ["nope", "e"]


def test_a_server_without_a_list_of_models_is_asked_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(Script(deltas=[{"content": "Hi."}], page=b"", status=404)) as server:
        assert chat("--url", server.url, "--model", "nope", "Hello") == 0
    assert capsys.readouterr().out == "Hi.\n"


def test_an_empty_prompt_is_not_sent() -> None:
    with answering(Script()) as server:
        assert chat("--url", server.url, "  ") == 2
    assert server.asked == []


def test_the_key_comes_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-1\n")
    keys.chmod(0o644)
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        assert chat("--url", server.url, "--api-key-file", str(keys), "Hello") == 2
        keys.chmod(0o600)
        assert chat("--url", server.url, "--api-key-file", str(keys), "Hello") == 0
        assert chat("--url", server.url, "Hello", environ={"KIMIGGUF_API_KEY": "secret-2"}) == 0
    assert list(dict.fromkeys(server.keys)) == ["Bearer secret-1", "Bearer secret-2"]


def test_without_an_address_the_server_that_runs_here_is_asked_with_its_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("secret-3\n")
    me = ProcessId.of(os.getpid())
    assert me is not None
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        entry = Entry(
            name="k3", supervisor=me, engine=me, host="127.0.0.1", port=int(server.url.rpartition(":")[2]),
            alias="kimi-k3", quant=None, log="", plan_file="", arguments=(), folder="", started_at="", planned_bytes=0,
            api_key_file=str(keys),
        )  # fmt: skip
        with entered(tmp_path / "kimigguf" / "servers", entry):
            assert chat("Hello", environ={"XDG_STATE_HOME": str(tmp_path)}) == 0
    assert set(server.keys) == {"Bearer secret-3"}


def test_of_several_servers_the_one_that_is_named_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        mine = Entry(
            name="b", supervisor=me, engine=me, host="127.0.0.1", port=int(server.url.rpartition(":")[2]),
            alias="kimi-k3", quant=None, log="", plan_file="", arguments=(), folder="", started_at="", planned_bytes=0,
        )  # fmt: skip
        folder = tmp_path / "kimigguf" / "servers"
        with entered(folder, mine), entered(folder, replace(mine, name="a", port=free_port())):
            assert chat("Hello", environ=environ) == 2
            assert "--name: a, b" in " ".join(capsys.readouterr().err.split())
            assert chat("--name", "b", "Hello", environ=environ) == 0
            assert capsys.readouterr().out == "Hi.\n"
            assert chat("--name", "c", "Hello", environ=environ) == 2
            assert chat("--name", "b", "--url", server.url, "Hello", environ=environ) == 2
    assert set(server.keys) == {"Bearer none"}


def test_a_server_that_is_named_and_does_not_run_is_not_replaced_by_the_default_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("--name", "gone", "Hello", environ={"XDG_STATE_HOME": str(tmp_path)}) == 2
    assert "no server is called 'gone'" in capsys.readouterr().err


def test_somebody_elses_key_is_not_sent_around() -> None:
    with answering(Script(deltas=[{"content": "Hi."}])) as server:
        chat("--url", server.url, "Hello", environ={"OPENAI_API_KEY": "sk-mine"})
    assert set(server.keys) == {"Bearer none"}


@pytest.mark.parametrize(
    ("typed", "used"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://host/v1/", "http://host/v1"),
        ("https://api.example/api/v2", "https://api.example/api/v2"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
        (":8302", "http://127.0.0.1:8302/v1"),
        ("localhost:8302", "http://localhost:8302/v1"),
    ],
)
def test_an_address_is_taken_as_people_write_it(typed: str, used: str) -> None:
    assert base_url(typed) == used


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "ftp://host",
        "http://",
        "http://x:port",
        "http://sk-key@host",
        "http://h/v1?key=sk-1",
        "http://sk-key@h:port",
    ],
)
def test_an_address_that_is_none_is_refused(typed: str) -> None:
    with pytest.raises(UsageError) as error:
        base_url(typed)
    assert error.value.code == "bad-url"
    assert "sk-" not in error.value.message  # messages end up in logs, as addresses do
