"""What QUANT|PATH means: the same for every command, with the same errors."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.processes import free_port

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.download.manifest import Manifest, ManifestFile, write_manifest
from kimigguf.download.named import CatalogueTarget, PathTarget, is_path, look_for, present, target_of
from kimigguf.errors import IntegrityError, UsageError
from kimigguf.home import whole

COMMANDS = [
    ("plan", "--machine", "epyc-1536g-cpu"),
    ("memory", "--gpus", "0"),
    ("serve", "--no-download", "--engine", "embedded", "--dry-run"),
    ("verify",),
    ("repair",),
]


@pytest.mark.parametrize("text", ["./UD-IQ1_M", "~/k3", "..", "a/b", "K3.GGUF", "/x", ".hidden"])
def test_what_can_only_be_a_path_is_never_taken_for_a_quant(text: str) -> None:
    assert is_path(text)
    assert target_of(text, {}) == PathTarget(path=whole(text), text=text)


@pytest.mark.parametrize("text", ["UD-IQ1_M", "iq1_m", "ud-iq1_m"])
def test_a_quant_is_meant_in_any_spelling(text: str) -> None:
    target = target_of(text, {})
    assert isinstance(target, CatalogueTarget)
    assert target.quant.name == "UD-IQ1_M"


def test_a_folder_that_is_no_quant_needs_no_slash_and_one_that_is_called_like_a_quant_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "UD-IQ1_M").mkdir()
    assert target_of("mine", {}) == PathTarget(path=Path.cwd() / "mine", text="mine")
    assert isinstance(target_of("UD-IQ1_M", {}), CatalogueTarget)


def test_a_folder_above_that_nobody_may_look_into_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(UsageError) as caught:
        look_for(target_of("/closed/k3", {}), tmp_path)
    assert (caught.value.code, caught.value.cause) == ("unreadable-file", "Permission denied")


def test_a_quant_of_which_nothing_is_here_is_itself_still_to_be_fetched(tmp_path: Path) -> None:
    target = target_of("UD-IQ1_M", {})
    assert look_for(target, tmp_path / "none") == target
    assert present(target, tmp_path / "none") == target


def test_a_set_by_its_path_must_be_whole(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    part = tmp_path / "part"
    shutil.copytree(tiny(), part)
    next(iter(sorted(part.glob("*.gguf")))).unlink()
    with pytest.raises(IntegrityError) as caught:
        present(target_of(str(part), {}), tmp_path)
    assert caught.value.code == "missing-shard"


def answers(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, *names: str) -> list[tuple[int, str, str]]:
    """Exit code, error code and hint about ``text`` of the commands of these names, or of all."""
    environ = {
        "PATH": "",
        "KIMIGGUF_MODELS": str(tmp_path / "models"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    found = []
    for name, *options in [command for command in COMMANDS if not names or command[0] in names]:
        port = ("--port", str(free_port())) if name == "serve" else ()  # 8080 may be anybody's
        code = run([name, text, *options, *port, "--json"], App(show=Show(), environ=environ))
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        error = next((line for line in lines if line["schema"] == "kimigguf.error/1"), {"code": "", "hint": ""})
        found.append((code, error["code"], error["hint"]))
    return found


@pytest.mark.parametrize(
    ("text", "exit_code", "code"),
    [("UD-IQ9_Z", 2, "unknown-quant"), ("./nowhere", 2, "no-such-file"), ("nowhere.gguf", 2, "no-such-file")],
)
def test_every_command_refuses_the_same_words_in_the_same_way(
    text: str, exit_code: int, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answers(capsys, tmp_path, text)
    assert {(status, error) for status, error, _ in said} == {(exit_code, code)}, said
    assert len({hint for *_, hint in said}) == 1


def test_every_command_that_needs_the_files_says_the_same_of_a_quant_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answers(capsys, tmp_path, "UD-IQ1_M", "serve", "verify", "repair")
    assert set(said) == {(5, "not-downloaded", "kimigguf download UD-IQ1_M")}


def test_every_command_names_the_damaged_shard_of_a_set(
    tmp_path: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """plan and memory once fell back to the catalogue's facts, and serve then refused what they had planned."""
    repository = load_model().repository
    assert repository.id is not None
    assert repository.commit is not None
    folder = tmp_path / "models" / repository.id.replace("/", "--") / "UD-IQ1_M" / repository.commit[:12]
    shutil.copytree(tiny("UD-IQ1_M"), folder)
    shards = sorted(folder.glob("*.gguf"))
    files = tuple(
        ManifestFile(name=path.name, path=path.name, size_bytes=path.stat().st_size, sha256="0" * 64) for path in shards
    )
    write_manifest(
        folder,
        Manifest(
            repository=repository.id, commit=repository.commit, quant="UD-IQ1_M", source="hub", created="2026",
            files=files,
        ),
    )  # fmt: skip
    with shards[1].open("ab") as shard:
        shard.write(b"more")
    said = answers(capsys, tmp_path, "UD-IQ1_M", "plan", "memory", "serve")
    assert set(said) == {(5, "damaged-shard", "kimigguf download UD-IQ1_M")}
