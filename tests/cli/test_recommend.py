"""`recommend` as a person and as a script would use it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.hardware.detect import detect
from kimigguf.hardware.fingerprint import fingerprint
from kimigguf.hardware.machines import load_machine
from kimigguf.speed.measured import BENCH, MeasuredModel, Run, save
from kimigguf.speed.samples import Speed, Spread, Warmth


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


SPEED = Speed(
    depth_tokens=0, warmth=Warmth.COLD, decode_tokens_per_second=Spread(median=4.5, lowest=4.4, highest=4.6, count=3)
)
RUN = Run(
    source=BENCH,
    date="2026-11-30T10:00:00Z",
    machine=fingerprint(load_machine("epyc-768g-rtx-pro-6000")),
    model=MeasuredModel(quant="UD-IQ1_M", size_bytes=648_872_012_448),
    speeds=(SPEED,),
)


def test_what_others_report_of_such_a_machine_is_told_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--machine", "epyc-768g-rtx-pro-6000", "--json") == 0
    rows = {row["quant"]: row["measured"] for row in json.loads(capsys.readouterr().out)["verdicts"]}
    (told,) = rows.pop("UD-Q2_K_XL")
    assert told["where"] == "elsewhere"
    assert told["source"] == "https://github.com/ggml-org/llama.cpp/pull/26185"
    assert [row["decode_tokens_per_second"]["median"] for row in told["speeds"]] == [3.1, 5.1]
    assert set(map(len, rows.values())) == {0}
    assert recommend("--machine", "epyc-768g-rtx-pro-6000") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5.1 tok/s warm (https://github.com/ggml-org/llama.cpp/pull/26185); cold and warm are the report's" in shown
    assert recommend("--machine", "epyc-1t-8x-rtx-pro-6000") == 0
    assert "measured" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["recommend", "plan"])
def test_a_run_of_ones_own_is_measured_here_and_of_another_size_nothing(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"KIMIGGUF_PROFILES": str(tmp_path)}
    app = App(show=Show(), environ=environ)
    described, extra = ("--machine", "epyc-768g-rtx-pro-6000"), ("UD-IQ1_M",) if command == "plan" else ()
    save(replace(RUN, machine=fingerprint(detect(limit_seconds=10))), environ)
    fits = run([command, *extra], app) == 0
    assert ("measured here: UD-IQ1_M: 4.5 tok/s" in capsys.readouterr().out) == (fits or command == "recommend")
    assert run([command, *extra, *described], app) == 0
    assert "UD-IQ1_M: 4.5" not in capsys.readouterr().out
    save(RUN, environ)
    assert run([command, *extra, *described], app) == 0
    assert "measured on such a machine: UD-IQ1_M: 4.5 tok/s at depth 0 (2026-11-30)" in capsys.readouterr().out
    assert run([command, *extra, *described, "--json"], app) == 0
    data = json.loads(capsys.readouterr().out)
    rows = data if command == "plan" else next(row for row in data["verdicts"] if row["quant"] == "UD-IQ1_M")
    assert [(told["where"], told["date"]) for told in rows["measured"]] == [("on such a machine", RUN.date)]
    for path in (tmp_path / "measured").iterdir():
        path.unlink()
    save(replace(RUN, model=replace(RUN.model, size_bytes=6_000_000)), environ)
    assert run([command, *extra, *described], app) == 0
    assert "UD-IQ1_M: 4.5" not in capsys.readouterr().out


def test_a_broken_measurement_does_not_stop_a_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "mine.toml").write_text("speeds = 5")
    app = App(show=Show(), environ={"KIMIGGUF_PROFILES": str(tmp_path)})
    assert run(["recommend", "--machine", "8x-b200"], app) == 0
    err = capsys.readouterr().err
    assert "left out" in err
    assert "mine.toml" in err


def test_the_sizes_of_the_test_are_those_of_the_catalogue() -> None:
    assert {quant.name: quant.size_bytes for quant in load_model().quants}["UD-IQ1_M"] == RUN.model.size_bytes
