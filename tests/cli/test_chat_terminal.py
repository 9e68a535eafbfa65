"""``kimigguf chat`` at a terminal: a real pty, the real program, and an emulator that shows what a person sees."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from fakes.openai_server import Script, answering
from fakes.served import plan_for, served
from fakes.terminal import Terminal, terminal

LLAMA = {"default_generation_settings": {"n_ctx": 1000}}
CODE = "\n".join(f"    code_line_{n} = {n}" for n in range(60))
TABLE = "\n".join(f"| row_{n} | cell_{n} 数量 |" for n in range(40))
LONG = (
    "# Title\n\n"
    + "\n\n".join(
        f"Paragraph **number_{n}** and some more words that go on until the line must wrap." for n in range(20)
    )
    + f"\n\n1. First:\n   ```python\n{CODE}\n   ```\n2. Second\n\n| Name | 数量 |\n|---|---|\n{TABLE}\n\nThe end."
)


def pieces(text: str, size: int = 7) -> list[dict[str, Any]]:
    return [{"content": text[at : at + size]} for at in range(0, len(text), size)]


def at(server: Script, tmp_path: Path, *argv: str, **told: Any) -> Any:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")} | told.pop("environ", {})
    return terminal(["chat", "--url", server.url, *argv], environ, **told)


def end(screen: Terminal) -> None:
    screen.send("\x04")
    assert screen.ended() == 0


@pytest.mark.parametrize("columns", [80, 120])
def test_an_answer_longer_than_the_screen_is_there_once_and_whole(tmp_path: Path, columns: int) -> None:
    """What is live is drawn again and again; on the way up the screen no line of it may stay twice, or go missing."""
    deltas = [{"reasoning_content": "Let me think."}, *pieces(LONG)]
    script = Script(deltas=deltas, pause=0.002, props=LLAMA)
    with answering(script) as server, at(server, tmp_path, columns=columns) as screen:
        screen.prompt(1)
        screen.enter("Hello")
        shown = screen.until("tokens/s")
        screen.enter("/think")
        screen.until("Let me think.")
        end(screen)
    names = re.findall(r"(?:number|code_line|row|cell)_\d+", LONG)
    assert re.findall(r"(?:number|code_line|row|cell)_\d+", shown) == names
    assert shown.count("The end.") == shown.count("Second") == shown.count("First:") == 1
    assert "**" not in shown
    assert "|--" not in shown
    assert "thought: about 1 token" in shown
    assert "context 3 of 1,000" in shown
    assert max(map(len, screen.lines)) <= columns


def test_no_color_is_honoured_and_plain_shows_what_came(tmp_path: Path) -> None:
    text = "Some **bold** words.\n\n```python\nx = 1\n```\n"
    with answering(Script(deltas=[{"reasoning_content": "Hm, hm."}, *pieces(text)])) as server:
        with at(server, tmp_path, "Hello", environ={"NO_COLOR": "1"}) as drawn:
            assert drawn.ended() == 0
        with at(server, tmp_path, "--plain", "Hello") as plain:
            assert plain.ended() == 0
    assert not re.search(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|4[0-7])(?:;\d+)*m", drawn.raw)
    assert "Some bold words." in drawn.text
    assert "Hm, hm." not in drawn.text
    assert "Hm, hm." in plain.text
    assert "Some **bold** words.\n\n```python\nx = 1\n```" in plain.text


def test_the_answer_can_go_to_a_file_while_its_reader_types(tmp_path: Path) -> None:
    script = Script(deltas=[{"reasoning_content": "Hm."}, *pieces("Some **bold** words.")])
    out = (tmp_path / "out").open("wb")
    with answering(script) as server, out, at(server, tmp_path, stdout=out.fileno()) as screen:
        screen.prompt(1)
        screen.enter("Hello")
        screen.until("tokens/s")
        end(screen)
    assert (tmp_path / "out").read_text() == "Some **bold** words.\n"
    assert "bold" not in screen.text


def test_ctrl_c_stops_an_answer_and_keeps_what_came(tmp_path: Path) -> None:
    turns = [[{"reasoning_content": "Hm."}, *pieces("one two " * 500)], [{"content": "Second."}]]
    with answering(Script(turns=turns, pause=0.02)) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.enter("Go")
        screen.until("one two")
        assert not screen.echoes  # what is typed ahead must not stand in the middle of the answer
        screen.send("\x03\x03")  # a key that is held down sends several
        screen.until("what came is kept")
        screen.enter("And now?")
        screen.until("Second.")
        screen.enter(f"/save {tmp_path / 'talk.json'}")
        screen.until("saved to")
        screen.prompt(4)
        screen.send("\x03")
        screen.until("Ctrl-C again")
        screen.prompt(5)
        screen.send("\x03")
        assert screen.ended() == 0
    assert server.gone.wait(10)  # the server was told to stop
    kept = server.asked[1]["messages"][1]
    assert kept["content"].startswith("one two")
    assert len(kept["content"]) < 4000
    assert kept["reasoning_content"] == "Hm."
    assert json.loads((tmp_path / "talk.json").read_text())["cut"] == [1]


@pytest.mark.parametrize("answers", [True, False])
def test_a_terminated_talk_ends_and_leaves_the_terminal_as_it_was(tmp_path: Path, answers: bool) -> None:
    """Ctrl-C goes back to the prompt; a supervisor's TERM and a closed terminal do not."""
    with answering(Script(deltas=pieces("one two " * 500), pause=0.02)) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.until(">")
        if answers:
            screen.enter("Go")
            screen.until("one two")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.ended() == 130
        assert screen.echoes
    assert "Traceback" not in screen.text


def test_what_is_typed_ahead_waits_for_the_prompt(tmp_path: Path) -> None:
    with answering(Script(deltas=pieces("one two " * 10), pause=0.05)) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.enter("Go")
        screen.until("one two")
        screen.send("typed ahead\r\x04")
        assert screen.ended() == 0
    assert "typed" not in screen.text.partition("tokens/s")[0]
    assert server.asked[1]["messages"][2]["content"] == "typed ahead"


def test_several_lines_are_one_message(tmp_path: Path) -> None:
    with answering(Script(deltas=[{"content": "Hi."}])) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.send("\x1b[200~pasted one\npasted two\n\x1b[201~")
        screen.enter("")
        screen.until("tokens/s")
        screen.send("typed one\\\rtyped two\r")
        screen.until("tokens/s", times=2)
        screen.prompt(3)
        screen.send("not this")
        screen.until("not this")
        screen.send("\x03")  # takes back what was typed
        screen.gone("not this")
        screen.send("\x1b[A\r")  # the line before again
        screen.until("tokens/s", times=3)
        end(screen)
    said = [asked["messages"][-1]["content"] for asked in server.asked]
    assert said == ["pasted one\npasted two", "typed one\ntyped two", "typed one\ntyped two"]
    history = tmp_path / "state" / "kimigguf" / "chat-history"
    assert "pasted two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_tool_call_is_shown_and_answered_by_hand(tmp_path: Path) -> None:
    function = {"name": "get_time", "arguments": '{"city": "Paris", "zone": {"summer": true}}'}
    calls = [{"tool_calls": [{"index": n, "id": f"c{n}", "type": "function", "function": function}]} for n in (0, 1)]
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "get_time", "parameters": {"type": "object", "properties": {}}}]')
    script = Script(turns=[calls, [{"content": "It is noon."}]])
    with answering(script) as server, at(server, tmp_path, "--tools", str(tools)) as screen:
        screen.prompt(1)
        screen.enter("What time is it?")
        screen.until("result of get_time>")
        assert 'calls get_time\n  {\n    "city": "Paris"' in screen.text
        screen.enter("12:00")
        screen.until("result of get_time>", times=2)
        screen.enter("/decline")
        screen.until("It is noon.")
        end(screen)
    assert server.asked[0]["tools"][0]["function"]["name"] == "get_time"
    assert [message["content"] for message in server.asked[1]["messages"][2:]] == [
        "12:00",
        "The user declined this call.",
    ]


ATTACK = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;AAAA\x07\x9b31m\u202eevil"


def test_nothing_that_a_model_says_commands_the_terminal(tmp_path: Path) -> None:
    function = {"name": f"f{ATTACK}", "arguments": json.dumps({"a": ATTACK}, ensure_ascii=False)}
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": ATTACK},
        {"content": f"**b{ATTACK}** [x](http://h/{ATTACK})\n```{ATTACK}\n{ATTACK}\n```\n"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]},
    ]
    with answering(Script(deltas=deltas, models=(f"m{ATTACK}",))) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.enter("Hello")
        screen.until("result of f")
        screen.enter("/think")
        screen.until("evil", times=6)
        server.error, server.status = {"message": ATTACK, "type": "server_error"}, 500
        screen.enter("/decline")
        screen.until("HTTP 500")
        end(screen)
    for harm in (b"\x1b]0;", b"\x1b[2J", b"\x1b]52", b"\x07", "\x9b".encode(), "\u202e".encode()):
        assert harm not in screen.raw


def test_a_failure_leaves_the_talk_as_it_was_and_can_be_asked_again(tmp_path: Path) -> None:
    with answering(Script(deltas=[{"content": "First."}])) as server, at(server, tmp_path) as screen:
        screen.prompt(1)
        screen.enter("One")
        screen.until("tokens/s")
        server.hang_up = True
        screen.enter("Two")
        screen.until("(the talk is as it was before; /retry asks again)")
        assert "broke off" in screen.text
        server.hang_up, server.status = False, 429
        server.error, server.headers = {"message": "slow down"}, {"Retry-After": "7"}
        screen.enter("/retry")
        screen.until("ask again in 7 seconds")
        server.error = None
        screen.enter("/retry")
        screen.until("tokens/s", times=2)
        screen.enter("/efort low")
        screen.until("did you mean /effort?")
        screen.enter("/effort low")
        screen.until("effort: low")
        screen.enter("/effort medium")
        screen.until("unknown-effort")
        screen.enter("/retry")
        screen.until("tokens/s", times=3)
        end(screen)
    said = [[message["content"] for message in asked["messages"]] for asked in server.asked]
    assert said == [["One"], *[["One", "First.", "Two"]] * 4]
    assert server.asked[-1]["chat_template_kwargs"]["thinking_effort"] == "low"


def test_what_takes_long_is_seen_to_go_on(tmp_path: Path) -> None:
    """A terabyte model reads a prompt for minutes: silence looks like a hang."""
    reading = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}
    chunks: list[dict[str, Any]] = [
        reading | {"prompt_progress": {"total": 9000, "cache": 0, "processed": 3000, "time_ms": 1}},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}], "timings": {"predicted_n": 412}},
        {"choices": [{"index": 0, "delta": {"content": "Hi."}, "finish_reason": "stop"}]},
    ]
    script = Script(chunks=chunks, pause=0.6, props=LLAMA)
    with answering(script) as server, at(server, tmp_path, columns=120) as screen:
        screen.prompt(1)
        screen.enter("Hello")
        screen.until("reading the prompt… 3,000 of 9,000 tokens, ")
        screen.until("thinking… 412 tokens, ")
        screen.until("Hi.")
        screen.prompt(2)
        assert "thinking…" not in screen.text
        end(screen)
    assert server.asked[0]["return_progress"] is True


@pytest.mark.engine
def test_a_talk_with_the_real_engine_goes_on_where_it_was_saved(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    """The real K3 parser, template and limits: what chat sends back is what the engine takes."""
    files = sorted(tiny("UD-IQ1_M").glob("*.gguf"))
    plan = plan_for(files, "kimi-k3", tiny_k3.LAYERS)
    file, environ = tmp_path / "talk.json", {"XDG_STATE_HOME": str(tmp_path / "state")}
    with served(plan, tmp_path / "engine") as url:
        with terminal(["chat", "--url", url, "--max-tokens", "8", "--effort", "low"], environ) as screen:
            screen.until("context 2,048 tokens")
            screen.prompt(1)
            screen.enter("Hello")
            screen.until("of 2,048, ")
            screen.enter("And now?")
            screen.until("of 2,048, ", times=2)
            screen.enter("/retry")
            screen.until("of 2,048, ", times=3)
            screen.enter(f"/save {file}")
            screen.until("saved to")
            end(screen)
        saved = json.loads(file.read_text())
        # A stopped answer without a word, and a tool call that waits: what the template must be able to read, too.
        function = {"name": "get_time", "arguments": '{"city": "Paris"}'}
        more = [
            {"role": "user", "content": "Stop"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm"},
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        ]
        file.write_text(json.dumps(saved | {"messages": saved["messages"] + more}))
        with terminal(["chat", "--url", url, "--max-tokens", "8", "--resume", str(file)], environ) as screen:
            screen.until("4 questions taken")
            screen.until("result of get_time>")
            screen.enter("12:00")
            screen.until("of 2,048, ")
            screen.enter("Go on")
            screen.until("of 2,048, ", times=2)
            end(screen)
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert saved["messages"][1]["reasoning_content"]
    assert saved["effort"] == "low"
