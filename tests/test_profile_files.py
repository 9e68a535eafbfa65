"""Facts are found, overridden and refused by name, file and key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kimigguf import profile_files
from kimigguf.catalogue.profiles import load_model
from kimigguf.catalogue.quants import ModelProfile
from kimigguf.errors import UsageError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    return {"KIMIGGUF_PROFILES": str(folder)}


SMALL = """
name = "kimi-k3"
title = "mine"
architecture = "kimi-k3"
sources = []
[[quants]]
name = "Q"
folder = "Q"
size_bytes = "1GiB"
quality_rank = 1
"""


def test_a_users_profile_overrides_the_shipped_one_of_its_name(own: Path) -> None:
    (own / "models" / "kimi-k3.toml").write_text(SMALL)
    profile = load_model("kimi-k3", environ(own))
    assert profile.title == "mine"
    assert profile.quants[0].size_bytes == 1 << 30  # sizes may carry a unit


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"1GiB"', '"1G"', "1GiB"),
        ("quality_rank = 1", "quality_rank = 'best'", "quants.0.quality_rank"),
        ('folder = "Q"', 'folders = "Q"', "folder"),
        ('title = "mine"', "title = ", "line"),
        ("sources = []", "", "sources"),
    ],
)
def test_a_bad_profile_names_file_and_key(own: Path, old: str, new: str, named: str) -> None:
    path = own / "models" / "kimi-k3.toml"
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_model("kimi-k3", environ(own))
    assert caught.value.code == "bad-profile"
    assert str(path) in caught.value.message
    assert named in (caught.value.cause or "")


@pytest.mark.parametrize("name", ["../models/kimi-k3", "/etc/passwd", "kimi-k4", ""])
def test_a_name_is_never_used_as_a_path(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(name)
    assert caught.value.code == "unknown-profile"
    assert "kimi-k3" in (caught.value.hint or "")


def test_unreadable_files_are_bad_profiles_not_bugs(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"a = [" * 5000, b"x" * (2 << 20)):
        path = tmp_path / "x.toml"
        path.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            profile_files.load(path, ModelProfile)
        assert caught.value.code == "bad-profile"
    with pytest.raises(UsageError):
        profile_files.load(tmp_path / "missing.toml", ModelProfile)


def test_a_folder_that_may_not_be_entered_is_passed_over(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root nothing is forbidden, so the refusal that another user's HOME gives is put in its place.
    entered = Path.glob

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        if folder.is_relative_to(own):
            raise PermissionError(13, "Permission denied", str(folder))
        return entered(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    assert "kimi-k3" in profile_files.names("models", environ(own))
    assert profile_files.find("models", "kimi-k3", environ(own)).is_relative_to(profile_files.shipped())


def test_every_shipped_model_is_valid() -> None:
    assert {"kimi-k3", "kimi-k3.1-pro"} <= set(profile_files.names("models"))
    for name in profile_files.names("models"):
        assert load_model(name).name == name
