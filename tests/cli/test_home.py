"""A home that nobody has is a folder that is not there, for every command: never a bug of the program."""

import json
from pathlib import Path

import pytest

from kimigguf.catalogue.access import token
from kimigguf.catalogue.header_cache import cache_dir
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.download.named import PathTarget, target_of
from kimigguf.download.store import models_dir, named_models_dir
from kimigguf.engines.discover import places
from kimigguf.home import from_home, whole

NOBODY = "~no-such-user"


def test_a_home_is_written_out_and_anything_else_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [str(from_home(text)) for text in ("~/a", "a/~", "/a", f"{NOBODY}/a", Path("~"))] == [
        "/home/me/a",
        "a/~",
        "/a",
        f"{NOBODY}/a",
        "/home/me",
    ]


def test_a_path_with_dots_is_named_as_a_service_can_be_told_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    target = target_of("../link/./k3.gguf", {})
    assert isinstance(target, PathTarget)
    assert target.path == tmp_path / "link" / "k3.gguf", "the link stays: it may point to another disk tomorrow"
    assert models_dir({}, Path("../models")) == models_dir({"KIMIGGUF_MODELS": "../models"}) == tmp_path / "models"


def test_what_stands_behind_a_link_is_still_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "disk" / "sets").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "sets")
    assert whole(tmp_path / "link" / ".." / "k3") == (tmp_path / "disk" / "k3").resolve()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("recommend", "--machine", f"{NOBODY}/box.toml"), "bad-profile"),
        (("verify", "UD-IQ1_M", "--models-dir", NOBODY), "not-downloaded"),
        (("verify", f"{NOBODY}/set"), "no-such-file"),
        (("quality-probe", "--suite", f"{NOBODY}/suite.toml", "--candidate", ":9", "--reference", ":9"), "bad-profile"),
        (("ollama-register", f"{NOBODY}/set"), "no-such-file"),
    ],
)
def test_a_home_that_nobody_has_is_told_as_a_file_that_is_not_there(
    argv: tuple[str, ...], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "PATH": ""}
    assert run([*argv, "--json"], App(show=Show(), environ=environ)) in {2, 5}
    assert json.loads(capsys.readouterr().err)["code"] == code


def test_a_home_that_nobody_has_in_the_environment_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HF_TOKEN_PATH": f"{NOBODY}/token", "KIMIGGUF_CACHE": NOBODY, "KIMIGGUF_MODELS": NOBODY}
    assert token(environ) is None
    assert str(places({}, f"{NOBODY}/bin")[0][0]).endswith(f"{NOBODY}/bin")
    assert (cache_dir(environ), named_models_dir(environ)) == (tmp_path / NOBODY, tmp_path / NOBODY)
