"""The whole probe against a real engine with a small model on both sides: a kill, a continuation, one report."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.served import plan_for, served, small_model

pytestmark = pytest.mark.engine

SUITE = """
name = "small"
max_tokens = 12
seed = 3
[generate]
capital = 1
small-sum = 1
[[items]]
id = "code"
category = "code"
prompt = "Write a Python function double(n) that returns 2 * n."
check = { kind = "python-test", code = "assert double(4) == 8" }
[[items]]
id = "timer"
category = "tools"
prompt = "Set a timer for 7 minutes."
check = { kind = "tool-calls", calls = [{ name = "set_timer", arguments = { minutes = 7 } }] }
tools = [{ name = "set_timer", description = "Start a timer.", parameters = { type = "object" } }]
"""
CALLS = 3 * 4


def started(url: str, folder: Path) -> "subprocess.Popen[bytes]":
    (folder / "small.toml").write_text(SUITE)
    words = ["quality-probe", "--candidate", url, "--reference", url, "--suite", str(folder / "small.toml"),
             "--out", str(folder / "out"), "--temperature", "0", "--json"]  # fmt: skip
    command = [sys.executable, "-m", "kimigguf", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ))


def finished(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    told, _ = process.communicate(timeout=400)
    answer: dict[str, Any] = json.loads(told)
    return answer


def recorded(folder: Path) -> list[str]:
    path = folder / "out" / "calls.jsonl"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.mark.timeout(900)  # on a machine that is busy otherwise; half a minute on one that is not
def test_a_run_that_is_killed_goes_on_pays_nothing_twice_and_reports_the_same(tmp_path: Path) -> None:
    """At temperature 0 the model says the same again, so that the report can be held against one without a kill."""
    plan = plan_for(small_model(), "llama", 30)
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    with served(plan, tmp_path / "engine") as url:
        process = started(url, tmp_path / "killed")
        until = time.monotonic() + 400
        while len(recorded(tmp_path / "killed")) < 4 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        before = recorded(tmp_path / "killed")
        assert 4 <= len(before) < CALLS
        answer = finished(started(url, tmp_path / "killed"))
        after = recorded(tmp_path / "killed")
        assert after[: len(before) - 1] == before[:-1]
        calls = [json.loads(line) for line in after]
        # A reply is written before its program is run, and with what came of it once more.
        paid = [(call["arm"], call["item"]) for call in calls if call["outcome"]["tested"] is None]
        assert len(paid) == len(set(paid)) == CALLS
        assert [call["item"] for call in calls if call["outcome"]["tested"] is not None] == ["code"] * 3
        unbroken = finished(started(url, tmp_path / "whole"))
    for timed in ("first_token_seconds", "seconds", "tokens_per_second"):
        for arm in (*answer["arms"], *unbroken["arms"]):
            arm.pop(timed)
    assert answer["arms"] == unbroken["arms"]
    assert answer["metrics"] == unbroken["metrics"]
    assert answer["items"] == unbroken["items"]
    same = next(metric for metric in answer["metrics"] if metric["name"] == "same answer as the reference")
    assert (same["candidate"], same["noise"]) == (1.0, 0.0)
    assert "<html" in (tmp_path / "killed" / "out" / "report.html").read_text(encoding="utf-8")
