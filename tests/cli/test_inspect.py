"""``kimigguf inspect``, as a user meets it."""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hardware.captures import HANG, Loader, load
from hardware.nvml_stand_in import NvmlStandIn
from rich.console import Console

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli import inspect
from kimigguf.cli.app import App, run
from kimigguf.cli.inspect import Picture, draw, report
from kimigguf.cli.show import Show
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.errors import MachineError
from kimigguf.events import Listener, Step
from kimigguf.hardware import detect as detect_room
from kimigguf.hardware.host import Host
from kimigguf.hardware.machines import load_file, load_machine, machine_names
from kimigguf.hardware.measure import disk_of, takes_direct_io
from kimigguf.hardware.snapshot import Disk, Machine, NumaNode, Ram, Unknown
from kimigguf.ollama.server import OllamaServer

ENVIRON = {"PATH": "/usr/bin:/bin", "OLLAMA_HOST": "127.0.0.1:9"}
ENGINE = FoundEngine(
    kind=EngineKind.LLAMA_SERVER,
    path="/home/alice/llama.cpp/build/bin/llama-server",
    version="b11434",
    build=11434,
    supports_k3=True,
    backends=("cpu", "cuda"),
)
OLLAMA = OllamaServer(
    url="http://10.1.2.3:11434", reachable=True, version="0.35.0", supports_k3=True, local=False, reason="answered"
)


def screen(picture: Picture, *, verbose: bool = False) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115 -- closed below
    draw(picture, console, verbose=verbose)
    console.file.close()
    return console.export_text()


@pytest.fixture
def capture(tmp_path: Path) -> Loader:
    return lambda name: load(name, tmp_path / name)


def machine_of(capture: Loader, name: str, nvml: str) -> Machine:
    return detect_room.detect(host=capture(name), nvml=lambda: NvmlStandIn.load(nvml))


@pytest.mark.parametrize("name", machine_names({}))
def test_the_first_screen_fits_80_by_24_for_every_machine(name: str) -> None:
    picture = Picture(machine=load_machine(name, {}), engines=(ENGINE,) * 3, ollama=OLLAMA)
    lines = screen(picture).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_worst_machine_still_fits(capture: Loader) -> None:
    machine = machine_of(capture, "disks", "8-unequal")
    nodes = tuple(NumaNode(index=index, total_bytes=2**36) for index in range(8))
    machine = replace(machine, ram=Ram(numa=nodes), system="Linux", notices=("a " * 60, "b " * 60, "c " * 60))
    picture = Picture(machine=machine, engines=(ENGINE,) * 9, ollama=OLLAMA, problems=("engines: no answer",))
    text = screen(picture)
    assert len(text.splitlines()) <= 24
    assert re.search(r"NVIDIA A100|and 3 more", text)
    assert "and 8 more" in text
    assert "and 6 more" in text
    assert "NVIDIA GeForce RTX 5090" in text
    assert "4 notes" in text
    whole = screen(picture, verbose=True)
    assert "more; see" not in whole
    assert whole.count("c c c") > 0
    assert whole.count("llama-server · build") == 9


def test_a_note_is_whole_where_the_screen_has_room_for_it() -> None:
    """What to do about it stands at its end."""
    notice = "the engine is built without what this CPU has, and so is slower than it need be; build it on this machine"
    machine = replace(load_machine("8x-b200", {}), notices=(notice,), unknown=())
    text = screen(Picture(machine=machine, engines=(ENGINE,), ollama=OLLAMA))
    assert notice in " ".join(text.split())


@pytest.mark.parametrize(
    ("unknown", "notices", "words"),
    [
        (1, 1, "1 fact unknown, 1 note; the whole"),
        (2, 0, "2 facts unknown; the whole"),
        (0, 3, "3 notes; the whole"),
    ],
)
def test_what_is_left_out_is_counted_in_words_that_agree(unknown: int, notices: int, words: str) -> None:
    missing = tuple(Unknown(what=f"fact {index}", reason="nobody says") for index in range(unknown))
    machine = replace(load_machine("8x-b200", {}), notices=("a note",) * notices, unknown=missing)
    assert words in screen(Picture(machine=machine, engines=(ENGINE,), ollama=OLLAMA))


def test_an_engine_that_did_not_answer_is_unknown_and_not_none() -> None:
    text = screen(Picture(machine=load_machine("8x-b200", {}), engines=None, ollama=None))
    assert re.search(r"Engine\s+unknown", text)
    assert re.search(r"Ollama\s+unknown", text)


def test_equal_cards_are_one_line(capture: Loader) -> None:
    text = screen(Picture(machine=machine_of(capture, "vm-v1-no-limit", "8x-b200"), engines=(), ollama=None))
    assert "8 x NVIDIA B200 · 179.1 GiB each" in text


def test_verbose_says_why_each_fact_is_unknown(capture: Loader) -> None:
    picture = Picture(machine=machine_of(capture, "vm-v1-no-limit", "no-permission"), engines=(), ollama=None)
    text = " ".join(screen(picture, verbose=True).split())
    assert "accelerators.1.total_bytes: NVML: Insufficient Permissions" in text
    assert "sudo dmidecode -t memory" in text


def test_a_report_names_no_user_host_serial_or_address(capture: Loader) -> None:
    machine = machine_of(capture, "disks", "rtx-3090-busy")
    machine = replace(
        machine,
        disks=(*(machine.disks or ()), Disk(mount="/home/alice/models", device="nas.example.org:/export")),
        notices=("CUDA_VISIBLE_DEVICES=GPU-11111111-2222-3333-4444-555555555555 leaves 1 of 1 GPUs", "fe80::1ff:2 x"),
    )
    text = report(Picture(machine=machine, engines=(ENGINE,), ollama=OLLAMA, problems=("http://box.lan:1/x failed",)))
    for private in ("alice", "bob", "example.org", "10.1.2.3", "192.0.2.7", "11111111", "box.lan", "fe80"):
        assert private not in text
    assert "NVIDIA GeForce RTX 3090" in text
    assert "Samsung SSD 990 PRO 4TB" in text
    assert "build 11434" in text


def test_json_has_the_machine_the_engines_and_ollama(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert run(["inspect", "--json"], App(show=Show(), environ=ENVIRON)) == 0
    assert time.monotonic() - started < 2.5
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "kimigguf.inspect/1"
    assert isinstance(data["machine"]["ram"]["total_bytes"], int)
    assert data["machine"]["source"] == "detected"
    assert data["ollama"]["reachable"] is False
    assert isinstance(data["engines"], list)
    assert all(set(one) == {"what", "reason"} for one in data["machine"]["unknown"])


def test_a_saved_machine_is_what_was_seen_and_is_not_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "box.toml"
    assert run(["inspect", "--json", "--save", str(path)], App(show=Show(), environ=ENVIRON)) == 0
    seen = json.loads(capsys.readouterr().out)["machine"]
    saved = load_file(path)
    assert saved.ram.total_bytes == seen["ram"]["total_bytes"]
    assert saved.ram.available_bytes == seen["ram"]["available_bytes"]
    before = path.read_text()
    assert run(["inspect", "--save", str(path)], App(show=Show(), environ=ENVIRON)) == 2
    assert "file-exists" in capsys.readouterr().err
    assert path.read_text() == before
    assert run(["inspect", "--save", str(path), "--force", "--quiet"], App(show=Show(), environ=ENVIRON)) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_report_is_markdown_on_stdout_and_a_string_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--report"], App(show=Show(), environ=ENVIRON)) == 0
    assert capsys.readouterr().out.startswith("**kimigguf ")
    assert run(["inspect", "--report", "--json"], App(show=Show(), environ=ENVIRON)) == 0
    assert json.loads(capsys.readouterr().out)["markdown"].startswith("**kimigguf ")


def test_an_engine_or_ollama_that_hangs_costs_its_own_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "llama-server"
    engine.write_text("#!/bin/sh\nsleep 60\n")
    engine.chmod(0o755)
    monkeypatch.setattr("kimigguf.engines.discover.discover", lambda _environ: HANG.wait())
    monkeypatch.setattr("kimigguf.ollama.server.look", lambda _environ: HANG.wait())
    app = App(show=Show(), environ=ENVIRON | {"PATH": str(tmp_path)})
    started = time.monotonic()
    picture = inspect.look(app, 0.5)
    assert time.monotonic() - started < 1.5
    assert [(one.path, one.supports_k3) for one in picture.engines or ()] == [(str(engine), None)]
    assert picture.ollama is None
    assert picture.machine.ram.total_bytes is not None
    assert picture.problems == (
        "engines: no answer within 0.55 s",
        "ollama: no answer within 0.55 s",
        "kimigguf inspect --wait 10 gives what was slow more time",
    )


_HUNG = """
import sys, time, pynvml
pynvml.nvmlInit = lambda: time.sleep(60)
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
sys.exit(run(["inspect", "--json"], App(show=Show(), environ={"PATH": sys.argv[1], "OLLAMA_HOST": "127.0.0.1:9"})))
"""


def test_the_disk_of_the_models_folder_says_whether_it_takes_o_direct(tmp_path: Path) -> None:
    picture = inspect.look(App(show=Show(), environ=ENVIRON | {"KIMIGGUF_MODELS": str(tmp_path / "not" / "there")}), 5)
    expected = takes_direct_io(tmp_path)
    index = disk_of(picture.machine.disks, tmp_path.resolve())
    assert index is not None
    assert (picture.machine.disks or ())[index].direct_io == expected
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_although_the_driver_and_the_engine_hang(tmp_path: Path) -> None:
    engine = tmp_path / "llama-server"
    engine.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 20\n")
    engine.chmod(0o755)
    argv = [sys.executable, "-c", _HUNG, f"{tmp_path}:/usr/bin:/bin"]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert time.monotonic() - started < 6, "1.5 s on an idle machine"
    data = json.loads(done.stdout)
    assert data["machine"]["ram"]["total_bytes"]
    assert "accelerators.nvidia" in [one["what"] for one in data["machine"]["unknown"]]
    assert data["engines"][0]["reason"] == "it did not answer in time"
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        assert left.status() == psutil.STATUS_ZOMBIE, "the hung engine is ended with the command"


def test_measured_rates_are_saved_with_their_date_and_a_failure_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(machine: Machine, *, host: Host, listen: Listener) -> Machine:
        listen(Step(text="reading"))
        return replace(machine, ram=replace(machine.ram, read_bytes_per_second=123_456_789_000))

    def disk(machine: Machine, *, folder: Path, listen: Listener) -> Machine:
        raise MachineError(f"{folder} cannot be measured", code="disk-not-measurable", cause="Read-only file system")

    monkeypatch.setattr("kimigguf.hardware.measure.measure_memory", memory)
    monkeypatch.setattr("kimigguf.hardware.measure.measure_disk", disk)
    path = tmp_path / "box.toml"
    argv = ["inspect", "--measure", "--models-dir", str(tmp_path / "m"), "--save", str(path), "--json"]
    assert run(argv, App(show=Show(), environ=ENVIRON)) == 0
    data = json.loads(capsys.readouterr().out)
    assert any("cannot be measured: Read-only file system" in problem for problem in data["problems"])
    saved = load_file(path)
    assert saved.ram.read_bytes_per_second == 123_456_789_000
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", saved.measured_on or "")
    started = time.monotonic()
    monkeypatch.setattr("kimigguf.hardware.measure.measure_memory", lambda *_a, **_k: pytest.fail("measured in vain"))
    assert run(argv, App(show=Show(), environ=ENVIRON)) == 2
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epyc-768g-rtx-pro-6000", "this machine can hold UD-IQ2_XXS; see kimigguf recommend"),
        ("laptop-64g", "this machine holds no quant of Kimi K3; see kimigguf recommend"),
    ],
)
def test_the_last_line_is_the_verdict_that_recommend_gives(name: str, said: str) -> None:
    assert inspect.verdict(load_model(environ={}), load_machine(name, {})) == said


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--help"], App(show=Show(), environ=ENVIRON)) == 0
    assert "kimigguf inspect --save box.toml" in capsys.readouterr().out
