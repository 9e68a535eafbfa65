"""Shards that exist are taken by hash, by the cheapest means, and stay where they are."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from download.conftest import Scene

from kimigguf.download import bring as bring_module
from kimigguf.download import takeover
from kimigguf.download.bring import How, bring
from kimigguf.download.hashing import hash_files
from kimigguf.download.store import SetState
from kimigguf.download.takeover import take_over
from kimigguf.errors import MachineError, UsageError


def cache_of(scene: Scene, place: Path) -> Path:
    """The set as huggingface_hub's cache holds it: blobs by hash, and a snapshot of links."""
    blobs, snapshot = place / "blobs", place / "snapshots" / "f00" / "UD-X"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(scene.remote.files, start=1):
        blob = blobs / str(file.sha256)
        blob.write_bytes(scene.served(number).read_bytes())
        (snapshot / file.name).symlink_to(Path("../../../blobs") / blob.name)
    return place


def test_a_cache_of_links_becomes_a_folder_of_real_files_and_stays_as_it_is(scene: Scene, tmp_path: Path) -> None:
    cache = cache_of(scene, tmp_path / "cache")
    taken = take_over(scene.remote, cache, scene.folder)
    assert taken.stored.state is SetState.WHOLE
    assert all(file.how in {How.REFLINK, How.HARD_LINK} for file in taken.files)
    scene.assert_whole()
    assert not any(file.path.is_symlink() for file in taken.stored.files)
    assert len(list((cache / "snapshots" / "f00" / "UD-X").iterdir())) == 3
    before = len(scene.hub.requests)
    assert scene.get().state is SetState.WHOLE
    assert len(scene.hub.requests) == before


def test_damaged_and_cut_files_are_named_and_left_to_the_download(scene: Scene, tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir()
    for number, file in enumerate(scene.remote.files, start=1):
        data = bytearray(scene.served(number).read_bytes())
        if number == 2:
            data[7] ^= 1
        (place / file.name).write_bytes(data[:-1] if number == 3 else data)
    taken = take_over(scene.remote, place, scene.folder)
    assert [file.how is not None for file in taken.files] == [True, False, False]
    assert "SHA-256" in (taken.files[1].reason or "")
    assert "bytes" in (taken.files[2].reason or "")
    assert taken.stored.state is SetState.PARTIAL
    scene.get()
    scene.assert_whole()
    assert {request.file for request in scene.hub.gets()} == {file.path for file in scene.remote.files[1:]}


def test_a_shard_on_another_file_system_is_copied_if_there_is_room(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(scene, tmp_path / "cache")

    def other(*_args: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", other)
    monkeypatch.setattr(bring_module, "_reflink", lambda _source, _target: False)
    monkeypatch.setattr(takeover, "needs_room", lambda _source, _folder: True)
    monkeypatch.setattr("kimigguf.download.disk.free_bytes", lambda _folder: 1000)
    with pytest.raises(MachineError) as error:
        take_over(scene.remote, cache, scene.folder)
    assert error.value.code == "disk-full"
    monkeypatch.setattr("kimigguf.download.disk.free_bytes", lambda _folder: 1 << 40)
    taken = take_over(scene.remote, cache, scene.folder)
    assert {file.how for file in taken.files} == {How.COPY}
    scene.assert_whole()


def test_a_copy_that_fails_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 1000)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bring_module, "_reflink", lambda _source, _target: False)
    monkeypatch.setattr("os.link", lambda *_args: full(0))
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        bring(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_place_without_a_shard_of_the_set_is_said(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        take_over(scene.remote, tmp_path / "models", scene.folder)
    assert error.value.code == "nothing-to-import"
    assert scene.remote.files[0].name in (error.value.cause or "")


def test_what_is_here_already_is_not_taken_twice(scene: Scene, tmp_path: Path) -> None:
    cache = cache_of(scene, tmp_path / "cache")
    scene.get()
    taken = take_over(scene.remote, cache, scene.folder)
    assert {file.reason for file in taken.files} == {"here already"}
    digest = hashlib.sha256((scene.folder / scene.remote.files[0].name).read_bytes()).hexdigest()
    assert digest == replace(scene.remote.files[0]).sha256


def test_a_file_that_is_there_is_replaced_in_one_step_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bring_module, "_reflink", lambda _source, _target: False)
        patch.setattr("os.link", full)
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError):
            bring(source, target)
    assert target.read_bytes() == b"old"
    (tmp_path / "b.copy").write_bytes(b"left over from a run that was killed")
    bring(source, target)
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("name", ["same", "symlink", "hard link", "link to link"])
def test_a_file_that_is_brought_onto_itself_stays(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"the only copy")
    (tmp_path / "symlink").symlink_to(target)
    (tmp_path / "link to link").symlink_to(tmp_path / "symlink")
    (tmp_path / "hard link").hardlink_to(target)
    assert bring(target if name == "same" else tmp_path / name, target) is How.IN_PLACE
    assert target.read_bytes() == b"the only copy"
    assert not target.is_symlink()


def test_a_shard_that_is_written_to_while_it_is_taken_is_not_called_verified(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(scene, tmp_path / "cache")
    real = hash_files

    def hash_then_write(files: dict[str, Path], *more: object) -> object:
        digests = real(files, *more)  # type: ignore[arg-type]  # passed on as it came
        first = files[scene.remote.files[0].name]
        first.write_bytes(bytes(first.stat().st_size))
        return digests

    monkeypatch.setattr(takeover, "hash_files", hash_then_write)
    taken = take_over(scene.remote, cache, scene.folder)
    assert [str(file.state) for file in taken.stored.files] == ["unverified", "verified", "verified"]
