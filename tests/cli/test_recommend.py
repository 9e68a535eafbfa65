"""`recommend` as a person and as a script would use it."""

import json

import pytest

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show


def recommend(*argv: str) -> int:
    return run(["recommend", *argv], App(show=Show(), environ={}))


def test_json_is_the_documented_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--machine", "epyc-768g-rtx-pro-6000", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.recommend/1"
    assert data["machine"] == "epyc-768g-rtx-pro-6000"
    assert data["policy"] == {"margin_low": 0.10, "margin_high": 0.15, "context_tokens": 32768, "prefer": "quality"}
    assert data["have"]["total_bytes"] == data["have"]["ram_bytes"] + data["have"]["vram_bytes"]
    assert data["recommended"] == "UD-IQ2_XXS"
    assert len(data["verdicts"]) == 9
    row = next(verdict for verdict in data["verdicts"] if verdict["quant"] == "UD-Q2_K_XL")
    assert row["verdict"] == "below-margin"
    assert row["download_bytes"] == 861_277_858_912
    assert row["need_low_bytes"] * 100 >= row["download_bytes"] * 110
    assert row["reasons"]


def test_nothing_fits_exits_with_1_and_names_the_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--machine", "laptop-64g") == 1
    out = capsys.readouterr().out
    assert "recommended: none" in out
    assert "hosted API" in out


def test_quiet_answers_by_the_exit_code_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--machine", "8x-b200", "--quiet") == 0
    assert recommend("--machine", "laptop-64g", "--quiet") == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_the_table_is_whole_at_any_width(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("NO_COLOR", "1")
    assert recommend("--machine", "epyc-768g-rtx-pro-6000") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    if int(width) >= 80:
        assert max(map(len, out.splitlines())) <= int(width)
        assert "947.4-990.5" in out
        assert "-45.5 GB" in out
    assert "UD-Q2_K_XL" in out


def test_verbose_prints_the_rule_and_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--machine", "epyc-1536g-cpu", "-v") == 0
    out = capsys.readouterr().out
    assert "kept by the system" in out
    assert "x 1.10 = 947.4 GB" in out
    assert "exact ledger" in out


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--context", "2000000"], 2, "1,048,576"),
        (["--context", "0"], 2, "no sense"),
        (["--machine", "epyc-768"], 2, "epyc-768g-rtx-pro-6000"),
        (["--machine", "/nonexistent.toml"], 2, "nonexistent"),
        (["--prefer", "beauty"], 2, "quality"),
    ],
)
def test_bad_input_is_refused_with_what_would_work(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recommend(*argv) == code
    assert text in capsys.readouterr().err


def test_k31_pro_is_unsupported_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--model", "kimi-k3.1-pro", "--machine", "8x-b200", "--json") == 1
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["verdict"] == "unsupported"
    assert "DSA" in verdict["reasons"][0]
