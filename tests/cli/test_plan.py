"""``kimigguf plan`` as a person and as a script would use it."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import mainline, write_engine
from fakes.hub import serve as serve_hub
from fakes.machines import two_gpus_here
from fakes.served import small_model

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.placement.placed import device_need_bytes
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import load_plan
from kimigguf.units import GIB

MACHINE = "epyc-768g-rtx-pro-6000"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": "",
        "KIMIGGUF_MODELS": str(tmp_path / "models"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def roomy(tmp_path: Path) -> str:
    """A machine of its own, so that no answer depends on the memory that is free where the test runs."""
    path = tmp_path / "roomy.toml"
    path.write_text('name = "roomy"\nsource = "test"\naccelerators = []\n[ram]\ntotal_bytes = "64GiB"\n')
    return str(path)


def plan(environ: dict[str, str], *argv: str) -> int:
    return run(["plan", *argv], App(show=Show(), environ=environ))


def answered(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = plan(environ, *argv, "--json")
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = plan(environ, *argv, "--json")
    captured = capsys.readouterr()
    assert captured.out == ""
    records = [json.loads(line) for line in captured.err.splitlines()]
    return code, next(record for record in records if record["schema"] == "kimigguf.error/1")


def test_json_is_a_plan_file_with_the_command_line_beside_it(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = answered(capsys, environ, "UD-Q2_K_XL", "--machine", MACHINE, "--context", "65536", "--slots", "2")
    assert code == 0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    loaded = load_plan(tmp_path / "plan.json")
    assert (loaded.settings.context_tokens, loaded.settings.slots) == (65536, 2)
    assert loaded.model.quant == "UD-Q2_K_XL"
    assert loaded.machine.device_budget_bytes == (95 * 2**30,)
    argv = data["command"]["argv"]
    assert argv[argv.index("--ctx-size") + 1] == "65536"
    assert argv[argv.index("--parallel") + 1] == "2"
    assert argv[argv.index("--fit") + 1] == "off"
    assert "--no-repack" in argv
    assert any("=CPU" in word for word in argv), "host experts are named"


def test_a_person_sees_bars_ledger_placement_and_the_command(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert plan(environ, "UD-Q2_K_XL", "--machine", MACHINE, "--explain", "-v") == 0
    out = capsys.readouterr().out
    for words in ("gpu0", "RAM ", "reserve GiB", "experts", "layers 0-92", "context checkpoints", "llama-server"):
        assert words in out
    for why in ("Why this quant", "Why this split", "Why this context", "What may be used", "Where the numbers come"):
        assert why in out
    before_command = out.partition("The command:")[0]
    assert max(map(len, before_command.splitlines())) <= 80
    assert "\x1b" not in out
    command = out.partition("The command:")[2]
    assert all(line.endswith("\\") for line in command.strip().splitlines()[:-1]), "it can be pasted"


def test_the_words_and_the_table_say_the_same_of_the_experts(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("UD-IQ2_XXS", "--machine", "epyc-768g-rtx-pro-6000")
    _, answer = answered(capsys, environ, *argv)
    layout = answer["layout"]
    assert layout["moved"], "the case is of single tensors that were moved"
    assert plan(environ, *argv, "--explain") == 0
    out = capsys.readouterr().out
    on_gpu, on_host = (
        float(next(line for line in out.splitlines() if line.startswith(f" {name}")).split()[index])
        for name, index in (("gpu0", 3), ("host", 2))
    )
    words = re.search(r"took ([\d.]+) GiB of experts; the other ([\d.]+) GiB", " ".join(out.split()))
    assert words is not None
    assert (float(words[1]), float(words[2])) == pytest.approx((on_gpu, on_host), abs=0.06)


def test_quiet_answers_by_the_exit_code_alone(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(environ, "UD-IQ1_M", "--machine", MACHINE, "--quiet") == 0
    assert plan(environ, "UD-IQ1_M", "--machine", "laptop-64g", "--quiet") == 1
    assert capsys.readouterr() == ("", "")


def test_what_does_not_fit_exits_with_1_and_names_missing_bytes_and_ways_out(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = answered(capsys, environ, "UD-IQ1_M", "--machine", "laptop-64g")
    assert code == 1
    assert data["schema"] == "kimigguf.shortfall/1"
    assert data["missing_bytes"] == data["need_bytes"] - data["have_bytes"] > 500 * 2**30
    assert data["ways_out"]
    assert data["ways_out"][-1].startswith("kimigguf recommend --machine laptop-64g compares")
    assert plan(environ, "UD-IQ1_M", "--machine", "laptop-64g") == 1
    assert "does not fit" in capsys.readouterr().out


def test_what_does_not_fit_a_what_if_points_to_the_same_what_if(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus_here(monkeypatch)
    argv = ("UD-IQ1_M", "--set", "ram=64GiB", "--set", "gpu=none")
    _, data = answered(capsys, environ, *argv)
    assert data["ways_out"][-1].startswith("kimigguf recommend --set ram=64GiB --set gpu=none compares")
    assert plan(environ, *argv) == 1
    assert "UD-IQ1_M does not fit this machine with" in capsys.readouterr().out


def test_a_quant_larger_than_memory_streams_from_a_local_nvme_and_says_so(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = answered(capsys, environ, "UD-Q4_K_XL", "--machine", MACHINE)
    assert code == 0
    assert data["streamed_bytes"] > 500 * 2**30
    assert any("stream from disk" in notice for notice in data["notices"])
    assert data["settings"]["repack"] is False


@pytest.mark.parametrize(
    ("argv", "exit_code", "code"),
    [
        (("UD-IQ9_Z", "--machine", MACHINE), 2, "unknown-quant"),
        (("UD-IQ1_M", "--machine", MACHINE, "--context", "2000000"), 2, "context-too-large"),
        (("UD-IQ1_M", "--machine", MACHINE, "--context", "0"), 2, "bad-context"),
        (("UD-IQ1_M", "--machine", "no-such-machine"), 2, "unknown-profile"),
        (("UD-IQ1_M", "--machine", MACHINE, "--reserve-ram", "16G"), 2, "ambiguous-size"),
        (("UD-Q1_0", "--machine", MACHINE), 3, "quant-unsupported"),
        (("./no-such-folder", "--machine", MACHINE), 2, "no-such-file"),
        (("UD-IQ1_M", "--machine", MACHINE, "--engine-path", "/no/such/llama-server"), 3, "engine-unusable"),
        (("UD-IQ1_M", "--hub", "--machine", MACHINE), 4, "hub-unreachable"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_by_name(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], exit_code: int, code: str
) -> None:
    found, error = refused(capsys, environ, *argv)
    assert (found, error["code"]) == (exit_code, code), error


def test_any_shard_or_the_folder_plans_the_set(
    environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny()
    shards = sorted(folder.glob("*.gguf"))
    answers = [
        answered(capsys, environ, str(path), "--machine", roomy) for path in (folder, shards[0], shards[1], shards[-1])
    ]
    assert all(answer == answers[0] for answer in answers)
    code, data = answers[0]
    assert code == 0
    assert data["model"]["folder"] == str(folder)
    assert [file["name"] for file in data["model"]["files"]] == [path.name for path in shards]
    argv = data["command"]["argv"]
    assert argv[argv.index("--model") + 1] == str(shards[0])


def test_a_path_that_is_no_model_is_its_own_error_each(
    tmp_path: Path, environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder").mkdir()
    part = tmp_path / "part"
    shutil.copytree(tiny(), part)
    missing = sorted(part.glob("*.gguf"))[1]
    missing.unlink()
    answers = [
        refused(capsys, environ, str(tmp_path / path), "--machine", roomy)
        for path in ("empty.gguf", "text.gguf", "folder", "part")
    ]
    codes = [(exit_code, error["code"]) for exit_code, error in answers]
    assert codes == [(2, "empty-file"), (2, "not-gguf"), (2, "no-gguf"), (5, "missing-shard")]
    assert missing.name in str(answers[-1])


def test_the_headers_on_the_hub_are_used_when_asked_for(
    tmp_path: Path, environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    repository = load_model().repository
    assert repository.id is not None
    assert repository.commit is not None
    target = tmp_path / "hub" / repository.id / "UD-IQ1_M"
    target.parent.mkdir(parents=True)
    shutil.copytree(tiny("UD-IQ1_M"), target)
    with serve_hub(tmp_path / "hub", commit=repository.commit) as hub:
        code, data = answered(capsys, environ | {"HF_ENDPOINT": hub.url}, "UD-IQ1_M", "--hub", "--machine", roomy)
    assert code == 0
    assert data["model"]["commit"] == repository.commit
    assert data["model"]["folder"] is None
    assert any("kimigguf download UD-IQ1_M brings the files" in warning for warning in data["warnings"])
    assert [file["name"] for file in data["model"]["files"]] == sorted(path.name for path in target.iterdir())
    assert all(file["sha256"] for file in data["model"]["files"])


def fake_server(folder: Path, report: str) -> str:
    """A llama-server whose memory report says what it is told to."""
    server = write_engine(folder / "llama-server", version=mainline(11434))
    tool = folder / "llama-fit-params"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = --help ]; then echo "--model --fit"; else printf "{report}"; fi\n')
    tool.chmod(0o755)
    return str(server)


def test_verify_exits_with_1_when_the_engine_says_otherwise(
    tmp_path: Path, environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake_server(tmp_path / "bin", "Host 900 10 20\\n")
    argv = (str(tiny()), "--machine", roomy, "--engine-path", server, "--verify")
    code, data = answered(capsys, environ | {"PATH": "/usr/bin:/bin"}, *argv)
    assert code == 1
    assert data["verification"]["agrees"] is False
    host = data["verification"]["devices"][-1]
    assert host["name"] == "host"
    assert host["engine"]["model_bytes"] == 900 * 2**20
    assert plan(environ | {"PATH": "/usr/bin:/bin"}, *argv) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_what_agrees_though_it_is_some_percent_off_says_within_what(
    tmp_path: Path, environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny model's few MiB are whole MiB in the engine's report."""
    environ |= {"PATH": "/usr/bin:/bin"}
    server = fake_server(tmp_path / "bin", "Host 900 10 20\\n")
    argv = (str(tiny()), "--machine", roomy, "--engine-path", server, "--verify")
    ours = answered(capsys, environ, *argv)[1]["verification"]["devices"][-1]["ledger"]
    sizes = " ".join(str(2 + ours[name] // 2**20) for name in ("model_bytes", "context_bytes", "compute_bytes"))
    fake_server(tmp_path / "bin", f"Host {sizes}\\n")
    assert plan(environ, *argv) == 0
    assert "agrees with the engine, within 2 % or 32.0 MiB, whichever is more" in capsys.readouterr().out
    assert plan(environ, "--help") == 0
    assert "2 % and 32 MiB" in " ".join(capsys.readouterr().out.split())


def test_verify_without_a_report_tool_is_unknown_and_no_failure(
    tmp_path: Path, environ: dict[str, str], roomy: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    argv = (str(tiny()), "--machine", roomy, "--engine-path", str(server), "--verify")
    code, data = answered(capsys, environ, *argv)
    assert code == 0
    assert data["verification"]["agrees"] is None
    assert "no memory report" in data["verification"]["reason"]


def test_an_engine_without_the_accelerators_is_told_and_the_plan_still_shown(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    code, data = answered(capsys, environ, "UD-IQ1_M", "--machine", MACHINE, "--engine-path", str(server))
    assert code == 0
    assert data["command"] is None
    assert any("the engine sees 0" in warning for warning in data["warnings"])


def test_a_what_if_is_planned_for_a_plain_llama_server(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = answered(capsys, environ, "UD-IQ1_M", "--set", "ram=2TiB", "--set", "gpu=2x96GiB")
    assert code == 0
    assert data["command"]["argv"][0] == "llama-server"
    assert data["machine"]["device_bytes"] == [96 * 2**30] * 2


def test_here_the_shares_go_to_the_gpus_in_the_engines_order_not_the_drivers(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus_here(monkeypatch)
    devices = (
        "Available devices:\n  CUDA0: NVIDIA RTX PRO 6000 (98304 MiB, 97000 MiB free)\n"
        "  CUDA1: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)\n"
    )
    server = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434), devices=devices)
    code, data = answered(capsys, environ, "UD-IQ1_M", "--engine-path", str(server))
    assert code == 0
    assert data["machine"]["device_names"] == ["NVIDIA RTX PRO 6000", "NVIDIA GeForce RTX 3090"]
    shares = [device_need_bytes(load_written(tmp_path, data).ledger, index) for index in (0, 1)]
    assert 80 * GIB < shares[0] <= 95 * GIB, "the large card gets the large share"
    assert shares[1] <= 23 * GIB
    argv = data["command"]["argv"]
    assert argv[argv.index("--device") + 1] == "CUDA0,CUDA1"


def test_here_an_engine_without_the_gpus_gets_a_plan_for_the_host_and_that_is_said(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus_here(monkeypatch)
    server = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    code, data = answered(capsys, environ, "UD-IQ1_M", "--engine-path", str(server))
    assert code == 0
    assert data["layout"]["devices"] == []
    assert data["command"]["argv"][data["command"]["argv"].index("--device") + 1] == "none"
    assert any("does not see 2 of this machine's 2" in warning for warning in data["warnings"])


def test_an_engine_that_reads_a_plan_file_is_told_by_a_line_that_writes_one_first(
    environ: dict[str, str],
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_gpus_here(monkeypatch)
    embedded = FoundEngine(
        kind=EngineKind.EMBEDDED, path=None, version="v", build=1, supports_k3=True, backends=("cpu",), devices=()
    )
    monkeypatch.setattr("kimigguf.engines.choose.choose", lambda *_, **__: embedded)
    assert plan(environ, str(tiny()), "--context", "4096", "--engine", "embedded") == 0
    line = capsys.readouterr().out.partition("The command:")[2].replace("\\\n", " ").split()
    assert (
        line
        == (
            f"kimigguf plan {tiny()} --context 4096 --engine embedded --json > plan.json"
            " && kimigguf serve --plan plan.json --engine embedded"
        ).split()
    )
    assert plan(environ, "UD-IQ1_M", "--models-dir", "m") == 0
    assert "kimigguf download UD-IQ1_M --models-dir m &&" in capsys.readouterr().out
    assert answered(capsys, environ, str(tiny()))[1]["command"]["plan_file"] == "plan.json"


@pytest.mark.parametrize(
    "argv",
    [
        ("UD-Q4_K_XL", "--set", "ram=4TiB", "--set", "gpu=none", "--slots", "32", "--context", "1048576"),
        ("UD-Q4_K_XL", "--set", "ram=4TiB", "--set", "gpu=1440GiB", "--slots", "128", "--context", "1048576"),
        ("UD-IQ1_M", "--machine", "8x-b200"),
    ],
)
def test_on_a_narrow_terminal_no_heading_or_number_of_the_table_is_cut(
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert plan(environ, *argv) == 0
    before = capsys.readouterr().out.partition("The command:")[0]
    assert "…" not in before
    assert max(map(len, before.splitlines())) <= 70
    (heading,) = [line for line in before.splitlines() if "compute" in line]
    assert heading.split()[-2:] in (["beside", "total"], ["compute", "total"])


def test_the_bar_and_the_table_say_the_same_of_a_gpu(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(environ, "UD-IQ1_M", "--machine", MACHINE) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    bar, row = (line for line in lines if line[:1] == ["gpu0"])
    assert f"{float(row[-1]):.1f}" == bar[2]


def test_a_plan_made_before_the_files_were_here_is_told_by_commands_that_keep_its_settings(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, data = answered(capsys, environ, "UD-IQ1_M", "--machine", MACHINE, "--context", "4096", "--kv-type", "q8_0")
    load_written(tmp_path, data)
    server = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    argv = ["serve", "--plan", str(tmp_path / "plan.json"), "--engine-path", str(server), "--port", port, "--json"]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert run(argv, App(show=Show(), environ=environ | state)) == 2
    error = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert error["code"] == "plan-without-files"
    assert error["hint"] == (
        "kimigguf download UD-IQ1_M && kimigguf plan UD-IQ1_M --context 4096 --slots 1 --kv-type q8_0 --ubatch 512"
        " --json > plan.json && kimigguf serve --plan plan.json"
    )


def load_written(folder: Path, data: dict[str, Any]) -> Plan:
    (folder / "plan.json").write_text(json.dumps(data))
    return load_plan(folder / "plan.json")


@pytest.mark.native
def test_verify_agrees_with_the_real_engine_for_k3_at_its_true_size(
    environ: dict[str, str],
    tmp_path: Path,
    native_bin: Path,
    skeleton: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = tmp_path / "host.toml"
    machine.write_text('name = "host"\nsource = "test"\naccelerators = []\n[ram]\ntotal_bytes = "1TiB"\n')
    argv = (str(skeleton("UD-IQ1_S")), "--machine", str(machine), "--engine-path", str(native_bin), "--verify")
    code, data = answered(capsys, environ | {"PATH": "/usr/bin:/bin"}, *argv)
    assert code == 0, data["verification"]
    assert data["verification"]["agrees"] is True
    assert data["verification"]["devices"][0]["engine"]["model_bytes"] > 500 * 2**30


def test_help_shows_an_example(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(environ, "--help") == 0
    assert "kimigguf plan UD-IQ1_M" in capsys.readouterr().out


def test_a_split_that_has_no_room_for_pipelining_says_what_switches_it_off(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "machines").mkdir()
    gpu = '[[accelerators]]\nname = "GPU"\nmemory_kind = "discrete"\ntotal_bytes = {}\n'
    cards = "".join(gpu.format(size * GIB) for size in (40, 40, 48, 48, 96, 180, 180))
    (tmp_path / "machines" / "seven.toml").write_text(
        f'name = "seven"\nsource = "a test"\n[ram]\ntotal_bytes = {1 << 40}\n{cards}'
    )
    sizes = ("--context", "262144", "--ubatch", "4096")
    environ["KIMIGGUF_PROFILES"] = str(tmp_path)
    assert plan(environ, "UD-IQ1_S", "--machine", "seven", "--explain", *sizes) == 0
    out = capsys.readouterr().out
    assert "pipelining" in " ".join(out.split())
    assert "'^pipelining-off$=CPU'" in out


def test_a_model_made_for_fewer_tokens_is_planned_with_what_it_was_made_for(
    environ: dict[str, str], roomy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = map(str, small_model())
    assert plan(environ, file, "--machine", roomy, "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["context_tokens"] == 8192
    assert plan(environ, file, "--machine", roomy, "--context", "32768") == 2
    assert "[context-too-large]" in capsys.readouterr().err


def test_a_model_without_a_profile_is_served_under_its_own_name_by_the_plans_command_too(
    environ: dict[str, str], roomy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = map(str, small_model())
    assert plan(environ, file, "--machine", roomy, "--json") == 0
    argv = json.loads(capsys.readouterr().out)["command"]["argv"]
    assert argv[argv.index("--alias") + 1].startswith("smollm2-135m")
