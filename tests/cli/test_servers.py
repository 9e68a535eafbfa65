"""logs, stop, restart, status and doctor where no server runs: what is left is shown, and nothing is started."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.processes import free_port

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.engines import deaths
from kimigguf.engines.registry import Entry, ProcessId, entered, remember_death, restarting
from kimigguf.hardware.pressure import Stall
from kimigguf.units import GIB


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


def entry_of(pid: int, name: str, log: Path) -> Entry:
    """A server that is the process ``pid``, its own supervisor."""
    process = ProcessId.of(pid)
    assert process is not None
    facts: dict[str, Any] = {"alias": "kimi-k3", "quant": None, "plan_file": "", "arguments": (), "folder": ""}
    return Entry(
        name=name, supervisor=process, engine=process, host="127.0.0.1", port=free_port(), log=str(log), started_at="",
        planned_bytes=0, **facts,
    )  # fmt: skip


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
    answers = [{"schema": "kimigguf.serve/1", "log": log, "in": {"a": 1}} for log in ("gone", str(mine))]
    (logs / "evening.out").write_text("".join(json.dumps(answer, indent=2) + "\n" for answer in answers))
    assert call(tmp_path, "logs", "--name", "evening") == 0
    assert capsys.readouterr().out == "mine\n"
    assert call(tmp_path, "logs", "--name", "morning") == 2


def test_the_log_of_a_living_server_is_not_told_to_be_anothers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    alive = write(logs / "serve-8080-2.log", "alive\n", age_seconds=1)
    write(logs / "serve-8080-1.log", "dead\n", age_seconds=9)
    entry = entry_of(os.getpid(), "new-8080", alive)
    with entered(tmp_path / "kimigguf" / "servers", entry):
        assert call(tmp_path, "logs", "--name", "old-8080") == 0
        assert capsys.readouterr().out == "dead\n"
        assert call(tmp_path, "logs") == 0
        assert capsys.readouterr() == ("alive\n", "")


def test_a_server_that_somebody_else_is_restarting_is_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    """The second of two would stop what the first has just started."""
    servers = tmp_path / "kimigguf" / "servers"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as engine:
        try:
            with entered(servers, entry_of(engine.pid, "twin", logs / "none")), restarting(servers, "twin"):
                assert call(tmp_path, "restart", "--json") == 2
            assert json.loads(capsys.readouterr().err.splitlines()[-1])["code"] == "name-in-use"
            assert engine.poll() is None
        finally:
            engine.kill()


def test_a_server_whose_folder_is_gone_is_not_stopped_for_a_restart_that_must_fail(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    gone = tmp_path / "a folder"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as engine:
        try:
            entry = replace(entry_of(engine.pid, "kept", logs / "none"), folder=str(gone))
            with entered(tmp_path / "kimigguf" / "servers", entry):
                assert call(tmp_path, "restart", "--json") == 2
            error = json.loads(capsys.readouterr().err.splitlines()[-1])
            assert (error["code"], error["hint"]) == ("folder-gone", f"mkdir -p '{gone}'")
            assert engine.poll() is None
        finally:
            engine.kill()


def test_a_server_whose_key_file_is_gone_is_still_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    log = write(logs / "serve-1-a.log", "quiet\n", age_seconds=0)
    entry = replace(entry_of(os.getpid(), "locked", log), api_key_file=str(tmp_path / "gone"))
    with entered(tmp_path / "kimigguf" / "servers", entry):
        assert call(tmp_path, "doctor", "--json") == 1
    assert "hung" in {finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_place_for_the_answer_that_cannot_be_written_is_no_bug(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "kimigguf").mkdir()
    (tmp_path / "kimigguf" / "logs").write_text("a file where the folder belongs")
    assert call(tmp_path, "serve", "UD-IQ1_M", "--detach", "--json") == 3
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["code"] == "state-unwritable"


def test_what_did_not_pass_is_told_of_a_server_in_the_background_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(what: str, state: str) -> dict[str, str]:
        return {"what": what, "state": state, "evidence": f"its {what}", "hint": f"mend its {what}"}

    sizes = {"model_bytes": GIB, "context_bytes": GIB, "compute_bytes": 0}
    ready = {
        "schema": "kimigguf.serve/1", "state": "ready", "load_seconds": 1.0, "model": "kimi-k3", "base_url": "http://127.0.0.1:1/v1",
        "checks": [check("shards", "passed"), check("swap", "unknown"), check("limits", "failed")],
        "memory": [{"device": "host", "planned": sizes, "reported": sizes, "unknown": ["compute"], "agrees": None}],
        "memory_unknown": None,
    }  # fmt: skip
    monkeypatch.setattr("kimigguf.engines.background.start_detached", lambda *_, **__: ready)
    assert call(tmp_path, "serve", "UD-IQ1_M", "--detach") == 0
    out = " ".join(capsys.readouterr().out.split())
    before = out.partition("ready after")[0]
    assert "UNKNOWN swap its swap try: mend its swap" in before
    assert "FAILED limits its limits try: mend its limits" in before
    assert "UNKNOWN memory host: 2.0 GiB planned but for its compute, 2.0 GiB reported" in before
    assert "shards" not in out


def test_where_nothing_runs_status_names_what_works_on_any_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(tmp_path, "status") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "kimigguf list" in out
    assert "kimigguf recommend" in out
    assert "UD-" not in out  # no quant fits every machine


def test_a_living_server_that_tells_nothing_is_shown_with_what_is_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    with entered(tmp_path / "kimigguf" / "servers", entry_of(os.getpid(), "mute", logs / "none")):
        assert call(tmp_path, "status") == 1
        out = capsys.readouterr().out
        assert "mute: silent" in out
        assert "unknown begun, unknown finished" in out
        assert "planned in all" in out  # its plan is gone, and what of it is RAM with it
        assert call(tmp_path, "status", "--json") == 1
    (server,) = json.loads(capsys.readouterr().out)["servers"]
    assert server["requests"] is None
    assert server["host_memory"]["checkpoint_bytes"] is None
    assert server["host_memory"]["growth"] == dict.fromkeys(
        ("total_bytes", "checkpoint_bytes", "prompt_cache_bytes", "unexplained_bytes")
    )
    assert server["resident_bytes"] > 0


KILLED = "killed by SIGKILL; the kernel counts no kill for memory meanwhile, so somebody else sent the signal"


def test_a_server_that_died_is_shown_with_what_to_do_until_it_is_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    servers = tmp_path / "kimigguf" / "servers"
    servers.mkdir(parents=True)
    log = logs / "serve-9000-1.log"
    log.write_text(f"all well\nkimigguf 2026-11-30T12:00:00Z: the engine ended while serving: {KILLED}\n")
    remember_death(servers, entry_of(os.getpid(), "evening", log), KILLED)
    assert call(tmp_path, "status") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "evening: died 0.0 s ago: killed by SIGKILL" in out
    assert f"log {log}" in out
    assert "kimigguf doctor --name evening" in out
    assert "no server is running" not in out
    assert call(tmp_path, "status", "--name", "evening", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["servers"], [one["how"] for one in data["died"]]) == ([], [KILLED])
    assert call(tmp_path, "doctor", "--name", "evening", "--json") == 1  # a name of its own, and no port in it
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["severity"]) == ("killed", "fatal")
    assert KILLED in finding["evidence"]
    assert finding["hint"].endswith("kimigguf restart --name evening")
    assert call(tmp_path, "stop", "--name", "evening") == 0
    assert "evening" in capsys.readouterr().out
    assert call(tmp_path, "status", "--json") == 1
    assert json.loads(capsys.readouterr().out)["died"] == []
    assert call(tmp_path, "stop", "--name", "evening") == 2


def test_a_death_is_not_told_of_a_server_that_runs_again_nor_after_a_day(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path
) -> None:
    servers = tmp_path / "kimigguf" / "servers"
    entry = entry_of(os.getpid(), "again", logs / "none")
    with entered(servers, entry):
        remember_death(servers, entry, KILLED)  # as at the moment before its supervisor ends
        call(tmp_path, "status", "--json")
        data = json.loads(capsys.readouterr().out)
        assert ([one["name"] for one in data["servers"]], data["died"]) == (["again"], [])
    with entered(servers, entry):
        pass
    assert deaths.deaths(servers) == ()  # the new start made it forgotten
    remember_death(servers, entry, KILLED)
    (death,) = deaths.deaths(servers)
    deaths.remember(servers, replace(death, noticed=death.noticed - 25 * 3600))
    assert deaths.deaths(servers) == ()
    assert list(servers.glob(".*.died")) == []


def test_who_starts_a_dead_server_again_gets_what_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    def start(arguments: tuple[str, ...], *_: object, **__: object) -> dict[str, str]:
        started.append(arguments)
        return {"schema": "kimigguf.serve/1", "state": "does-not-fit", "reason": "less memory than before"}

    monkeypatch.setattr("kimigguf.engines.background.start_detached", start)
    servers = tmp_path / "kimigguf" / "servers"
    servers.mkdir(parents=True)
    entry = replace(entry_of(os.getpid(), "dead", logs / "none"), arguments=("--name", "dead", "Q"), folder="/")
    remember_death(servers, entry, KILLED)
    assert call(tmp_path, "restart", "--name", "dead", "--json") == 1
    assert started == [("--name", "dead", "Q")]
    assert "stopping" not in capsys.readouterr().err  # there is nothing to stop


@pytest.mark.parametrize(("percent", "shown"), [(61.0, True), (3.0, False), (None, False)])
def test_processors_that_others_use_are_shown(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    logs: Path,
    percent: float | None,
    *,
    shown: bool,
) -> None:
    stall = None if percent is None else Stall(of_10_seconds=0, of_60_seconds=percent, of_300_seconds=0)
    monkeypatch.setattr("kimigguf.engines.observe.read_processor_stall", lambda _pid: stall)
    with entered(tmp_path / "kimigguf" / "servers", entry_of(os.getpid(), "busy", logs / "none")):
        call(tmp_path, "status")
        out = capsys.readouterr().out
        call(tmp_path, "status", "--json")
    assert ("contended: for 61 % of the last 60 s" in out) is shown
    assert json.loads(capsys.readouterr().out)["servers"][0]["processor_wait_percent"] == percent
