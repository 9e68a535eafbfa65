"""``kimigguf doctor`` on logs, of this machine and of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show


def doctor(capsys: pytest.CaptureFixture[str], home: Path, *argv: str) -> tuple[int, dict[str, Any], str]:
    code = run(["doctor", "--json", *argv], App(show=Show(), environ={"XDG_STATE_HOME": str(home)}))
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_a_log_of_another_machine_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "their.log"
    log.write_text(
        "0.1 I srv: loading\n0.2 E llama_model_load: error loading model: unknown model architecture: 'kimi-k3'\n"
    )
    code, data, _ = doctor(capsys, tmp_path, "--log", str(log))
    assert code == 1
    assert data["schema"] == "kimigguf.doctor/1"
    (finding,) = data["findings"]
    assert (finding["code"], finding["severity"]) == ("engine-too-old", "fatal")
    assert "10448" in finding["hint"]


def test_without_a_server_the_last_log_is_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logs = tmp_path / "kimigguf" / "logs"
    logs.mkdir(parents=True)
    (logs / "serve-8080-1.log").write_text("all well\n")
    code, data, _ = doctor(capsys, tmp_path)
    assert (code, data["findings"]) == (0, [])
    assert data["log"].endswith("serve-8080-1.log")


def test_nothing_to_look_at_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = doctor(capsys, tmp_path)
    assert code == 2
    assert "--log FILE" in err
    code, _, err = doctor(capsys, tmp_path, "--log", str(tmp_path / "nothing"))
    assert (code, json.loads(err)["code"]) == (2, "log-unreadable")


def test_binary_rubbish_does_no_harm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(range(256)) * 1000)
    code, data, _ = doctor(capsys, tmp_path, "--log", str(log))
    assert (code, data["findings"], data["recognised"]) == (1, [], False)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("# Readme\n\nRun `llama-server` with care: see main.\n", 1),
        ("", 1),
        ("0.00.002.002 I srv  llama_server: initializing ...\n", 0),
        ("srv    load_model: loading model\n", 0),
        ("Nov 30 11:00:00 box llama-server[12]: print_info: arch = kimi-k3\n", 0),
    ],
)
def test_a_file_that_is_no_log_is_not_taken_for_a_healthy_server(
    text: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text)
    assert run(["doctor", "--log", str(tmp_path / "log")], App(show=Show(), environ={})) == code
    assert ("this is no log of llama-server" in " ".join(capsys.readouterr().out.split())) == (code == 1)
