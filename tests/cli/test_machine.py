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


def test_a_name_in_the_list_that_is_cut_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "machines").mkdir()
    card = 'name = "Radeon of a very long name"\nmemory_kind = "discrete"\ntotal_bytes = "24GiB"\n'
    (tmp_path / "machines" / "mine.toml").write_text(f'name = "mine"\nsource = "me"\n[[accelerators]]\n{card}')
    assert kimigguf("machine", "list", environ={"KIMIGGUF_PROFILES": str(tmp_path)}) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("mine")]
    assert line.rstrip().endswith("…")
    (whole,) = [line for line in lines if line.startswith("epyc-1t-8x-rtx-pro-6000")]
    assert whole.rstrip().endswith("8 x RTX PRO 6000")
    (whole,) = [line for line in lines if line.startswith("8x-a100")]
    assert whole.rstrip().endswith("8 x A100")


def test_a_name_that_is_none_gets_the_nearest_and_never_all(capsys: pytest.CaptureFixture[str]) -> None:
    def hint(name: str) -> str:
        assert kimigguf("machine", "show", name, "--json") == 2
        return str(json.loads(capsys.readouterr().err)["hint"])

    assert "epyc-1536g-cpu" in hint("epic")
    assert "xeon" not in hint("epic")
    assert "mac-studio-512g" in hint("mac")
    far = hint("zzz")
    assert far.count(",") == 7
    assert "kimigguf machine list" in far


def test_a_bad_file_is_told_in_the_words_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.toml"
    path.write_text('name = 5\nspeed = 3\n[ram]\nsize = 4\n[[disks]]\nmount = "/"\nkind = "floppy"\n')
    assert kimigguf("machine", "check", str(path), "--json") == 2
    error = json.loads(capsys.readouterr().err)
    assert error["message"] == f"{path} is no valid machine file"
    problems = dict(problem.split(": ", 1) for problem in error["cause"].split("; ") if ": " in problem)
    assert problems["name"] == "should be text"
    assert problems["source"] == "has to be there"
    assert {"speed", "ram.size", "disks.0.kind"} <= set(problems)
    for key in ("total_bytes", "accelerators", "'nvme'"):
        assert key in error["cause"]
    for leak in ("_MachineFile", "keyword", "Input", "Unexpected"):
        assert leak not in error["message"] + error["cause"]


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
