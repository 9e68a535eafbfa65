import os
from pathlib import Path

import pytest
from download.conftest import KIB, Scene

from kimigguf.download import hashing, shard
from kimigguf.download.lock import hold
from kimigguf.download.manifest import INNER, MANIFEST
from kimigguf.download.store import SetState, look
from kimigguf.download.verify import Verdict, require_whole, verify
from kimigguf.errors import IntegrityError
from kimigguf.events import Advance, ignore


def spoil(path: Path, at: int) -> None:
    """Flip a bit and put the time stamp back, as rot on the disk does."""
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_whole_set_verifies_and_says_how_much_it_read(scene: Scene) -> None:
    stored = scene.get()
    events: list[object] = []
    verification = verify(stored, listen=events.append)
    assert [file.verdict for file in verification.files] == [Verdict.OK] * 3
    assert verification.hashed_bytes == stored.size_bytes
    assert events[-1] == Advance(
        activity="hash", item=stored.files[2].name, done_bytes=500 * KIB, total_bytes=500 * KIB
    )
    require_whole(verification, stored)


def test_rot_under_an_unchanged_time_stamp_is_found_and_remembered(scene: Scene) -> None:
    stored = scene.get()
    spoil(stored.files[1].path, 4000)
    verification = verify(stored)
    assert [file.verdict for file in verification.files] == [Verdict.OK, Verdict.DAMAGED, Verdict.OK]
    assert look(scene.folder).state is SetState.UNVERIFIED  # type: ignore[union-attr]  # it is there
    with pytest.raises(IntegrityError, match=r"00002-of-00003\.gguf is damaged") as error:
        require_whole(verification, stored)
    assert error.value.code == "damaged-shard"


def test_the_damaged_range_is_named_where_marks_were_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 64 * KIB)
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 64 * KIB)
    monkeypatch.setattr(hashing, "READ_BYTES", 16 * KIB)
    stored = scene.get()
    spoil(stored.files[1].path, 200 * KIB)
    bad = verify(stored).bad[0]
    assert (bad.bad_from_bytes, bad.bad_to_bytes) == (192 * KIB, 256 * KIB)
    spoil(stored.files[1].path, 200 * KIB)
    spoil(stored.files[1].path, 700 * KIB + 1)
    bad = verify(stored).bad[0]
    assert (bad.bad_from_bytes, bad.bad_to_bytes) == (640 * KIB, 700 * KIB + 11)


def test_missing_and_cut_shards_are_told_apart(scene: Scene) -> None:
    stored = scene.get()
    stored.files[0].path.unlink()
    with stored.files[2].path.open("r+b") as stream:
        stream.truncate(1000)
    now = look(scene.folder)
    assert now is not None
    assert now.state is SetState.DAMAGED
    verdicts = [file.verdict for file in verify(now).files]
    assert verdicts == [Verdict.MISSING, Verdict.OK, Verdict.WRONG_SIZE]
    with pytest.raises(IntegrityError) as error:
        require_whole(verify(now), now)
    assert error.value.code == "missing-shard"


def test_changed_only_reads_what_was_touched_and_no_more(scene: Scene) -> None:
    stored = scene.get()
    assert verify(stored, changed_only=True).hashed_bytes == 0
    stored.files[1].path.touch()
    touched = look(scene.folder)
    assert touched is not None
    assert touched.state is SetState.UNVERIFIED
    verification = verify(touched, changed_only=True)
    assert verification.hashed_bytes == stored.files[1].size_bytes
    assert not verification.bad
    assert look(scene.folder).state is SetState.WHOLE  # type: ignore[union-attr]  # it is there


def test_a_disk_that_cannot_be_read_is_said_with_the_shard(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = scene.get()

    def broken(*_args: object, **_more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "posix_fadvise", broken)
    with pytest.raises(IntegrityError) as error:
        verify(stored)
    assert error.value.code == "unreadable"
    assert error.value.cause == "Input/output error"


def test_a_verify_beside_a_download_does_not_take_its_manifest_away(scene: Scene) -> None:
    stored = scene.get()
    stored.files[1].path.touch()
    manifest = (scene.folder / MANIFEST).read_bytes()
    with hold(scene.folder / INNER / "lock", what="the set", wait=False, listen=ignore):
        assert not verify(stored).bad
    assert (scene.folder / MANIFEST).read_bytes() == manifest
    verify(stored)
    assert (scene.folder / MANIFEST).read_bytes() != manifest
