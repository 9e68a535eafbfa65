"""The whole command against real engines: the tiny K3 on both sides, and a small model that really answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from fakes.served import plan_for, served, small_model

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode

pytestmark = pytest.mark.engine


def suite(folder: Path, *items: dict[str, Any]) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, items)))
    return str(path)


def probe(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["quality-probe", "--json", *arguments], App(show=Show(), environ={}))
    shown = capsys.readouterr()
    assert shown.out, shown.err
    answer: dict[str, Any] = json.loads(shown.out)
    return code, answer


def test_two_tiny_k3s_are_asked_and_their_endless_thoughts_are_no_wrong_answers(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(sorted(tiny("UD-IQ1_M").glob("*.gguf")), "kimi-k3", tiny_k3.LAYERS)
    asked = suite(
        tmp_path,
        {"id": "sum", "prompt": "2+2?", "check": {"kind": "number", "value": 4}},
        {"id": "word", "prompt": "Say hello.", "check": {"kind": "exact", "value": "hello"}},
    )
    with served(plan, tmp_path / "one") as candidate, served(plan, tmp_path / "two") as reference:
        sides = ["--candidate", candidate, "--reference", reference]
        code, answer = probe(capsys, *sides, "--suite", asked, "--max-tokens", "8")
    # What random weights say is drawn anew each time: mostly thoughts without an end, now and then an early stop.
    assert answer["verdict"] in {"unknown", "not-enough-samples"}
    assert code == (ExitCode.ANSWERED_NO if answer["verdict"] == "unknown" else ExitCode.DONE)
    assert answer["candidate"]["model"] == "kimi-k3"
    for arm in answer["arms"]:
        assert (arm["calls"], arm["faults"], sum(arm["shapes"].values())) == (2, {}, 2)
        assert arm["shapes"].get("cut-off-thinking", 0) == arm["finish_reasons"].get("length", 0)
        assert arm["with_thinking"] > 0
        assert 2 <= arm["completion_tokens"] <= 2 * 32
        assert arm["prompt_tokens"] > 20


def test_a_small_model_agrees_with_itself_and_is_seen_to_be_right_sometimes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(small_model(), "llama", 30)
    asked = suite(
        tmp_path,
        {"id": "capital", "prompt": "What is the capital of France?", "check": {"kind": "regex", "pattern": "Paris"}},
        {"id": "sum", "prompt": "What is 2+2? Answer with the number.", "check": {"kind": "number", "value": 4}},
        {"id": "grass", "prompt": "What colour is grass?", "check": {"kind": "regex", "pattern": "(?i)green"}},
    )
    with served(plan, tmp_path / "one") as url:
        sides = ["--candidate", url, "--reference", url]
        code, answer = probe(capsys, *sides, "--suite", asked, "--max-tokens", "24", "--temperature", "0")
    assert (code, answer["verdict"]) == (ExitCode.DONE, "not-enough-samples")
    same = next(metric for metric in answer["metrics"] if metric["name"] == "same answer as the reference")
    assert (same["candidate"], same["reference"], same["noise"]) == (1.0, 1.0, 0.0)
    assert answer["arms"][0]["right"] >= 1
