"""``kimigguf machine`` and ``--set``, as a user meets them."""

import json
from pathlib import Path

import pytest

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show


def kimigguf(*argv: str, environ: dict[str, str] | None = None) -> int:
    return run(list(argv), App(show=Show(), environ=environ or {}))


def test_the_list_has_every_machine_and_goes_on_past_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "mine.toml").write_text('name = "mine"\nsource = "me"\n')
    (tmp_path / "machines" / "broken.toml").write_text("name = 5")
    assert kimigguf("machine", "list", "--json", environ={"KIMIGGUF_PROFILES": str(tmp_path)}) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.machines/1"
    by_name = {one["name"]: one for one in data["machines"]}
    assert len(by_name) >= 25
    assert by_name["mine"]["ram_bytes"] is None
    assert by_name["8x-b200"]["vram_bytes"] == 8 * 180 * 2**30
    assert by_name["mac-studio-512g"] | {"note": 0, "source": 0} == {
        "name": "mac-studio-512g", "ram_bytes": 512 * 2**30, "vram_bytes": 0, "unified": True, "note": 0, "source": 0,
    }  # fmt: skip
    assert len(data["problems"]) == 1
    assert "broken.toml" in data["problems"][0]


def test_the_list_is_readable_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimigguf("machine", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = [line for line in lines if line.startswith("threadripper-1t-4x-rtx-pro-6000")]
    assert "1,024.0 GiB" in line
    assert "384.0 GiB" in line


def test_show_takes_a_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimigguf("machine", "show", "epyc-1536g-cpu", "--set", "gpu+=2xrtx-5090", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.machine/1"
    assert [card["name"] for card in data["machine"]["accelerators"]] == ["NVIDIA GeForce RTX 5090"] * 2
    assert kimigguf("machine", "show", "dgx-spark") == 0
    assert "works in the host's memory" in capsys.readouterr().out


def test_recommend_answers_the_what_if_and_not_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["recommend", "--machine", "epyc-768g-rtx-pro-6000", "--json"]
    assert kimigguf(*argv) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == "UD-IQ2_XXS"
    assert kimigguf(*argv, "--set", "ram=1536GiB", "--set", "gpu+=rtx-pro-6000") == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["have"]["vram_bytes"] == 2 * 95 * 2**30
    assert kimigguf(*argv) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] == "UD-IQ2_XXS", "a change does not outlive its command"


def test_a_bad_change_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert kimigguf("recommend", "--machine", "8x-b200", "--set", "ram=900G") == 2
    assert "900GiB" in capsys.readouterr().err


def test_check_tells_valid_from_not_and_what_a_verdict_would_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.toml"
    path.write_text('name = "m"\nsource = "me"\n[[accelerators]]\nname = "X"\n')
    assert kimigguf("machine", "check", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["unknown"] == [
        "ram.total_bytes",
        "disks",
        "accelerators.0.memory_kind",
        "accelerators.0.total_bytes",
    ]
    path.write_text('name = "m"\nsource = "me"\nspeed = 5\n')
    assert kimigguf("machine", "check", str(path)) == 2
    assert "speed" in capsys.readouterr().err
    assert kimigguf("machine", "check", str(tmp_path / "none.toml")) == 2


@pytest.mark.parametrize("sub", [[], ["list"], ["show"], ["check"]])
def test_every_form_has_help_with_an_example(sub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kimigguf("machine", *sub, "--help") == 0
    assert "kimigguf machine " in capsys.readouterr().out.split("Example")[1]
