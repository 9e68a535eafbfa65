"""logs, stop, restart, status and doctor where no server runs: what is left is shown, and nothing is started."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.processes import free_port

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.engines.registry import Entry, ProcessId, entered


def call(home: Path, *argv: str) -> int:
    return run([*argv], App(show=Show(), environ={"XDG_STATE_HOME": str(home)}))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "kimigguf" / "logs"
    folder.mkdir(parents=True)
    return folder


def write(path: Path, text: str, *, age_seconds: int) -> Path:
    path.write_text(text)
    os.utime(path, (1_800_000_000 - age_seconds,) * 2)
    return path


@pytest.mark.parametrize("command", ["stop", "restart", "status", "logs"])
def test_a_server_that_does_not_run_is_no_reason_to_start_one(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = () if command == "logs" else ("--json",)
    assert call(tmp_path, command, "--name", "nope", *options) == 2
    err = capsys.readouterr().err
    assert "kimigguf status" in err
    assert "serve" not in err.replace("server", "")
    if command in {"stop", "restart"}:
        assert call(tmp_path, command, "--json") == 2
        assert json.loads(capsys.readouterr().err)["hint"] == "kimigguf status"


def test_the_log_of_a_server_that_has_ended_is_still_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    """It is when a server has died that its log is needed."""
    write(logs / "serve-8080-1.log", "older\n", age_seconds=30)
    mine = write(logs / "serve-8080-2.log", "out of memory\n", age_seconds=20)
    other = write(logs / "serve-8081-1.log", "all well\n", age_seconds=10)
    assert call(tmp_path, "logs", "--name", "kimi-k3-8080", "-f") == 0
    out, err = capsys.readouterr()
    assert out == "out of memory\n"
    assert err == f"kimi-k3-8080 has ended; this is its last log: {mine}\n"
    assert call(tmp_path, "logs") == 0
    out, err = capsys.readouterr()
    assert out == "all well\n"
    assert str(other) in err
    assert call(tmp_path, "doctor", "--name", "kimi-k3-8080", "--json") in {0, 1}
    assert json.loads(capsys.readouterr().out)["log"] == str(mine)


def test_a_server_with_a_name_of_its_own_is_found_by_what_it_answered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    mine = write(logs / "serve-9000-1.log", "mine\n", age_seconds=60)
    write(logs / "serve-9000-2.log", "somebody else's later\n", age_seconds=1)
    (logs / "evening.out").write_text(json.dumps({"schema": "kimigguf.serve/1", "log": str(mine)}))
    assert call(tmp_path, "logs", "--name", "evening") == 0
    assert capsys.readouterr().out == "mine\n"
    assert call(tmp_path, "logs", "--name", "morning") == 2


def test_the_log_of_a_living_server_is_not_told_to_be_anothers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    alive = write(logs / "serve-8080-2.log", "alive\n", age_seconds=1)
    write(logs / "serve-8080-1.log", "dead\n", age_seconds=9)
    me = ProcessId.of(os.getpid())
    assert me is not None
    facts: dict[str, Any] = {"alias": "kimi-k3", "quant": None, "plan_file": "", "arguments": (), "folder": ""}
    entry = Entry(
        name="new-8080", supervisor=me, engine=me, host="127.0.0.1", port=free_port(), log=str(alive), started_at="",
        planned_bytes=0, **facts,
    )  # fmt: skip
    with entered(tmp_path / "kimigguf" / "servers", entry):
        assert call(tmp_path, "logs", "--name", "old-8080") == 0
        assert capsys.readouterr().out == "dead\n"
        assert call(tmp_path, "logs") == 0
        assert capsys.readouterr() == ("alive\n", "")
