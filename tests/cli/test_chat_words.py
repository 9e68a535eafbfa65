"""What a typed line means, and what is said beside an answer: tables."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from kimigguf.cli.chat_commands import Command, Meaning, Name, Say, Unknown, help_lines, meaning
from kimigguf.cli.chat_prompt import _history
from kimigguf.cli.chat_remarks import call_lines, figures, warnings
from kimigguf.cli.chat_view import status_line, thought_line
from kimigguf.engines.endpoint import Limits
from kimigguf.engines.printable import printable
from kimigguf.engines.turn import Call, Turn


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("  ", None),
        ("Hello /quit ", Say(text="Hello /quit")),
        ("\n    if x:\n        y\n", Say(text="    if x:\n        y")),
        (" /retry", Command(name=Name.RETRY)),
        ("/effort  low ", Command(name=Name.EFFORT, rest="low")),
        ("/save my talk.json", Command(name=Name.SAVE, rest="my talk.json")),
        ("/clear", Command(name=Name.NEW)),
        ("/exit", Command(name=Name.QUIT)),
        ("/?", Command(name=Name.HELP)),
        ("/efort low", Unknown(word="/efort", nearest="/effort")),
        ("/xyz", Unknown(word="/xyz", nearest=None)),
        ("/etc/hosts has what in it?", Say(text="/etc/hosts has what in it?")),
        ("/retry\nis what I pasted", Say(text="/retry\nis what I pasted")),
        ("/ is a slash", Say(text="/ is a slash")),
    ],
)
def test_a_line_means_what_its_writer_meant(line: str, meant: Meaning) -> None:
    assert meaning(line) == meant


def test_every_command_is_helped_with() -> None:
    assert all(any(f"/{name}" in line for line in help_lines()) for name in Name)


CLOCK: dict[str, Any] = {"first_seconds": 2.0, "last_seconds": 4.0, "pieces": 21}
USAGE = {"prompt_tokens": 700, "completion_tokens": 41}


@pytest.mark.parametrize(
    ("turn", "room", "said"),
    [
        (Turn(timings={"predicted_n": 211, "predicted_per_second": 18.44}), None, "(211 tokens, 18.4 tokens/s)"),
        (Turn(timings={"predicted_n": 1, "predicted_per_second": 9e9}, pieces=1), None, "(about 1 token)"),
        (Turn(usage=USAGE, **CLOCK), 1000,
         "(41 tokens, 20.0 tokens/s by this side's clock; first after 2 s; context 741 of 1,000, 74%)"),
        (Turn(**CLOCK), 1000, "(about 21 tokens, 10.0 tokens/s by this side's clock; first after 2 s)"),
        (Turn(timings={"cache_n": 10, "prompt_n": 20, "predicted_n": 30, "predicted_per_second": 5.0}), 120,
         "(30 tokens, 5.0 tokens/s; context 60 of 120, 50%)"),
        (Turn(usage={"prompt_tokens": None}, timings={"predicted_per_second": None}), 10, None),
        (Turn(), None, None),
    ],
)  # fmt: skip
def test_figures_say_whose_clock_they_are_by(turn: Turn, room: int | None, said: str | None) -> None:
    assert figures(turn, Limits(context_tokens=room)) == said


LIMIT = "the token limit is reached"
LESS = "or have it think less: --effort low"


def told(turn: Turn, room: int | None = None, max_tokens: int | None = None, **more: Any) -> str:
    return " | ".join(warnings(turn, Limits(context_tokens=room), max_tokens=max_tokens, **more))


@pytest.mark.parametrize(
    ("turn", "more", "words"),
    [
        (Turn(answer="Hi.", finish_reason="stop"), {}, ""),
        (Turn(thinking="Hm", finish_reason="length"), {"max_tokens": 9},
         f"thinking used up all tokens before an answer began ({LIMIT}): raise --max-tokens (now 9), {LESS}"),
        (Turn(answer="Hi", finish_reason="length"), {},
         f"the answer stops half-way ({LIMIT}): raise the server's own limit"),
        (Turn(answer="Hi", finish_reason="length", usage=USAGE), {"room": 741},
         "the answer stops half-way (the context is full): serve with a larger --context, or /new"),
        (Turn(calls=(Call(index=0),), finish_reason="length"), {"max_tokens": 9},
         f"a tool call stops half-way ({LIMIT}): raise --max-tokens (now 9)"),
        (Turn(answer="Hi", finish_reason="stop", usage=USAGE), {"room": 800},
         "the context is 93% full, 59 tokens are left: /save and /new, or serve with a larger --context"),
        (Turn(thinking="Hm", finish_reason="stop"), {}, "the answer is empty: there is only thinking (/think)"),
        (Turn(finish_reason="content_filter"), {}, "the server's filter stopped the answer"),
        (Turn(cut=True, thinking="Hm"), {}, ""),
        (Turn(calls=(Call(index=0),), finish_reason="tool_calls"), {}, ""),
    ],
)  # fmt: skip
def test_what_went_short_is_named_with_what_helps(turn: Turn, more: dict[str, Any], words: str) -> None:
    assert told(turn, **more) == words


def test_less_thinking_is_advised_as_it_can_be_asked_for_and_only_where_it_is_not_asked_for_already() -> None:
    turn = Turn(thinking="Hm", finish_reason="length")
    assert told(turn, effort="high").endswith("less: --effort low")
    assert told(turn, effort="high", talks=True).endswith("less: /effort low")
    assert told(turn, max_tokens=9, effort="low").endswith("raise --max-tokens (now 9)")


def test_a_call_is_shown_for_people_and_never_at_endless_length() -> None:
    call = {"function": {"name": "f\x1b[2J", "arguments": '{"a": [' + ",".join("1" * 60) + "]}"}}
    shown = call_lines(call)
    assert shown[0] == "calls f\ufffd[2J"
    assert shown[-1] == "  ... 24 more lines"
    assert call_lines({"function": {"name": "f", "arguments": "not json"}}) == ("calls f", "  not json")
    assert call_lines({"function": {"name": "f", "arguments": ""}}) == ("calls f", "  {}")


@pytest.mark.parametrize(
    ("turn", "line"),
    [
        (Turn(), "waiting… 31 s"),
        (Turn(progress=(3000, 9000)), "reading the prompt… 3,000 of 9,000 tokens, 31 s"),
        (Turn(progress=(9000, 9000)), "waiting… 31 s"),
        (Turn(thinking="Hm", thinking_pieces=412), "thinking… 412 tokens, 31 s"),
        (Turn(thinking="Hm", timings={"predicted_n": 9}), "thinking… 9 tokens, 31 s"),
        (Turn(thinking="Hm", pieces=5, calls=(Call(index=0, name="f\x07"),)), "calling f\ufffd… 5 tokens, 31 s"),
    ],
)
def test_what_goes_on_is_said_in_one_line(turn: Turn, line: str) -> None:
    assert status_line(turn, 31.2) == line


def test_folded_thinking_says_how_much_there_was() -> None:
    turn = Turn(thinking_pieces=412, first_seconds=1.0, answer_seconds=32.0, last_seconds=99.0)
    assert thought_line(turn, " (/think shows it)") == "thought: about 412 tokens, 31 s (/think shows it)"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\x1b[2Jb\x07\nc\td\x9b", "a\ufffd[2Jb\ufffd\nc\td\ufffd"),
        ("one\r\ntwo", "one\ntwo"),
        ("\u202eevil\u2066", "\ufffdevil\ufffd"),
        ("日本　語\u00a0et\u202fvoilà", "日本　語\u00a0et\u202fvoilà"),
        ("👩\u200d🚀 mi\u200cravam שלום\u200f", "👩\u200d🚀 mi\u200cravam שלום\u200f"),
    ],
)
def test_a_model_cannot_command_the_terminal_and_every_script_stays_whole(text: str, seen: str) -> None:
    assert printable(text) == seen


def test_a_history_that_can_no_longer_be_written_ends_no_talk(tmp_path: Path) -> None:
    history = _history(tmp_path / "state" / "chat-history")
    history.append_string("kept")
    assert "kept" in (tmp_path / "state" / "chat-history").read_text()
    shutil.rmtree(tmp_path / "state")
    history.append_string("only for now")
    assert history.get_strings()[-1] == "only for now"
