"""``kimigguf serve`` up to the start of an engine: what is refused, with what exit code, and what a dry run shows."""

import json
import os
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_k3
from fakes import server_program
from fakes.engine import mainline, write_engine
from fakes.gguf_bytes import tensor, write_shards
from fakes.processes import free_port

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.download.manifest import Manifest, ManifestFile, write_manifest
from kimigguf.download.named import CatalogueTarget, target_of
from kimigguf.download.store import folder_of
from kimigguf.engines.command import VARIABLES
from kimigguf.engines.deaths import deaths
from kimigguf.engines.prepare import hopeless
from kimigguf.engines.registry import Entry, Life, ProcessId, entered, entries, life_of, reserved
from kimigguf.engines.request import Request
from kimigguf.engines.watchdog import Restarts
from kimigguf.hardware.detect import LIMIT_SECONDS, PATIENT_LIMIT_SECONDS, detect
from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Machine, Ram
from kimigguf.memory import server_flags
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import budget
from kimigguf.units import GIB


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_k3.write(folder)
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    engine = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    return {
        "PATH": "",
        "KIMIGGUF_LLAMA_SERVER": str(engine),
        "KIMIGGUF_MODELS": str(tmp_path / "models"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }


def serve(environ: dict[str, str], *argv: str) -> int:
    port = () if "--port" in argv else ("--port", str(free_port()))  # 8080 may be anybody's
    return run(["serve", "--json", *port, *argv], App(show=Show(), environ=environ))


def refused(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = serve(environ, *argv)
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    errors = [record for record in records if record["schema"] == "kimigguf.error/1"]
    assert len(errors) == 1
    return code, errors[0]


@pytest.mark.parametrize(
    ("argv", "exit_code", "code"),
    [
        ((), 2, "nothing-to-serve"),
        (("UD-IQ1_M", "--plan", "p.json"), 2, "plan-and-target"),
        (("--plan", "p.json", "--context", "4096"), 2, "plan-and-settings"),
        (("--plan", "p.json"), 2, "bad-plan"),
        (("UD-IQ9_Z",), 2, "unknown-quant"),
        (("UD-IQ1_M", "--context", "2000000"), 2, "context-too-large"),
        (("UD-IQ1_M", "--context", "0"), 2, "bad-context"),
        (("UD-IQ1_M", "--effort", "medium"), 2, "unknown-effort"),
        (("UD-IQ1_M", "--engine", "vllm"), 2, "unknown-engine"),
        (("UD-IQ1_M", "--host", "0.0.0.0"), 2, "key-needed"),
        (("UD-IQ1_M", "--engine-path", "/nowhere/llama-server"), 3, "engine-unusable"),
        (("UD-Q1_0",), 3, "quant-unsupported"),
        (("UD-IQ1_M", "--no-download"), 5, "not-downloaded"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], argv: tuple[str, ...], exit_code: int, code: str
) -> None:
    found, error = refused(capsys, environ, "--port", str(free_port()), *argv)
    assert (found, error["code"]) == (exit_code, code)
    assert len(error["message"]) > 10


def machine_of(total_bytes: int) -> Machine:
    return Machine(name=THIS_MACHINE, source=DETECTED, ram=Ram(total_bytes=total_bytes), accelerators=(), disks=())


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that holds every quant."""
    monkeypatch.setattr("kimigguf.engines.planned.detect", lambda **_: machine_of(4096 * GIB))


def part_of(models: Path) -> None:
    """A download that has stopped: all but one shard of a set."""
    where = load_model().repository
    assert where.id is not None
    assert where.commit is not None
    begun = folder_of(models, repository=where.id, quant="UD-IQ1_M", commit=where.commit)
    tiny_k3.write(begun, quant="UD-IQ1_M")
    files = tuple(
        ManifestFile(name=path.name, path=path.name, size_bytes=path.stat().st_size, sha256="0" * 64)
        for path in sorted(begun.glob("*.gguf"))
    )
    manifest = Manifest(
        repository=where.id, commit=where.commit, quant="UD-IQ1_M", source="hub", created="2026", files=files
    )
    write_manifest(begun, manifest)
    (begun / files[-1].name).unlink()


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("begun", [False, True])
def test_a_download_that_never_began_is_not_said_to_go_on(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], *, begun: bool
) -> None:
    if begun:
        part_of(Path(environ["KIMIGGUF_MODELS"]))
    code, error = refused(capsys, environ, "UD-IQ1_M")
    assert (code, error["code"]) == (4, "hub-unreachable")
    assert ("goes on where it stopped" in error["hint"]) == begun
    assert "kimigguf recommend" in error["hint"]


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_what_can_never_run_here_is_refused_without_asking_the_hub(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """The hub of this environment does not answer, and nobody needs it to."""
    monkeypatch.setattr("kimigguf.engines.planned.detect", lambda **_: machine_of(64 * GIB))
    assert serve(environ, "UD-IQ1_M", *more) == 1
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["schema"], data["state"]) == ("kimigguf.serve/1", "does-not-fit")
    assert data["missing_bytes"] > 400 * GIB
    assert "hub" not in err


@pytest.mark.parametrize(("share", "sure"), [(0.97, True), (0.99, False), (1.01, False)])
def test_what_misses_next_to_nothing_is_left_to_the_real_headers(tmp_path: Path, *, share: float, sure: bool) -> None:
    target = target_of("UD-IQ1_M", {})
    assert isinstance(target, CatalogueTarget)
    far = hopeless(target, tmp_path, machine_of(64 * GIB), Settings())
    assert far is not None
    total = far.need_bytes
    for _ in range(4):  # until what may be used of it is that share of the need
        total += round(share * far.need_bytes) - (budget(machine_of(total)).ram_bytes or 0)
    assert (hopeless(target, tmp_path, machine_of(total), Settings()) is not None) == sure


@pytest.mark.parametrize(
    "given", [("--context", "32768"), ("--slots", "1"), ("--models-dir", "/m"), ("--no-download",), ("--slots", "4")]
)
def test_an_option_that_a_plan_would_ignore_is_refused_by_its_name(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], given: tuple[str, ...]
) -> None:
    code, error = refused(capsys, environ, "--plan", "p.json", *given)
    assert (code, error["code"]) == (2, "plan-and-settings")
    assert given[0] in error["message"]


def test_a_replayed_plan_can_be_asked_for_again_by_its_arguments(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    """restart and --detach start it by them: an option that serve refuses beside a plan would end both."""
    again = Request(plan_path=Path("p.json"), port=free_port(), restart="on-failure").arguments("k3")
    assert refused(capsys, environ, *again)[1]["code"] == "bad-plan"  # for the file that is not there
    assert "--slots" in Request(target="UD-IQ1_M").arguments("k3")


def test_a_mistyped_quant_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    _, error = refused(capsys, environ, "UD-IQ1M")
    assert "UD-IQ1_M" in error["hint"]


def test_an_effort_the_model_does_not_know_is_refused_before_the_load_of_a_path_too(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    argv = (str(tiny), "--effort", "huge", "--engine", "embedded", "--dry-run", "--port", str(free_port()))
    found, error = refused(capsys, environ, *argv)
    assert (found, error["code"]) == (2, "unknown-effort")


def test_a_context_above_the_files_own_is_refused(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    code, error = refused(capsys, environ, str(tiny), "--context", str(tiny_k3.CONTEXT + 1), "--port", str(free_port()))
    assert (code, error["code"]) == (2, "context-too-large")
    assert f"{tiny_k3.CONTEXT:,}" in error["message"]


@pytest.mark.parametrize("content", [b"", b"no model at all", b"GGUF"])
def test_a_path_that_is_no_model_is_told(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    code, error = refused(capsys, environ, str(path), "--port", str(free_port()))
    assert code in {2, 5}
    assert "model.gguf" in error["message"]


def test_a_taken_port_is_refused_before_a_terabyte_is_fetched(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, error = refused(capsys, environ, "UD-IQ1_M", "--port", str(other.getsockname()[1]))
    assert (code, error["code"]) == (3, "port-in-use")


def test_a_port_that_ones_own_server_has_is_not_called_another_programs(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    servers = Path(environ["XDG_STATE_HOME"]) / "kimigguf" / "servers"
    me = ProcessId.of(os.getpid())
    assert me is not None
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        entry = Entry(
            name="evening", supervisor=me, engine=me, host="127.0.0.1", port=port, alias="kimi-k3", quant=None, log="",
            plan_file="", arguments=(), folder="", started_at="", planned_bytes=0,
        )  # fmt: skip
        with entered(servers, entry):
            code, error = refused(capsys, environ, "UD-IQ1_M", "--port", str(port))
        assert (code, error["code"]) == (3, "port-in-use")
        assert "your server evening" in error["message"]
        assert error["hint"].startswith("kimigguf stop --name evening")
        with entered(servers, replace(entry, port=free_port())):
            assert "another program" in refused(capsys, environ, "UD-IQ1_M", "--port", str(port))[1]["message"]


def test_a_second_server_on_a_port_does_not_write_over_the_plan_of_the_first(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    """An engine reads its plan when it starts, and listens only after that."""
    port, files = str(free_port()), []
    for name in ("one", "two"):
        assert serve(environ, str(tiny), "--dry-run", "--port", port, "--name", name) == 0
        files.append(json.loads(capsys.readouterr().out)["plan_file"])
    assert files[0] != files[1]


def test_a_server_of_another_model_is_not_called_after_kimi(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path
) -> None:
    write_shards(tmp_path / "set", [[tensor("a", (8,), 0, 0)]], sizes=(32,), name="My_Model")
    port = str(free_port())
    with reserved(Path(environ["XDG_STATE_HOME"]) / "kimigguf" / "servers", f"my-model-{port}"):
        code, error = refused(capsys, environ, str(tmp_path / "set"), "--port", port)
    assert (code, error["code"]) == (2, "name-in-use")
    assert f"my-model-{port}" in error["message"]


@pytest.mark.parametrize("more", [(), ("--detach", "--new-api-key")])
def test_a_name_that_another_is_being_started_under_is_refused_before_a_terabyte_is_fetched(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], more: tuple[str, ...]
) -> None:
    state = Path(environ["XDG_STATE_HOME"]) / "kimigguf"
    with reserved(state / "servers", "twin"):
        code, error = refused(capsys, environ, "UD-IQ1_M", "--port", str(free_port()), "--name", "twin", *more)
    assert (code, error["code"]) == (2, "name-in-use")
    assert not (state / "keys").exists()


def test_two_that_are_started_in_the_background_do_not_write_over_each_other(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    state = Path(environ["XDG_STATE_HOME"]) / "kimigguf"
    with reserved(state / "servers", "twin", to_start=True):
        code, error = refused(capsys, environ, "UD-IQ1_M", "--name", "twin", "--detach")
    assert (code, error["code"]) == (2, "name-in-use")
    assert not (state / "logs").exists()


@pytest.mark.parametrize("which", ["folder", "first", "middle"])
def test_any_shard_or_the_folder_leads_to_the_first_shard(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, which: str
) -> None:
    shards = sorted(tiny.glob("*.gguf"))
    target = {"folder": tiny, "first": shards[0], "middle": shards[2]}[which]
    assert serve(environ, str(target), "--dry-run", "--port", str(free_port())) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.preflight/1"
    argv = data["command"]
    assert argv[argv.index("--model") + 1] == str(shards[0])
    assert argv[argv.index("--ctx-size") + 1] == "32768"
    states = {check["what"]: check["state"] for check in data["checks"]}
    assert states["port"] == states["engine"] == states["plan"] == "passed"
    assert states["files"] == "unknown"  # nobody has said what their hashes should be


def test_a_plan_is_replayed_to_the_same_command(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    port = str(free_port())
    assert serve(environ, str(tiny), "--dry-run", "--port", port, "--context", "8192") == 0
    first = json.loads(capsys.readouterr().out)
    assert serve(environ, "--plan", first["plan_file"], "--dry-run", "--port", port) == 0
    assert json.loads(capsys.readouterr().out)["command"] == first["command"]


def test_a_driver_that_wakes_slowly_is_waited_for(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second eight sleeping cards do not answer, and the plan would go without them."""
    limits: list[float] = []

    def watched(**options: Any) -> Machine:
        limits.append(options.get("limit_seconds", LIMIT_SECONDS))
        return detect(**options)

    monkeypatch.setattr("kimigguf.engines.planned.detect", watched)
    port = str(free_port())
    assert serve(environ, str(tiny), "--dry-run", "--port", port) == 0
    plan_file = json.loads(capsys.readouterr().out)["plan_file"]
    assert serve(environ, "--plan", plan_file, "--dry-run", "--port", port) == 0
    assert limits == [PATIENT_LIMIT_SECONDS] * 2


def test_a_device_that_only_the_engine_knows_is_told(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    device = "Available devices:\n  CUDA0: NVIDIA H999 (143771 MiB, 143000 MiB free)\n"
    engine = write_engine(tmp_path / "gpu" / "llama-server", version=mainline(11434), devices=device)
    argv = (str(tiny), "--dry-run", "--port", str(free_port()))
    assert serve(environ | {"KIMIGGUF_LLAMA_SERVER": str(engine)}, *argv) == 0
    assert "CUDA0 (NVIDIA H999)" in capsys.readouterr().err


def test_arguments_for_the_engine_stand_last_and_dangerous_ones_are_refused(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    port = str(free_port())
    assert serve(environ, str(tiny), "--dry-run", "--port", port, "--", "--threads", "3") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["command"][-2:] == ["--threads", "3"]
    assert serve(environ, "--plan", first["plan_file"], "--dry-run", "--port", port, "--", "--threads", "3") == 0
    assert json.loads(capsys.readouterr().out)["command"] == first["command"]
    code, error = refused(capsys, environ, str(tiny), "--dry-run", "--port", port, "--", "-ngl", "99")
    assert (code, error["code"]) == (2, "flag-undoes-plan")


def test_explain_shows_flags_as_a_command_line_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--explain"], App(show=Show(), environ={"PATH": ""})) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--")]
    bare = {words[0] for line in heads if len(words := line.partition("  (")[0].split()) == 1}
    valued = {words[0] for line in heads if len(words := line.partition("  (")[0].split()) == 2}
    assert {"--no-repack", "--metrics", "--no-op-offload"} <= bare <= server_flags.BARE
    assert {"--ctx-size", "--fit", "--top-k"} <= valued <= server_flags.WITH_VALUE
    assert "--top-p 0.95  (1.0 with --agent)" in heads


def test_explain_gives_every_setting_its_reason_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve({"PATH": ""}, "--explain") == 0
    data = json.loads(capsys.readouterr().out)
    by_flag = {setting["flag"]: setting for setting in data["settings"]}
    assert by_flag["--cache-reuse"]["value"] == 0
    assert "KDA" in by_flag["--cache-reuse"]["reason"]
    assert all(setting["reason"] and setting["source"] for setting in data["settings"])


def test_explain_leaves_out_nothing_that_a_command_line_has(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    assert serve({"PATH": ""}, "--explain") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    by_flag = {setting["flag"]: setting for setting in settings}
    assert len(by_flag) == len(settings)
    assert set(VARIABLES) - set(by_flag) == {"--ssl-key-file", "--ssl-cert-file"}  # given after -- alone
    assert serve(environ, str(tiny), "--dry-run", "--port", str(free_port())) == 0
    given = {word for word in json.loads(capsys.readouterr().out)["command"] if word.startswith("--")}
    assert given <= set(by_flag)
    placed = {"--device", "--n-gpu-layers", "--tensor-split", "--override-tensor"}
    assert {by_flag[flag]["from_plan"] for flag in placed} == {"layout"}
    assert by_flag["--alias"]["value"] == "kimi-k3"


def test_a_plan_for_other_files_is_stale(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    assert serve(environ, str(tiny), "--dry-run", "--port", str(free_port())) == 0
    plan_file = json.loads(capsys.readouterr().out)["plan_file"]
    plan = json.loads(Path(plan_file).read_text())
    plan["model"]["files"][1]["size_bytes"] += 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan))
    code, error = refused(capsys, environ, "--plan", str(other), "--port", str(free_port()))
    assert (code, error["code"]) == (2, "plan-stale")
    assert plan["model"]["files"][1]["name"] in error["cause"]


def test_a_plan_for_more_memory_than_there_is_stops_before_the_start(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    assert serve(environ, str(tiny), "--dry-run", "--port", str(free_port())) == 0
    plan = json.loads(Path(json.loads(capsys.readouterr().out)["plan_file"]).read_text())
    plan["machine"]["ram_bytes"] = 10 * plan["machine"]["ram_bytes"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan))
    code, error = refused(capsys, environ, "--plan", str(other), "--port", str(free_port()))
    assert (code, error["code"]) == (3, "preflight-failed")
    assert "RAM" in error["cause"]


def test_a_key_file_that_others_can_read_is_refused(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    code, error = refused(capsys, environ, "UD-IQ1_M", "--host", "0.0.0.0", "--api-key-file", str(keys))
    assert (code, error["code"]) == (2, "bad-key-file")
    assert error["hint"] == f"chmod 600 {keys}"


def test_a_key_that_no_header_can_carry_is_refused_before_the_load_and_not_shown(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nschlüssel-π\n", encoding="utf-8")
    keys.chmod(0o600)
    code, error = refused(capsys, environ, "UD-IQ1_M", "--api-key-file", str(keys))
    assert (code, error["code"]) == (2, "bad-key-file")
    assert "line 2" in error["message"]
    assert "schl" not in json.dumps(error)


@pytest.mark.parametrize(
    ("host", "exit_code", "code"),
    [
        ("a..b", 2, "unknown-host"),
        ("192.0.2.1", 2, "address-not-here"),  # a documentation address: nobody's
    ],
)
def test_an_address_that_cannot_be_had_is_not_called_taken(
    *, capsys: pytest.CaptureFixture[str], environ: dict[str, str], tmp_path: Path, host: str, exit_code: int, code: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    argv = ("UD-IQ1_M", "--host", host, "--port", str(free_port()), "--api-key-file", str(keys))
    found, error = refused(capsys, environ, *argv)
    assert (found, error["code"]) == (exit_code, code)
    assert host in error["message"]
    assert "another program" not in error["message"]


def test_a_new_key_is_shown_once_and_kept_where_only_its_owner_reads(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path
) -> None:
    argv = (str(tiny), "--host", "0.0.0.0", "--port", str(free_port()), "--new-api-key", "--name", "open", "--dry-run")
    assert serve(environ, *argv) == 0
    out, err = capsys.readouterr()
    kept = Path(environ["XDG_STATE_HOME"]) / "kimigguf" / "keys" / "open"
    key = kept.read_text().strip()
    assert len(key) > 30
    assert kept.stat().st_mode & 0o077 == 0
    assert err.count(key) == 1
    assert key not in out  # neither in the command line nor anywhere else in the answer
    argv = json.loads(out)["command"]
    assert argv[argv.index("--api-key-file") + 1] == str(kept)


def test_an_engine_that_dies_at_once_is_a_server_error_with_its_last_line(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "llama-server"
    broken.parent.mkdir()
    broken.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 'version: 11434 (abc)';; --help) ;; --list-devices) echo 'Available "
        "devices:';; *) echo '0.1 E cudaMalloc failed: out of memory'; exit 1;; esac\n"
    )
    broken.chmod(0o755)
    code, error = refused(
        capsys, environ | {"KIMIGGUF_LLAMA_SERVER": str(broken)}, str(tiny), "--port", str(free_port())
    )
    assert (code, error["code"]) == (6, "out-of-memory")
    assert "cudaMalloc failed" in error["cause"]
    assert ".log" in error["hint"]


def play(folder: Path, mode: str) -> dict[str, str]:
    """The environment that has serve take the fake engine in that mode; it writes its starts to ``starts``."""
    engine = folder / "fake" / "llama-server"
    engine.parent.mkdir()
    engine.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 'version: 11434 (abc)';; --help) ;;\n"
        f"--list-devices) echo 'Available devices:';;\n*) echo x >> {folder / 'starts'}\n"
        f'exec {sys.executable} {server_program.__file__} "$@";;\nesac\n'
    )
    engine.chmod(0o755)
    return {"KIMIGGUF_LLAMA_SERVER": str(engine), "FAKE_MODE": mode}


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("health-lies", "selftest-failed", "no slot was ever made"),
        ("dies-in-selftest", "device-error", "testing itself"),
    ],
)
def test_a_server_that_fails_its_self_test_is_never_called_ready(
    *, capsys: pytest.CaptureFixture[str], environ: dict[str, str], tiny: Path, tmp_path: Path, mode: str, code: str,
    words: str,
) -> None:  # fmt: skip
    exit_code = serve(environ | play(tmp_path, mode), str(tiny), "--port", str(free_port()))
    out, err = capsys.readouterr()
    error = json.loads(err.splitlines()[-1])
    assert (exit_code, error["code"]) == (6, code)
    assert words in f"{error['message']} {error['cause']}"
    assert "log" in error["hint"]
    assert '"state": "ready"' not in out


@pytest.mark.parametrize(("mode", "starts"), [("dies-while-serving", 2), ("cuda-oom", 1)])
def test_only_what_can_pass_is_started_again(
    *,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    starts: int,
) -> None:
    monkeypatch.setattr("kimigguf.engines.watchdog.Restarts", partial(Restarts, at_most=1))
    found: list[Life] = []

    def sleep(_seconds: float) -> None:
        found.extend(map(life_of, entries(tmp_path / "state" / "kimigguf" / "servers")))

    monkeypatch.setattr("kimigguf.cli.serve.time", SimpleNamespace(sleep=sleep))
    fake = environ | play(tmp_path, mode)
    argv = (str(tiny), "--port", str(free_port()), "--no-selftest", "--restart", "on-failure")
    assert serve(fake, *argv) == 6
    assert found == [Life.ENDED] * (starts - 1)  # so that stop finds what would be started again
    assert (tmp_path / "starts").read_text().count("x") == starts
    assert capsys.readouterr().err.count("kimigguf.error/1") == starts
    (death,) = deaths(tmp_path / "state" / "kimigguf" / "servers")  # once, when it is given up
    assert death.how == "exit code 1"
    assert str(tiny) in death.arguments


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"], App(show=Show(), environ={})) == 0
    assert "kimigguf serve UD-IQ1_M" in capsys.readouterr().out


def test_a_taken_ollama_port_is_refused_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, error = refused(capsys, environ, "UD-IQ1_M", "--port", str(free_port()), "--ollama-port", str(port))
    assert (code, error["code"]) == (3, "port-in-use")
    assert "--ollama-api" in error["message"]
    assert str(port) in error["message"]


def test_one_port_cannot_be_the_engines_and_ollamas(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    port = str(free_port())
    code, error = refused(capsys, environ, "UD-IQ1_M", "--port", port, "--ollama-port", port)
    assert (code, error["code"]) == (2, "same-port")


def test_ollama_api_before_the_target_takes_ollamas_port_and_not_the_target_for_one(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> None:
    code, error = refused(capsys, environ, "--ollama-api", "UD-IQ1_M", "--port", "11434")
    assert (code, error["code"]) == (2, "same-port")
    assert "--ollama-port 11435" in error["hint"]


@pytest.mark.parametrize(
    ("requires", "packages"),
    [
        (
            ["click>=8.2", "starlette>=1.0; extra == 'ollama-bridge'", 'uvicorn>=0.40; extra == "ollama-bridge"',
             "uvloop>=0.21; sys_platform != 'win32' and extra == 'ollama-bridge'", "uvicorn>=0.40; extra == 'test'"],
            "'starlette>=1.0' 'uvicorn>=0.40' 'uvloop>=0.21'",
        ),
        (["click>=8.2"], "starlette uvicorn httptools"),  # installed before there was such an extra
    ],
)  # fmt: skip
def test_a_bridge_without_its_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    requires: list[str],
    packages: str,
) -> None:
    """kimigguf itself is in no index that pip asks, so its extra cannot be named."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: requires)
    code, error = refused(capsys, environ, "UD-IQ1_M", "--port", str(free_port()), "--ollama-port", str(free_port()))
    assert (code, error["code"]) == (3, "bridge-missing")
    assert error["hint"] == f"{sys.executable} -m pip install {packages}"


def test_a_restarted_server_gets_its_ollama_port_back() -> None:
    again = Request(target="UD-IQ1_M", ollama_port=12000).arguments("k3")
    assert again[again.index("--ollama-port") + 1] == "12000"
    assert "--ollama-port" not in Request(target="UD-IQ1_M").arguments("k3")
