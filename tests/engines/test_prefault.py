"""Reading ahead: every byte once and in order, and not at all where it would push itself out."""

from pathlib import Path

import pytest

from kimigguf.engines.prefault import prefault
from kimigguf.errors import IntegrityError
from kimigguf.events import Advance, Event, Notice


def files(folder: Path) -> list[Path]:
    made = []
    for number, size in enumerate((10, 0, 3 << 20)):
        path = folder / f"{number}.gguf"
        path.write_bytes(bytes(size))
        made.append(path)
    return made


def test_every_byte_is_read_once_with_progress(tmp_path: Path) -> None:
    seen: list[Event] = []
    total = 10 + (3 << 20)
    assert prefault(files(tmp_path), room_bytes=None, listen=seen.append) == total
    advances = [event.done_bytes for event in seen if isinstance(event, Advance)]
    assert advances == sorted(advances)
    assert advances[-1] == total


def test_nothing_is_read_that_the_memory_cannot_keep(tmp_path: Path) -> None:
    seen: list[Event] = []
    assert prefault(files(tmp_path), room_bytes=1000, listen=seen.append) == 0
    (notice,) = seen
    assert isinstance(notice, Notice)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    with pytest.raises(IntegrityError, match=r"folder\.gguf"):
        prefault([folder], room_bytes=None)
