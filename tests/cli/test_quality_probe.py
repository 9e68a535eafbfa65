import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_endpoint import Refuse, Say, serve

from kimigguf.cli.app import App, run
from kimigguf.cli.quality_probe_sides import agreed
from kimigguf.cli.show import Show
from kimigguf.engines.registry import Entry, ProcessId, entered
from kimigguf.errors import ExitCode
from kimigguf.events import Step


def call(*arguments: str) -> int:
    return run(["quality-probe", *arguments], App(show=Show(), environ={}))


@pytest.fixture
def suite(tmp_path: Path) -> str:
    lines = [
        json.dumps({"id": f"i{n}", "prompt": f"{n}+{n}?", "check": {"kind": "number", "value": 2 * n}})
        for n in range(90)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def sums(body: dict[str, Any], _number: int = 0) -> Say:
    return Say(content=str(2 * int(body["messages"][0]["content"].split("+")[0])), thinking="add them")


def wrong(body: dict[str, Any], number: int) -> Say:
    return Say(content="12345") if number % 2 else sums(body)


def test_the_same_model_on_both_sides_is_the_same(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(sums) as candidate, serve(sums) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url]
        assert call(*sides, "--suite", suite, "--parallel", "4", "--tolerance", "0.1") == ExitCode.DONE
    shown = capsys.readouterr()
    assert "the same within noise" in shown.out
    assert "90 of 90" in shown.out
    assert "270 of 270 calls" in shown.err


def test_a_worse_candidate_is_exit_1_and_json_says_by_how_much(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(wrong) as candidate, serve(sums) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url]
        assert call(*sides, "--suite", suite, "--parallel", "4", "--json") == ExitCode.ANSWERED_NO
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["verdict"]) == ("kimigguf.quality-probe/1", "worse")
    first = answer["metrics"][0]
    assert first["name"] == "right answers"
    assert first["difference"]["high"] < -0.3
    assert answer["arms"][0]["right"] == 45
    assert answer["arms"][1]["right_interval_95"][0] > 0.9
    assert answer["suite"]["items"] == 90
    assert len(answer["items"]) == 90


def test_too_few_questions_are_said_to_be_too_few(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = Path(suite).with_name("few.jsonl")
    few.write_text("\n".join(Path(suite).read_text().splitlines()[:5]))
    with serve(sums) as candidate, serve(sums) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url]
        assert call(*sides, "--suite", str(few)) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "not enough samples" in out
    said = " ".join(out.split())
    assert "more items would tell" in said
    assert re.search(r"what would tell: about 73 questions in place of 5: --suite standard \(228\) or ", said)


def test_a_reference_that_never_answers_is_a_network_error_not_a_verdict(
    suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serve(sums) as candidate,
        serve(lambda _body, _n: Refuse(status=400, message="temperature is pinned")) as reference,
    ):
        sides = ["--candidate", candidate.url, "--reference", reference.url]
        assert call(*sides, "--suite", suite, "--temperature", "0.5", "--json") == ExitCode.NETWORK
    shown = capsys.readouterr()
    assert shown.out == ""
    error = json.loads(shown.err.splitlines()[-1])
    assert error["code"] == "no-replies"
    assert error["message"].startswith("the reference at ")  # never by the name of an arm
    assert "temperature is pinned" in error["cause"]


def test_a_run_folder_makes_the_second_run_free(suite: str, tmp_path: Path) -> None:
    with serve(sums) as candidate, serve(sums) as reference:
        arguments = ["--candidate", candidate.url, "--reference", reference.url, "--suite", suite, "--quiet"]
        assert call(*arguments, "--out", str(tmp_path / "out")) == ExitCode.DONE
        asked = len(candidate.bodies) + len(reference.bodies)
        assert call(*arguments, "--out", str(tmp_path / "out")) == ExitCode.DONE
        assert len(candidate.bodies) + len(reference.bodies) == asked == 270
    assert json.loads((tmp_path / "out" / "report.json").read_text())["schema"] == "kimigguf.quality-probe/1"
    assert "Every item" in (tmp_path / "out" / "report.html").read_text()


def test_a_stored_reference_is_not_asked_again(suite: str, tmp_path: Path) -> None:
    with serve(sums) as candidate, serve(sums) as reference, serve(wrong) as other:
        common = ["--reference", reference.url, "--suite", suite, "--quiet"]
        assert call("--candidate", candidate.url, *common, "--out", str(tmp_path / "a")) == ExitCode.DONE
        asked = len(reference.bodies)
        again = ["--candidate", other.url, *common, "--reference-run", str(tmp_path / "a")]
        assert call(*again, "--out", str(tmp_path / "b")) == ExitCode.ANSWERED_NO
        assert (asked, len(reference.bodies), len(other.bodies)) == (180, 180, 90)
        assert len((tmp_path / "b" / "calls.jsonl").read_text().splitlines()) == 270
        few = Path(suite).with_name("few.jsonl")
        few.write_text("\n".join(Path(suite).read_text().splitlines()[:5]))
        assert call(*again, "--suite", str(few)) == ExitCode.USAGE
        assert call(*again, "--reference-model", "other") == ExitCode.USAGE


def test_finished_runs_stand_side_by_side(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(sums) as good, serve(wrong) as bad, serve(sums) as reference:
        for name, candidate in (("probe-iq1_s", bad), ("UD-Q2_K_XL <b>", good)):
            common = ["--reference", reference.url, "--suite", suite, "--quiet", "--parallel", "4"]
            call("--candidate", candidate.url, *common, "--out", str(tmp_path / name))
    runs = [str(tmp_path / name) for name in ("probe-iq1_s", "UD-Q2_K_XL <b>")]
    page = tmp_path / "page.html"
    capsys.readouterr()
    assert call("compare", *runs, "--out", str(page), "--json") == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "kimigguf.quality-compare/1"
    assert [(run["label"], run["right"]) for run in answer["runs"]] == [("UD-Q2_K_XL <b>", 1.0), ("probe-iq1_s", 0.5)]
    assert [run["size_bytes"] for run in answer["runs"]] == [861_277_858_912, 594_040_923_616]
    assert answer["reference_right"] == 1.0
    text = page.read_text()
    assert "<b>" not in text
    assert text.count("<circle") == 4
    assert call("compare", *runs) == ExitCode.DONE
    assert "the reference itself: 100.0 % right" in capsys.readouterr().out


def test_runs_that_cannot_be_compared_are_refused(suite: str, tmp_path: Path) -> None:
    few = Path(suite).with_name("few.jsonl")
    few.write_text("\n".join(Path(suite).read_text().splitlines()[:5]))
    with serve(sums) as candidate, serve(sums) as reference, serve(sums) as other:
        for name, asked, judge in (("a", suite, reference), ("b", str(few), reference), ("c", suite, other)):
            sides = ["--candidate", candidate.url, "--reference", judge.url, "--suite", asked, "--quiet"]
            call(*sides, "--parallel", "4", "--out", str(tmp_path / name))
    for second in ("b", "c", "nothing"):
        assert call("compare", str(tmp_path / "a"), str(tmp_path / second)) == ExitCode.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ["--candidate", "ftp://x", "--reference", ":1"],
        ["--candidate", ":1"],
        ["--candidate", ":1", "--reference", ":1", "--suite", "nosuch"],
        ["--candidate", ":1", "--reference", ":1", "--repeat", "0"],
    ],
)
def test_bad_arguments_are_exit_2(arguments: list[str]) -> None:
    assert call(*arguments) == ExitCode.USAGE


def test_nobody_there_is_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--candidate", "127.0.0.1:9", "--reference", "127.0.0.1:9") == ExitCode.NETWORK
    assert "curl http://127.0.0.1:9/v1/models" in capsys.readouterr().err


def test_the_help_shows_an_example_and_where_keys_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == ExitCode.DONE
    out = capsys.readouterr().out
    assert "kimigguf quality-probe --reference kimi" in out
    assert "KIMIGGUF_REFERENCE_API_KEY" in out


def test_the_help_says_that_exit_0_may_mean_too_few_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == ExitCode.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit code 0: the same, better, or NOT ENOUGH SAMPLES: that is no pass" in said
    assert "Exit code 1: worse by more than the tolerance, or nothing could be compared." in said


def test_a_reference_that_is_no_known_name_lists_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--candidate", ":1", "--reference", "openai") == ExitCode.USAGE
    assert "known are comet, kimi, openrouter;" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("typed", ["notaurl", "host:port", "two words:80"])
def test_a_candidate_that_is_no_address_is_refused_as_chat_refuses_it(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--candidate", typed, "--reference", "my host:81", "--json") == ExitCode.USAGE
    error = json.loads(capsys.readouterr().err)
    assert error["code"] == "bad-url"
    assert error["hint"] == "kimigguf quality-probe --candidate http://127.0.0.1:8080 --reference 'my host:81'"


def test_without_a_candidate_the_server_that_runs_here_is_judged_with_its_key(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("secret-3\n")
    me = ProcessId.of(os.getpid())
    assert me is not None
    app = App(show=Show(), environ={"XDG_STATE_HOME": str(tmp_path)})

    def any_answer(body: dict[str, Any], number: int) -> Say:
        return sums(body) if "+" in str(body["messages"][0]["content"])[:4] else Say(content=str(number))

    with serve(any_answer) as candidate, serve(sums) as reference:
        arguments = ["quality-probe", "--reference", reference.url, "--suite", suite, "--parallel", "4"]
        assert run(arguments, app) == ExitCode.USAGE
        assert "no server is running" in capsys.readouterr().err
        one = Entry(
            name="k3", supervisor=me, engine=me, host="127.0.0.1", port=int(candidate.url.rpartition(":")[2]),
            alias="kimi-k3", quant=None, log="", plan_file="", arguments=(), folder="", started_at="", planned_bytes=0,
            api_key_file=str(keys),
        )  # fmt: skip
        servers = tmp_path / "kimigguf" / "servers"
        with entered(servers, one):
            assert run(arguments, app) == ExitCode.DONE
            assert run(["quality-probe", "protocol"], app) == ExitCode.ANSWERED_NO  # it calls no tools
            with entered(servers, replace(one, name="other", port=one.port + 1)):
                capsys.readouterr()
                assert run(arguments, app) == ExitCode.USAGE
    assert set(candidate.keys) == {"Bearer secret-3"}
    assert set(reference.keys) == {"Bearer none"}
    assert f"--candidate {candidate.url} or --candidate" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("usd", "cost"), [(4.02, "kimi may charge up to $4.02."), (None, "what kimi charges.")])
def test_the_question_about_the_cost_says_who_is_paid_and_what_enter_means(
    usd: float | None, cost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.StringIO("\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = Show()
    with show.progress() as listen:  # its bars would take [y/N] for markup
        listen(Step(text="before"))
        assert not agreed(show, usd, "kimi")
        listen(Step(text="after"))
    shown = capsys.readouterr().err
    assert f"{cost} Go on? [y/N] " in shown
    assert shown.index("before") < shown.index("[y/N]") < shown.index("after")


def test_answers_that_never_began_are_no_pass_and_say_what_to_do(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def thinks(_body: dict[str, Any], _number: int) -> Say:
        return Say(thinking="hm hm", finish_reason="length")

    with serve(thinks) as candidate, serve(thinks) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url]
        arguments = [*sides, "--suite", suite, "--parallel", "4", "--out", str(tmp_path / "out")]
        assert call(*arguments) == ExitCode.ANSWERED_NO
        assert "270 of 270 answers were cut off while thinking: raise --max-tokens" in capsys.readouterr().out
    assert "raise --max-tokens" in (tmp_path / "out" / "report.html").read_text()
    answer = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (answer["verdict"], "raise --max-tokens" in answer["advice"]) == ("unknown", True)
