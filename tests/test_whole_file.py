import os
import stat
from pathlib import Path

import pytest

from kimigguf import whole_file
from kimigguf.whole_file import write_whole


def test_a_file_is_replaced_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)  # as long a name as a folder takes
    path.write_bytes(b"old")
    write_whole(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "set.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_synced_is_no_failure_once_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(whole_file, "sync_folder", refuse)
    write_whole(tmp_path / "plan.json", b"new")
    assert (tmp_path / "plan.json").read_bytes() == b"new"
