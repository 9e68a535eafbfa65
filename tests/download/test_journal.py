import os
from pathlib import Path

import pytest

from kimigguf.download import journal
from kimigguf.download.journal import Journal, parse, read
from kimigguf.download.ranges import Ranges

SHA = "ab" * 32


def ranges_of(path: Path, size: int = 1000) -> list[tuple[int, int]]:
    return list(read(path, size_bytes=size, sha256=SHA))


def test_what_was_written_counts_after_a_kill_but_not_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        log.written(0, 100)
        log.synced(Ranges([(0, 60)]))
        log.written(200, 300)
    assert ranges_of(path) == [(0, 100), (200, 300)]
    monkeypatch.setattr(journal, "boot_id", lambda: "another-run")
    assert ranges_of(path) == [(0, 60)]
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        assert list(log.ranges) == [(0, 60)]
        log.written(500, 600)
    assert ranges_of(path) == [(0, 60), (500, 600)]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_end_is_cut_off_and_what_follows_it_is_not_lost(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        log.written(0, 100)
        log.written(100, 200)
    os.truncate(path, path.stat().st_size - cut)
    before = ranges_of(path)
    assert before in ([(0, 100)], [(0, 200)], [])
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        log.written(300, 400)
    assert ranges_of(path) == [*before, (300, 400)]


def test_a_flipped_bit_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        log.written(0, 100)
    sound = path.read_bytes()
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        assert ranges_of(path) in ([], [(0, 100)])


def test_a_journal_about_other_content_vouches_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, size_bytes=1000, sha256="cd" * 32) as log:
        log.written(0, 100)
    assert ranges_of(path) == []
    with Journal(path, size_bytes=1000, sha256=SHA) as log:
        assert list(log.ranges) == []
    assert path.read_bytes().count(b"shard") == 1


def test_ranges_beyond_the_file_are_cut() -> None:
    text = b""
    for body in (f"shard 100 {SHA}".encode(), b"boot x", b"w 50 500"):
        import zlib

        text += body + b" %08x\n" % zlib.crc32(body)
    ranges, sound = parse(text, size_bytes=100, sha256=SHA, boot="x")
    assert (list(ranges), sound) == ([(50, 100)], len(text))
