"""`bench` as a person and as a script would use it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.test_bench import USAGE, WORDS
from fakes.engines import real_engine
from fakes.openai_server import Script, answering
from fakes.processes import until

from kimigguf.cli import bench_show
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.engines import bench, bench_target
from kimigguf.engines.command import command
from kimigguf.engines.discover import known_flags
from kimigguf.engines.llama_server import Address, Server
from kimigguf.engines.registry import Entry, ProcessId, entered
from kimigguf.engines.report import Columns
from kimigguf.engines.serving import load_serving
from kimigguf.errors import ServerError
from kimigguf.events import ignore
from kimigguf.hardware.usage import Peaks, TreeUse
from kimigguf.memory.layout import Layout
from kimigguf.placement.plan_file import write_plan
from kimigguf.speed.measured import load_runs
from kimigguf.speed.samples import Rejected, Sample, Warmth, by_the_server

TIMINGS = {"prompt_ms": 900.0, "prompt_n": 512, "cache_n": 0, "prompt_per_second": 568.9, "predicted_n": 64}


def call(home: Path, *argv: str, **environ: str) -> int:
    places = {"XDG_STATE_HOME": str(home / "state"), "KIMIGGUF_PROFILES": str(home / "profiles")}
    return run(["bench", *argv], App(show=Show(), environ=places | environ))


def sample(rate: float, warmth: Warmth = Warmth.COLD, depth: int = 0, **changes: Any) -> Sample:
    timings = TIMINGS | {"predicted_per_second": rate}
    return replace(by_the_server(timings, depth_tokens=depth, warmth=warmth, client_seconds=0.9), **changes)


@pytest.fixture
def other_kind() -> Iterator[Script]:
    """A server that is no llama-server: no /props, no timings."""
    with answering(Script(chunks=[*WORDS, {"choices": [], "usage": USAGE}], pause=0.005)) as script:
        yield script


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the test runs on this machine, in this process, and serves a quant."""
    monkeypatch.setattr(bench_target, "_process", lambda *_: (os.getpid(), None))
    monkeypatch.setattr(bench_target, "quant_in", lambda *_: "UD-IQ1_M")


def yields(monkeypatch: pytest.MonkeyPatch, *results: Sample | Rejected | BaseException) -> None:
    def measure(*_: object, **__: object) -> Iterator[Sample | Rejected]:
        for result in results:
            if isinstance(result, BaseException):
                raise result
            yield result

    monkeypatch.setattr(bench, "measure", measure)


@pytest.mark.engine
@pytest.mark.native
def test_a_served_k3_is_measured_and_kept_as_a_measurement_of_this_machine(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Shape", lambda: SMALL)
    with serving(tiny("UD-IQ1_M"), tmp_path):
        assert call(tmp_path, "--depths", "0,64", "--repeat", "1", "--json") == 0
        data = json.loads(capsys.readouterr().out)
        assert data["schema"] == "kimigguf.bench/1"
        assert data["server"]["quant"] == "UD-IQ1_M"
        assert data["server"]["name"] == "tiny"
        assert data["clock"] == "server"
        assert data["ended"] is None
        assert [(row["depth_tokens"], row["warmth"]) for row in data["speeds"]] == [
            (0, "cold"),
            (0, "warm"),
            (64, "cold"),
            (64, "warm"),
        ]
        assert all(row["decode_tokens_per_second"]["count"] == 1 for row in data["speeds"])
        assert data["memory"]["host"]["resident_bytes"] > 10 << 20
        (row,) = [row for row in data["memory"]["engine"] if row["where"] == "Host"]
        assert row["model_bytes"] > 0
        kept = load_runs({"KIMIGGUF_PROFILES": str(tmp_path / "profiles")}).runs[data["saved"]]
        assert kept.model.size_bytes == sum(file.stat().st_size for file in tiny("UD-IQ1_M").glob("*.gguf"))
        assert kept.settings.placement == "trunk: 6 host; experts: 6 host"
        assert kept.machine.ram_bytes == data["machine"]["ram_bytes"]
        # The same server by its address is the same server.
        address = data["server"]["url"]
        assert call(tmp_path, "--url", address, "--depths", "0", "--repeat", "1", "--json") == 0
        assert json.loads(capsys.readouterr().out)["server"]["name"] == "tiny"
        # What has no room is refused before anything is sent.
        assert call(tmp_path, "--depths", "0,4000,5000", "--json") == 2
        error = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert error["code"] == "depth-beyond-context"
        assert "5,000" in error["message"]
        assert "4,000" not in error["message"]


SMALL = bench.Shape(prompt_tokens=24, made_tokens=4)


class serving:  # noqa: N801 -- reads as the context manager that it is
    """The tiny K3 by the native engine, in the registry as `serve` puts it there."""

    def __init__(self, folder: Path, home: Path) -> None:
        from fakes.served import plan_for

        files = sorted(folder.glob("*.gguf"))
        plan = replace(plan_for(files, "kimi-k3", 6), layout=Layout.on_host(6))
        plan = replace(plan, settings=replace(plan.settings, context_tokens=4096))
        self._plan, self._home = plan, home

    def __enter__(self) -> None:
        from fakes.processes import free_port

        engine, port = real_engine("llama-server"), free_port()
        path = self._home / "plan.json"
        write_plan(self._plan, path)
        made = command(
            self._plan, engine, profile=load_serving("kimi-k3"), port=port, plan_file=str(path),
            known_flags=known_flags(engine, os.environ), environ=os.environ,
        )  # fmt: skip
        address = Address(host="127.0.0.1", port=port)
        log = self._home / "engine.log"
        self._server = Server.start(made, address, alias="kimi-k3", log=log, total_bytes=1)
        self._server.wait_ready(ignore)
        me, it = ProcessId.of(os.getpid()), ProcessId.of(self._server.pid)
        assert me is not None
        assert it is not None
        entry = Entry(
            name="tiny", supervisor=me, engine=it, host="127.0.0.1", port=port, alias="kimi-k3", quant="UD-IQ1_M",
            log=str(log), plan_file=str(path), arguments=(), folder="", started_at="", planned_bytes=0,
        )  # fmt: skip
        self._entered = entered(self._home / "state" / "kimigguf" / "servers", entry)
        self._entered.__enter__()

    def __exit__(self, *_: object) -> None:
        self._entered.__exit__(None, None, None)
        self._server.stop()


def test_a_server_of_another_kind_is_told_to_be_measured_by_the_clients_clock(
    other_kind: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--url", other_kind.url, "--repeat", "1", "--depths", "0", KIMIGGUF_API_KEY="s3cret") == 0
    out = capsys.readouterr().out
    assert "by the client's clock" in out
    assert "unknown: the server's own speeds: it sends no `timings`" in out
    assert "rejected: depth 0, warm: the server reused nothing of the turn before" in out
    assert "not kept: the name of its file tells no quant" in out
    assert set(other_kind.keys) == {"Bearer s3cret"}
    assert not (tmp_path / "profiles").exists()


def test_a_depth_beyond_the_context_is_refused_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(Script(entry={"max_model_len": 8192})) as script:
        assert call(tmp_path, "--url", script.url, "--depths", "0,9000") == 2
        assert script.asked == []
    assert "9,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--depths", "0,x"), "'0,x' is no list of depths"),
        (("--depths", ""), "is no list of depths"),
        (("--depths", "-1"), "is no list of depths"),
        (("--name", "a", "--url", ":1"), "either --name or --url"),
        (("--url", "word"), "no address of a server"),
        (("--name", "nope"), "no server is called 'nope'"),
        ((), "no server is running"),
        (("--repeat", "0"), "--repeat"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    argv: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, *argv) == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_an_interrupt_shows_what_is_there_and_keeps_no_file(
    other_kind: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    yields(monkeypatch, sample(5.0), KeyboardInterrupt())
    assert call(tmp_path, "--url", other_kind.url, "--json") == 130
    data = json.loads(capsys.readouterr().out)
    assert data["ended"] == "interrupted"
    assert data["saved"] is None
    assert data["not_saved"] == "it did not come to its end"
    assert data["speeds"][0]["decode_tokens_per_second"]["median"] == 5.0
    assert not (tmp_path / "profiles").exists()


def test_a_real_ctrl_c_in_the_middle_of_an_answer_ends_in_time(tmp_path: Path) -> None:
    with answering(Script(chunks=[*WORDS, {"choices": [], "usage": USAGE}] * 500, pause=0.05)) as script:
        environ = os.environ | {"XDG_STATE_HOME": str(tmp_path), "KIMIGGUF_PROFILES": str(tmp_path / "profiles")}
        with subprocess.Popen(
            [sys.executable, "-m", "kimigguf", "bench", "--url", script.url, "--json"],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert until(lambda: bool(script.asked), seconds=60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["ended"] == "interrupted"
    assert not (tmp_path / "profiles").exists()


@pytest.mark.usefixtures("here")
def test_a_server_that_dies_costs_what_is_left_and_not_what_was_measured(
    other_kind: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = ServerError("the answer broke off", code="answer-broke-off")
    yields(monkeypatch, sample(5.0), died)
    assert call(tmp_path, "--url", other_kind.url) == 6
    out, err = capsys.readouterr()
    assert "5.0" in out
    assert "not kept: it did not come to its end" in out
    assert "the answer broke off" in err
    yields(monkeypatch, died)
    assert call(tmp_path, "--url", other_kind.url) == 6
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("here")
def test_figures_that_cannot_be_kept_are_shown_all_the_same(
    other_kind: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiles").touch()
    yields(monkeypatch, sample(5.0))
    assert call(tmp_path, "--url", other_kind.url) == 3
    out, err = capsys.readouterr()
    assert "5.0" in out
    assert "not kept: cannot write to" in out
    assert "cannot-write" in err


def test_no_two_figures_of_memory_have_one_label() -> None:
    """What the process holds and what the engine says it laid out on the host are not the same."""
    tree = TreeUse(resident_bytes=3 << 20, anonymous_bytes=1 << 20, file_bytes=2 << 20)
    report: Any = SimpleNamespace(
        peaks=Peaks(tree=tree, cgroup_bytes=4 << 20),
        loaded=(("Host", Columns(model_bytes=1, context_bytes=1, compute_bytes=1)),),
    )
    lines = list(bench_show._memory(report))
    assert len({line.split(":")[1] for line in lines}) == len(lines) == 3


@pytest.mark.usefixtures("here")
def test_nothing_but_rejected_replies_is_answered_with_no(
    other_kind: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = Rejected(depth_tokens=0, warmth=Warmth.COLD, reason="1 generated: a rate needs 2 tokens or more")
    yields(monkeypatch, rejected, rejected)
    assert call(tmp_path, "--url", other_kind.url) == 1
    out = capsys.readouterr().out
    assert "rejected: depth 0, cold (2 times): 1 generated" in out
    assert "not kept: nothing was measured" in out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_the_table_is_whole_at_any_width(
    width: str, other_kind: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("NO_COLOR", "1")
    rates = (103.25, 1234.5, 98.0)
    yields(
        monkeypatch,
        *(sample(rate, depth=131072, first_token_seconds=rate) for rate in rates),
        *(sample(rate / 1000, Warmth.WARM, 131072, cached_tokens=131648) for rate in rates),
    )
    assert call(tmp_path, "--url", other_kind.url) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    table = out[out.index("Depth") : out.index("medians of 3")]
    if int(width) >= 80:
        assert "…" not in table
        assert "103 (98-1234)" in table
        assert "0.1 (0.1-1.2)" in table
    assert ("131,648" in table) == (int(width) >= 100)
    assert "medians of 3, with the lowest and highest, by the server's own clock" in " ".join(out.split())
