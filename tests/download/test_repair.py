"""Damage is mended by fetching what is bad, and nothing else."""

import os
from pathlib import Path

import pytest
from download.conftest import FAST, KIB, Scene
from fakes.hub_faults import Fault, Kind, always

from kimigguf.download import hashing, shard
from kimigguf.download.repair import repair
from kimigguf.download.store import SetState, StoredSet, look, stored_at
from kimigguf.download.verify import Verdict
from kimigguf.errors import IntegrityError, UsageError


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hashing, shard):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64 * KIB)
        monkeypatch.setattr(module, "READ_BYTES", 16 * KIB)


def spoil(path: Path, *places: int) -> None:
    """Flip bits and put the time stamp back, as rot on the disk does."""
    stat = path.stat()
    with path.open("r+b") as stream:
        for at in places:
            stream.seek(at)
            byte = stream.read(1)
            stream.seek(at)
            stream.write(bytes([byte[0] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def mend(scene: Scene, stored: StoredSet) -> dict[str, int]:
    """Repair, and tell how much of each file was fetched for it."""
    scene.hub.sent_bytes.clear()
    scene.hub.requests.clear()
    done = repair(stored, environ=scene.environ(), policy=FAST, listen=scene.events.append)
    assert done.stored.state is SetState.WHOLE
    scene.assert_whole()
    fetched: dict[str, int] = {}
    for request in scene.hub.gets():
        assert request.range is not None
        assert request.range[1] is not None
        name = str(request.file).rpartition("-of-")[0][-5:]
        fetched[name] = fetched.get(name, 0) + request.range[1] + 1 - request.range[0]
    return fetched


@pytest.mark.usefixtures("small_chunks")
def test_only_the_chunks_that_differ_are_fetched_again(scene: Scene) -> None:
    stored = scene.get()
    spoil(stored.files[1].path, 5, 200 * KIB, 201 * KIB, 700 * KIB + 3)
    assert mend(scene, stored) == {"00002": 64 * KIB + 64 * KIB + (60 * KIB + 11)}


@pytest.mark.usefixtures("small_chunks")
def test_a_cut_file_is_completed_and_its_damage_found(scene: Scene) -> None:
    stored = scene.get()
    spoil(stored.files[1].path, 70 * KIB)
    os.truncate(stored.files[1].path, 640 * KIB)
    assert mend(scene, stored) == {"00002": 64 * KIB + 60 * KIB + 11}


def test_missing_and_damaged_files_are_fetched_and_sound_ones_are_not(scene: Scene) -> None:
    stored = scene.get()
    stored.files[0].path.unlink()
    spoil(stored.files[2].path, 9)
    assert mend(scene, stored) == {"00001": 3 * KIB, "00003": 500 * KIB}


def test_a_sound_set_is_left_alone(scene: Scene) -> None:
    assert mend(scene, scene.get()) == {}


@pytest.mark.usefixtures("small_chunks")
def test_a_hub_that_sends_garbage_for_a_repair_never_gets_it_under_the_name(scene: Scene) -> None:
    stored = scene.get()
    spoil(stored.files[1].path, 5)
    scene.hub.faults = always(Fault(kind=Kind.GARBAGE))
    with pytest.raises(IntegrityError) as error:
        repair(stored, environ=scene.environ(), policy=FAST)
    assert error.value.code == "hash-mismatch"
    assert not stored.files[1].path.exists()


@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_is_linked_from_elsewhere_is_not_written_into(scene: Scene, tmp_path: Path) -> None:
    stored = scene.get()
    elsewhere = tmp_path / "theirs.gguf"
    os.link(stored.files[1].path, elsewhere)
    spoil(elsewhere, 5)
    before = elsewhere.read_bytes()
    mend(scene, stored)
    assert elsewhere.read_bytes() == before


def test_a_set_that_nobody_vouches_for_cannot_be_repaired(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    from kimigguf.download.store import FileState, StoredFile

    file = StoredFile(name="x.gguf", path=path, size_bytes=104, sha256=None, state=FileState.UNVERIFIED, done_bytes=104)
    with pytest.raises(UsageError) as error:
        repair(StoredSet(folder=tmp_path, files=(file,)), environ={})
    assert error.value.code == "foreign-set"
    assert "kimigguf import" in (error.value.hint or "")


def test_found_says_what_was_bad(scene: Scene) -> None:
    stored = scene.get()
    spoil(stored.files[2].path, 9)
    done = repair(stored, environ=scene.environ(), policy=FAST)
    assert [file.verdict for file in done.found.files] == [Verdict.OK, Verdict.OK, Verdict.DAMAGED]
    assert look(scene.folder) == done.stored
    assert stored_at(scene.folder).state is SetState.WHOLE
