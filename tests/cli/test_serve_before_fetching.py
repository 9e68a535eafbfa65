"""What serve knows of a quant that is not here, it says before the download: half a terabyte is long to be told no."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_k3
from fakes.catalogue import without_facts
from fakes.hub import Hub, serve
from fakes.processes import free_port

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Machine, Ram
from kimigguf.units import GIB

QUANT = "UD-IQ1_M"
pytestmark = pytest.mark.engine


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    repository = load_model().repository
    assert repository.id is not None
    assert repository.commit is not None
    tiny_k3.write(tmp_path / "hub" / repository.id / QUANT, quant=QUANT)
    with serve(tmp_path / "hub", commit=repository.commit) as running:
        yield running


def serve_it(hub: Hub, folder: Path, *options: str, engine: str = "embedded") -> int:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
        "KIMIGGUF_MODELS": str(folder / "models"),
        "HF_ENDPOINT": hub.url,
        **without_facts(folder),
    }
    words = ["serve", QUANT, "--engine", engine, "--port", str(free_port()), *options]
    return run(words, App(show=Show(), environ=environ))


def weights(folder: Path) -> list[Path]:
    return [path for path in (folder / "models").rglob("*") if ".gguf" in path.name]


def test_a_quant_that_does_not_fit_is_refused_before_a_weight_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Machine(name=THIS_MACHINE, source=DETECTED, ram=Ram(total_bytes=4 * GIB), accelerators=(), disks=())
    monkeypatch.setattr("kimigguf.engines.planned.detect", lambda **_: small)
    assert serve_it(hub, tmp_path, "--json") == 1
    assert "RAM would have to hold" in capsys.readouterr().out
    assert weights(tmp_path) == []


def test_a_dry_run_shows_the_command_and_fetches_no_weight(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_it(hub, tmp_path, "--json", "--dry-run") == 0
    answer = json.loads(capsys.readouterr().out)
    files = next(check for check in answer["checks"] if check["what"] == "files")
    assert files["state"] == "unknown"
    assert "a start fetches them first" in files["evidence"]
    assert files["hint"] == f"kimigguf download {QUANT}"
    (plan,) = (Path(word) for word in answer["command"] if word.endswith(".plan.json"))
    assert json.loads(plan.read_text())["model"]["folder"].startswith(str(tmp_path / "models")), "where they would lie"
    assert weights(tmp_path) == []


@pytest.mark.native
def test_an_option_that_the_engine_does_not_have_is_refused_before_a_weight_is_fetched(
    hub: Hub, tmp_path: Path, native_bin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--engine-path", str(native_bin), "--", "--bogus")
    assert serve_it(hub, tmp_path, *options, engine="llama-server") == 2
    assert "--bogus" in capsys.readouterr().err
    assert weights(tmp_path) == []
