"""``kimigguf plan --format``: stdout is the file and nothing else, and what the file cannot say is told."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.certificates import make
from fakes.engine import mainline, write_engine
from fakes.hub import serve as serve_hub

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.plan_export import FORMATS
from kimigguf.cli.show import Show
from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Accelerator, Machine, MemoryKind, Ram
from kimigguf.units import GIB

MACHINE = "epyc-768g-rtx-pro-6000"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    engine = write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    return {
        "PATH": "",
        "KIMIGGUF_LLAMA_SERVER": str(engine),
        "KIMIGGUF_MODELS": str(tmp_path / "models"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }


def plan(environ: dict[str, str], *argv: str) -> int:
    return run(["plan", *argv], App(show=Show(), environ=environ))


def refused(capsys: pytest.CaptureFixture[str], environ: dict[str, str], *argv: str) -> tuple[int, str]:
    """Exit code and what stderr says of a request that leaves stdout empty."""
    code = plan(environ, *argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


@pytest.mark.parametrize(
    ("form", "first"),
    [
        ("systemd", "# kimi-k3 in /"),
        ("preset", "; kimi-k3 in /"),
        ("docker", "#!/bin/sh"),
        ("env", "# kimi-k3 in /"),
        ("shell", "#!/bin/sh"),
    ],
)
def test_stdout_is_the_file_and_what_to_do_with_it_stands_on_stderr(
    form: str, first: str, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (str(tiny()), "--context", "4096", "--port", "9000", "--format", form, "--", "--threads", "3")
    assert plan(environ, *argv) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(first)
    assert captured.out.endswith("\n")
    assert "\x1b" not in captured.out
    assert "9000" in captured.out
    assert captured.err.count("note: ") == len(captured.err.splitlines())
    remake = f"kimigguf plan {tiny()} --context 4096 --port 9000 --format {form} -- --threads 3"
    assert remake in captured.out
    assert remake in captured.err
    for note in captured.err.splitlines():
        if ": to " in note:  # what is to be pasted is all that follows
            subprocess.run(["sh", "-n", "-c", note.split(": ", 2)[2]], check=True)
    assert "note: it answers at http://127.0.0.1:9000/v1" in captured.err
    first_shard = min(tiny().glob("*.gguf")).name
    assert first_shard in captured.out


def test_every_format_says_the_same_plan(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for form in FORMATS:
        assert plan(environ, str(tiny()), "--context", "5120", "--slots", "2", "--format", form) == 0
        texts.append(capsys.readouterr().out)
    assert all("5120" in text and "effort" in text for text in texts)


def test_a_file_and_an_answer_cannot_both_be_had(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ("--json", "--explain", "--verbose"):
        code, said = refused(capsys, environ, str(tiny()), "--format", "env", other)
        assert (code, "format-and-answer" in said) == (2, True)


def test_what_does_not_fit_leaves_stdout_empty_and_says_so(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = refused(capsys, environ, "UD-IQ1_M", "--machine", "laptop-64g", "--format", "systemd")
    assert code == 1
    assert "does not fit" in said


def test_a_plan_without_files_is_no_file_and_the_hint_brings_them(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = refused(capsys, environ, "UD-IQ1_M", "--machine", MACHINE, "--format", "shell")
    assert code == 2
    line = f"kimigguf download UD-IQ1_M && kimigguf plan UD-IQ1_M --machine {MACHINE} --format shell"
    assert f"try: {line}\n" in said
    assert "FIRST_SHARD" not in said
    code, said = refused(capsys, environ, "UD-IQ1_M", "--machine", MACHINE, "--models-dir", "m", "--format", "shell")
    assert "try: kimigguf download UD-IQ1_M --models-dir m && kimigguf plan UD-IQ1_M " in said


def test_a_file_for_another_machine_can_be_had_before_the_download(
    tmp_path: Path, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    repository = load_model().repository
    assert repository.id is not None
    assert repository.commit is not None
    shutil.copytree(tiny("UD-IQ1_M"), tmp_path / "hub" / repository.id / "UD-IQ1_M")
    with serve_hub(tmp_path / "hub", commit=repository.commit) as hub:
        argv = ("UD-IQ1_M", "--hub", "--machine", MACHINE, "--models-dir", "/data/models", "--format", "systemd")
        assert plan(environ | {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": str(tmp_path / "cache")}, *argv) == 0
    captured = capsys.readouterr()
    folder = f"/data/models/{repository.id.replace('/', '--')}/UD-IQ1_M/{repository.commit[:12]}"
    first_shard = min(path.name for path in tiny("UD-IQ1_M").glob("*.gguf"))
    assert f"{folder}/{first_shard}" in captured.out
    assert "kimigguf download UD-IQ1_M --models-dir /data/models" in captured.err


def test_a_plan_for_accelerators_that_the_engine_lacks_is_no_file(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = ("--machine", MACHINE, "--engine-path", environ["KIMIGGUF_LLAMA_SERVER"], "--format", "shell")
    code, said = refused(capsys, environ, str(tiny()), *lacking)
    assert (code, "engine-lacks-devices" in said) == (3, True)
    assert "the engine sees 0" in said


def test_an_open_address_needs_a_key_and_the_hint_makes_one(
    tmp_path: Path, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = refused(capsys, environ, str(tiny()), "--host", "0.0.0.0", "--format", "systemd")
    assert code == 2
    make = said.partition("try: ")[2].partition(" and add ")[0]
    subprocess.run(["sh", "-c", make], cwd=tmp_path, check=True)
    key = tmp_path / "k3.key"
    assert key.stat().st_mode & 0o077 == 0
    assert plan(environ, str(tiny()), "--host", "0.0.0.0", "--api-key-file", str(key), "--format", "systemd") == 0
    unit = capsys.readouterr().out
    assert f"LoadCredential=api-key:{key}" in unit
    assert key.read_text().strip() not in unit


def test_an_engine_that_has_no_command_line_is_refused_by_name_and_replaced_where_nobody_named_it(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = environ | {"KIMIGGUF_LLAMA_SERVER": ""}
    code, said = refused(capsys, bare, str(tiny()), "--engine", "embedded", "--format", "env")
    assert (code, "format-needs-llama-server" in said) == (2, True)
    assert plan(bare, str(tiny()), "--context", "4096", "--format", "shell") == 0
    captured = capsys.readouterr()
    assert "exec llama-server \\\n" in captured.out
    assert "there is no llama-server on this machine" in captured.err


def test_what_would_undo_the_plan_is_refused_here_as_it_is_by_serve(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = refused(capsys, environ, str(tiny()), "--format", "shell", "--", "-ngl", "99")
    assert (code, "flag-undoes-plan" in said) == (2, True)


def test_which_gpus_the_engine_sees_goes_into_the_file(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without it the plan's first device would be another card."""
    gpu = Accelerator(name="NVIDIA RTX PRO 6000", memory_kind=MemoryKind.DISCRETE, total_bytes=96 * GIB)
    here = Machine(name=THIS_MACHINE, source=DETECTED, ram=Ram(total_bytes=64 * GIB), accelerators=(gpu,), disks=())
    monkeypatch.setattr("kimigguf.hardware.detect.detect", lambda **_: here)
    devices = "Available devices:\n  CUDA0: NVIDIA RTX PRO 6000 (98304 MiB, 97000 MiB free)\n"
    engine = write_engine(Path(environ["KIMIGGUF_LLAMA_SERVER"]), version=mainline(11434), devices=devices)
    seen = environ | {"KIMIGGUF_LLAMA_SERVER": str(engine), "CUDA_VISIBLE_DEVICES": "3"}
    wanted = {
        "systemd": "Environment=CUDA_VISIBLE_DEVICES=3",
        "docker": "--env CUDA_VISIBLE_DEVICES=3",
        "env": "\nCUDA_VISIBLE_DEVICES=3\n",
        "shell": "export CUDA_VISIBLE_DEVICES=3\n",
        "preset": "; Start: CUDA_VISIBLE_DEVICES=3 ",
    }
    for form, words in wanted.items():
        assert plan(seen, str(tiny()), "--context", "4096", "--format", form) == 0
        out = capsys.readouterr().out
        assert words in out
        assert "CUDA0" in out


def test_a_described_machine_s_devices_are_named_as_llama_cpp_names_them(
    tmp_path: Path, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """An AMD machine's file must not ask for CUDA."""
    machine = tmp_path / "amd.toml"
    machine.write_text(
        'name = "amd"\nsource = "test"\n[ram]\ntotal_bytes = "64GiB"\n[[accelerators]]\nname = "Radeon"\n'
        'backend = "rocm"\nmemory_kind = "discrete"\ntotal_bytes = "48GiB"\n'
    )
    bare = environ | {"KIMIGGUF_LLAMA_SERVER": ""}
    assert plan(bare, str(tiny()), "--machine", str(machine), "--context", "4096", "--format", "docker") == 0
    out = capsys.readouterr().out
    assert "server-rocm" in out
    assert "--device ROCm0" in out


def test_the_plan_s_own_command_takes_the_same_wishes(
    environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(environ, str(tiny()), "--port", "9000", "--json", "--", "--threads", "3") == 0
    argv = json.loads(capsys.readouterr().out)["command"]["argv"]
    assert argv[argv.index("--port") + 1] == "9000"
    assert argv[-2:] == ["--threads", "3"]


def test_tls_files_are_tried_and_named_as_any_folder_can(
    tmp_path: Path, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A unit runs in another folder than the one that it was planned in."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    argv = (str(tiny()), "--context", "4096", "--format")
    half = ("--", "--ssl-key-file", "server.key.pem")
    assert refused(capsys, environ, *argv, "systemd", *half)[0] == 2
    missing = refused(capsys, environ, *argv, "systemd", *half, "--ssl-cert-file", "none.pem")
    assert "tls-unusable" in missing[1]
    for form in FORMATS:
        assert plan(environ, *argv, form, *half, "--ssl-cert-file", "server.pem") == 0
        captured = capsys.readouterr()
        assert str(tmp_path / "server.pem") in captured.out
        assert "https://127.0.0.1:8080/v1" in captured.err


def test_links_are_not_handed_to_a_container_that_cannot_follow_them(
    tmp_path: Path, environ: dict[str, str], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in tiny().glob("*.gguf"):
        (links / path.name).symlink_to(path)
    code, said = refused(capsys, environ, str(links), "--context", "4096", "--format", "docker")
    assert (code, f"kimigguf import {links}" in said) == (2, True)
    assert plan(environ, str(links), "--context", "4096", "--format", "shell") == 0
