import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.ollama import serve
from fakes.ollama_store import Ollama

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode
from kimigguf.ollama import storage


@pytest.fixture(autouse=True)
def no_other_ollama(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ollama that happens to be installed here must not decide what the tests see."""
    monkeypatch.setattr(storage, "_from_process", lambda: None)
    monkeypatch.setattr(storage, "_from_unit", lambda: None)
    monkeypatch.setattr(storage, "_SERVICE_MODELS", Path("/nonexistent"))


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Ollama]:
    with serve(tmp_path / "models") as server:
        yield server


@pytest.fixture
def call(stand_in: Ollama, tmp_path: Path) -> Callable[..., int]:
    environ = {
        "OLLAMA_HOST": stand_in.url,
        "OLLAMA_MODELS": str(stand_in.folder),
        "KIMIGGUF_MODELS": str(tmp_path / "sets"),
    }
    return lambda *arguments: run(["ollama-register", *arguments], App(show=Show(), environ=environ))


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny K3 of this test's own, so that files may be laid beside it."""
    own = tmp_path / "UD-IQ1_M"
    own.mkdir()
    for path in tiny("UD-IQ1_M").glob("*.gguf"):
        (own / path.name).write_bytes(path.read_bytes())
    return own


def error_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    shown = capsys.readouterr()
    assert shown.out == ""
    found: dict[str, Any] = json.loads(shown.err.splitlines()[-1])
    assert found["schema"] == "kimigguf.error/1"
    return found


def test_a_middle_shard_registers_the_whole_set_and_proves_it(
    call: Callable[..., int], stand_in: Ollama, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middle = sorted(folder.glob("*.gguf"))[2]
    assert call(str(middle)) == ExitCode.DONE
    shown = capsys.readouterr()
    assert "ollama run kimi-k3:ud-iq1_m" in shown.out
    assert "answered 'Hello.', 40.0 tokens/s" in shown.out
    assert "PASSED   version" in shown.err
    model = stand_in.models()["kimi-k3:ud-iq1_m"]
    assert sum(layer["mediaType"].endswith(".model") for layer in model["layers"]) == len(list(folder.glob("*.gguf")))
    assert len(stand_in.chats) == 2


def test_the_json_answer_holds_plan_and_proof(
    call: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(folder), "--name", "mine", "--context", "4096", "--copy", "--json") == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["name"], answer["quant"]) == ("kimigguf.ollama-register/1", "mine", "UD-IQ1_M")
    assert (answer["registered"], answer["blocking"]) == (True, None)
    assert answer["parameters"]["num_ctx"] == 4096
    assert answer["disk"]["peak_bytes"] == answer["size_bytes"]
    assert answer["proof"]["turns"][0]["content"] == "Hello."
    assert answer["run"] == "ollama run mine"
    assert answer["snippets"]["systemd"].startswith("[Service]\n")
    assert all("LLAMA_ARG_CACHE_RAM" in text for text in answer["snippets"].values())


def test_a_dry_run_writes_nothing_and_shows_disk_modelfile_and_environment(
    call: Callable[..., int], stand_in: Ollama, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.version = "0.34.0"
    assert call(str(folder), "--dry-run") == ExitCode.DONE
    out = capsys.readouterr().out
    assert "at the peak" in out
    assert f"FROM {folder}\n" in out
    assert "PARAMETER temperature 1.0" in out
    assert "LICENSE" in out
    assert 'Environment="LLAMA_ARG_CACHE_RAM=1024"' in out
    assert "no options of Ollama" in out
    assert "nothing was written" in out
    assert not any(method != "GET" and "blobs" not in path for method, path in stand_in.requests)
    assert stand_in.used_bytes() == 0


def test_a_quant_that_is_not_here_can_be_planned_and_is_not_registered(
    call: Callable[..., int], stand_in: Ollama, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.version = "0.34.0"
    assert call("iq1_s", "--dry-run", "--json") == ExitCode.ANSWERED_NO
    answer = json.loads(capsys.readouterr().out)
    assert (answer["name"], answer["blocking"]) == ("kimi-k3:ud-iq1_s", "not-downloaded")
    assert (answer["ways"][0]["route"], answer["ways"][0]["need"]["peak_bytes"]) == ("shards", 2 * 594_040_923_616)
    assert answer["disk"]["peak_bytes"] == 594_040_923_616
    assert call("iq1_s", "--json") == ExitCode.INTEGRITY
    error = error_of(capsys)
    assert error["hint"] == "kimigguf download UD-IQ1_S"
    assert error["cause"].startswith("nothing of it lies in ")


def test_a_quant_of_the_fork_is_refused_with_what_could_run_it(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("UD-TQ1_0", "--json") == ExitCode.USAGE
    error = error_of(capsys)
    assert error["code"] == "quant-unsupported"
    assert "UD-IQ1_S" in error["hint"]


def everything(*folders: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_size) for folder in folders for path in folder.rglob("*") if not path.is_dir()}


def too_old(stand_in: Ollama, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.version = "0.30.1"


def no_room(stand_in: Ollama, _folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.version = "0.34.0"
    monkeypatch.setattr("kimigguf.ollama.storage.shutil.disk_usage", lambda _path: SimpleNamespace(free=1 << 20))


def elsewhere(_stand_in: Ollama, _folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.ollama.server.is_local", lambda _url: False)


def name_taken(stand_in: Ollama, _folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"digest": stand_in.add_blob(b'{"model_family": "llama"}'), "size": 25}
    path = stand_in.manifest_path("kimi-k3:ud-iq1_m")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"layers": [], "config": config}))


def hugging_face_cache(_stand_in: Ollama, folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = folder.parent / "hub-blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.glob("*.gguf"))):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(blobs / f"{number:064x}")


def projector(_stand_in: Ollama, folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")


def closed_file(_stand_in: Ollama, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything: what the system would say to another user."""
    victim = sorted(folder.glob("*.gguf"))[1]
    real = os.access
    monkeypatch.setattr("kimigguf.ollama.find.os.access", lambda path, mode: path != victim and real(path, mode))


@pytest.mark.parametrize(
    ("prepare", "code", "exit_code", "way_out"),
    [
        (too_old, "ollama-too-old", ExitCode.MACHINE, "install.sh"),
        (no_room, "ollama-no-space", ExitCode.MACHINE, "--ollama-api"),
        (elsewhere, "ollama-remote", ExitCode.MACHINE, "on the machine where Ollama runs"),
        (name_taken, "name-taken", ExitCode.USAGE, "--name"),
        (hugging_face_cache, "symlinked-shards", ExitCode.USAGE, "kimigguf import"),
        (projector, "projector-among-shards", ExitCode.USAGE, "mv "),
        (closed_file, "unreadable-shard", ExitCode.MACHINE, "sudo chmod a+r"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_must_not_be_is_refused_with_a_way_out_before_anything_is_written(
    *,
    call: Callable[..., int],
    stand_in: Ollama,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Ollama, Path, pytest.MonkeyPatch], None],
    code: str,
    exit_code: ExitCode,
    way_out: str,
) -> None:
    prepare(stand_in, folder, monkeypatch)
    before = everything(stand_in.folder, folder.parent)
    assert call(str(folder), "--json") == exit_code
    error = error_of(capsys)
    assert error["code"] == code
    assert way_out in error["hint"]
    assert everything(stand_in.folder, folder.parent) == before
    assert not any(method == "POST" for method, _ in stand_in.requests)


def test_a_middle_shard_without_the_others_is_refused_and_with_them_is_the_set(
    call: Callable[..., int], stand_in: Ollama, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middle = sorted(folder.glob("*.gguf"))[2]
    assert call(str(middle), "--dry-run", "--json") == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)["files"]) == 5
    for path in folder.glob("*.gguf"):
        if path != middle:
            path.unlink()
    assert call(str(middle), "--json") == ExitCode.INTEGRITY
    assert error_of(capsys)["hint"]
    assert stand_in.used_bytes() == 0


def test_a_missing_shard_is_an_integrity_error(
    call: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sorted(folder.glob("*.gguf"))[3].unlink()
    assert call(str(folder), "--json") == ExitCode.INTEGRITY
    assert "00004-of" in error_of(capsys)["message"]


def test_a_taken_name_needs_force(call: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(folder), "--quiet") == ExitCode.DONE
    assert call(str(folder), "--json") == ExitCode.USAGE
    assert "--force" in error_of(capsys)["hint"]
    assert call(str(folder), "--force", "--quiet") == ExitCode.DONE


def test_check_proves_again_and_remove_removes(
    call: Callable[..., int], stand_in: Ollama, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(folder), "--quiet") == ExitCode.DONE
    assert call("--check", "kimi-k3:ud-iq1_m", "--json") == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], len(answer["proof"]["turns"])) == ("kimigguf.ollama-check/1", 2)
    stand_in.content = stand_in.thinking = ""
    assert call("--check", "kimi-k3:ud-iq1_m") == ExitCode.ANSWERED_NO
    capsys.readouterr()
    assert call("--remove", "kimi-k3:ud-iq1_m", "--json") == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["schema"] == "kimigguf.ollama-remove/1"
    assert stand_in.used_bytes() == 0
    assert call("--check", "kimi-k3:ud-iq1_m", "--json") == ExitCode.USAGE
    assert error_of(capsys)["code"] == "no-such-model"


def test_a_load_that_fails_after_registering_is_exit_6(
    call: Callable[..., int], stand_in: Ollama, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.load_error = "model requires more system memory (650.1 GiB) than is available (251.2 GiB)"
    assert call(str(folder), "--json") == ExitCode.SERVER
    shown = capsys.readouterr()
    assert json.loads(shown.err.splitlines()[-1])["code"] == "ollama-load-failed"
    assert "kimi-k3:ud-iq1_m" in stand_in.models()


@pytest.mark.parametrize(
    "arguments", [[], ["UD-IQ1_S", "--check", "x"], ["nosuchquant"], ["UD-IQ1_S", "--context", "2000000"], ["/no/such"]]
)
def test_bad_arguments_are_exit_2(call: Callable[..., int], arguments: list[str]) -> None:
    assert call(*arguments) == ExitCode.USAGE


def test_no_server_is_exit_3_with_the_command_that_starts_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ollama").touch(mode=0o755)
    app = App(show=Show(), environ={"OLLAMA_HOST": "127.0.0.1:9", "PATH": str(tmp_path / "bin")})
    assert run(["ollama-register", str(folder), "--json"], app) == ExitCode.MACHINE
    assert error_of(capsys)["hint"] == "ollama serve"
    app = App(show=Show(), environ={"OLLAMA_HOST": "127.0.0.1:9"})
    assert run(["ollama-register", str(folder), "--dry-run"], app) == ExitCode.ANSWERED_NO
    assert "would be refused" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["UD"], ["--check", "kimi-k3:x"], ["--remove", "kimi-k3:x"]])
def test_without_ollama_the_hint_installs_it_and_does_not_run_what_is_not_there(
    arguments: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(folder)] if arguments == ["UD"] else arguments
    app = App(show=Show(), environ={"OLLAMA_HOST": "127.0.0.1:9", "PATH": str(tmp_path)})
    assert run(["ollama-register", *arguments, "--json"], app) == ExitCode.MACHINE
    error = error_of(capsys)
    assert "no ollama is on PATH" in error["message"]
    assert error["hint"] == "curl -fsSL https://ollama.com/install.sh | sh"


def test_a_small_model_is_not_said_to_load_for_half_an_hour(
    call: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(what: str) -> str:
        call(what, "--dry-run", "--json")
        checks = json.loads(capsys.readouterr().out)["checks"]
        return str(next(check["evidence"] for check in checks if check["what"] == "load time-out"))

    assert "may take 1 s from a slow disk" in told(str(folder))
    assert "a load of 594.0 GB may take 49 min 30 s" in told("UD-IQ1_S")


def test_the_help_shows_examples(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == ExitCode.DONE
    assert "kimigguf ollama-register UD-IQ1_S --dry-run" in capsys.readouterr().out
