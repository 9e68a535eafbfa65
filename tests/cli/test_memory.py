"""``kimigguf memory`` as a person and as a script would use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import mainline, write_engine
from fakes.machines import two_gpus_here

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.units import GIB, MIB


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "", "KIMIGGUF_MODELS": str(tmp_path / "none"), "HF_ENDPOINT": "http://127.0.0.1:9"}


def memory(environ: dict[str, str], *argv: str) -> int:
    return run(["memory", *argv], App(show=Show(), environ=environ))


def answer(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> dict[str, Any]:
    assert memory(environ, *argv) == 0
    out = capsys.readouterr().out
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_the_json_answer_gives_the_engines_columns_per_device(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], skeleton: Callable[[str], Path]
) -> None:
    line = ["-c", "131072", "-np", "1", "-ngl", "99", "-ts", "2,1", "-ot", "exps=CPU", "-fit", "off", "--no-repack"]
    data = answer(capsys, environ, str(skeleton("UD-IQ1_S")), "--gpus", "2", "--json", "--", *line)
    assert data["schema"] == "kimigguf.memory/1"
    assert [device["name"] for device in data["devices"]] == ["gpu0", "gpu1", "host"]
    mib = [
        [device[f"{column}_bytes"] // MIB for column in ("model", "context", "compute")] for device in data["devices"]
    ]
    # llama-fit-params of build 11434 for the same line, on two RPC devices.
    assert mib == [[38_924, 2468, 570], [19_076, 1430, 612], [508_340, 0, 454]]
    assert data["beside_the_engine"]["checkpoints_bytes"] == 32 * 464_633_856
    assert data["beside_the_engine"]["prompt_cache_bytes"] == 8 * GIB
    columns = sum(device[f"{column}_bytes"] for device in data["devices"] for column in ("model", "context", "compute"))
    assert data["total_bytes"] == columns + sum(data["beside_the_engine"].values())
    assert data["total_bytes"] == sum(row["size_bytes"] for row in data["rows"])


def test_a_quant_that_is_not_here_is_answered_from_the_catalogue(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    data = answer(capsys, environ, "iq1_s", "--gpus", "0", "--json", "--", "-c", "4096", "-np", "1", "--jinja")
    assert data["model"] == "UD-IQ1_S"
    assert {row["source"] for row in data["rows"]} == {"profile", "assumed"}
    assert data["devices"][0]["compute_bytes"] // MIB == 518
    assert data["ignored_flags"] == ["--jinja"]


def test_a_described_machine_says_how_many_gpus_there_are(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    data = answer(capsys, environ, "UD-IQ1_S", "--machine", "xeon-768g-2x-rtx-3090", "--json", "--", "-cmoe")
    assert [device["name"] for device in data["devices"]] == ["gpu0", "gpu1", "host"]
    assert data["beside_the_engine"]["gpu_context_bytes"] > 0


def test_repacked_weights_are_in_the_total_and_named(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    data = answer(capsys, environ, "UD-Q4_K_XL", "--gpus", "0", "--json", "--", "-c", "4096", "-np", "1")
    assert data["devices"][0]["model_bytes"] < 60 * GIB
    assert data["beside_the_engine"]["repacked_bytes"] > 1300 * GIB
    assert data["total_bytes"] > 1400 * GIB


def test_an_unlimited_prompt_cache_makes_the_total_a_lower_bound(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    data = answer(capsys, environ, "UD-IQ1_S", "--gpus", "0", "--json", "--", "--cache-ram", "-1")
    assert data["beside_the_engine"]["prompt_cache_bytes"] is None
    assert data["total_is_lower_bound"] is True


def test_a_person_sees_every_row_with_its_source_and_what_was_ignored(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path
) -> None:
    projector = tmp_path / "mmproj-BF16.gguf"
    projector.write_bytes(bytes(1 << 20))
    line = ["-c", "32768", "-np", "1", "--host", "::", "--mmproj", str(projector)]
    assert memory(environ, "UD-IQ1_S", "--gpus", "1", "--", *line) == 0
    out = capsys.readouterr().out
    for words in ("KDA state", "KV cache", "token embedding", "vision projector", "profile", "--host ::", "in all"):
        assert words in out


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["UD-IQ9", "--gpus", "0"], "unknown-quant"),
        (["UD-IQ1_S", "--gpus", "1", "--machine", "epyc-1536g-cpu"], "two-machines"),
        (["UD-IQ1_S", "--gpus", "0", "--", "-c", "lots"], "bad-flag"),
        (["UD-IQ1_S", "--gpus", "0", "--", "--n-cpu-mo", "80"], "unknown-flag"),
        (["UD-IQ1_S", "--gpus", "0", "--", "--mmproj", "/nowhere/mmproj.gguf"], "no-such-file"),
        (["/nowhere/k3.gguf", "--gpus", "0"], "no-such-file"),
    ],
)
def test_what_cannot_be_meant_exits_with_2_and_says_why(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], argv: list[str], code: str
) -> None:
    assert memory(environ, *argv[:1], "--json", *argv[1:]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err.splitlines()[-1])["code"] == code


def test_help_shows_a_command_line_to_copy(capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> None:
    assert memory(environ, "--help") == 0
    assert "kimigguf memory UD-IQ1_S --gpus 2 -- -c 131072" in capsys.readouterr().out


def test_unequal_gpus_are_counted_in_the_engines_order_not_the_drivers(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus_here(monkeypatch)
    devices = (
        "Available devices:\n  CUDA0: NVIDIA RTX PRO 6000 (98304 MiB, 97000 MiB free)\n"
        "  CUDA1: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)\n"
    )
    engine = write_engine(tmp_path / "llama-server", version=mainline(11434), devices=devices)
    line = ("UD-IQ1_S", "--json", "--", "-c", "4096", "-np", "1", "-cmoe", "-fit", "off")

    driver = answer(capsys, environ, *line)
    seen = answer(capsys, environ | {"KIMIGGUF_LLAMA_SERVER": str(engine)}, *line)

    small, large = (device["model_bytes"] for device in driver["devices"][:2])
    assert small < large
    assert any("driver's order" in note for note in driver["notes"])
    assert [device["model_bytes"] for device in seen["devices"][:2]] != [small, large]
    assert seen["devices"][0]["model_bytes"] > seen["devices"][1]["model_bytes"]
    assert not any("driver's order" in note for note in seen["notes"])
