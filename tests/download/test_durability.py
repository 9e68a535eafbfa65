"""What must hold when the power goes: the order of writes, syncs, records and names."""

import os
from pathlib import Path

import pytest
from download.conftest import FAST, KIB, Scene, write_shards

from kimigguf.download import journal
from kimigguf.download.parts import Source
from kimigguf.download.shard import Shard
from kimigguf.download.store import FileState, look


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    remote = write_shards(tmp_path / "root", (100 * KIB,))
    file = remote.files[0]
    source = Source(
        url="http://hub/x", name=file.name, size_bytes=file.size_bytes, sha256=file.sha256 or "", commit="0" * 40
    )
    (tmp_path / "set").mkdir()
    shard = Shard(source, tmp_path / "set", FAST)
    shard.open()
    return shard


def test_a_range_is_recorded_as_synced_only_after_the_sync(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.write(b"x" * 1000, 0)
    shard.mark(0, 1000)

    def broken(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError):
            shard.sync()
    monkeypatch.setattr(journal, "boot_id", lambda: "after-the-power-cut")
    size, sha256 = shard.source.size_bytes, shard.source.sha256
    assert list(journal.read(shard.journal_path, size_bytes=size, sha256=sha256)) == []
    shard.close()


def test_after_a_sync_the_range_outlives_the_power(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.write(b"x" * 1000, 0)
    shard.mark(0, 1000)
    shard.sync()
    shard.write(b"x" * 1000, 1000)
    shard.mark(1000, 2000)
    monkeypatch.setattr(journal, "boot_id", lambda: "after-the-power-cut")
    size, sha256 = shard.source.size_bytes, shard.source.sha256
    assert list(journal.read(shard.journal_path, size_bytes=size, sha256=sha256)) == [(0, 1000)]
    shard.close()


def test_a_file_gets_its_name_only_after_its_bytes_are_on_the_disk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    named: list[bool] = []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            named.append(path.stat().st_ino in synced)
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    scene.get()
    assert named == [True, True, True]


def test_a_name_without_its_manifest_entry_is_hashed_before_it_is_believed(scene: Scene) -> None:
    """The power went between the rename and the manifest: the file is right, but nobody has written it down."""
    scene.get()
    from kimigguf.download.manifest import read_manifest, with_verified, write_manifest

    manifest = read_manifest(scene.folder)
    assert manifest is not None
    name = scene.remote.files[1].name
    write_manifest(scene.folder, with_verified(manifest, name, None))
    before = look(scene.folder)
    assert before is not None
    assert before.files[1].state is FileState.UNVERIFIED
    requests = len(scene.hub.requests)
    assert scene.get().files[1].state is FileState.VERIFIED
    assert len(scene.hub.requests) == requests


def test_a_part_that_is_shorter_than_its_journal_is_not_believed(shard: Shard) -> None:
    shard.write(b"x" * 2000, 0)
    shard.mark(0, 2000)
    shard.close()
    os.truncate(shard.part_path, 500)
    again = Shard(shard.source, shard.path.parent, FAST)
    again.open()
    assert list(again.ranges) == [(0, 500)]
    again.close()


def test_memory_does_not_grow_with_the_size_of_a_file(tmp_path: Path) -> None:
    import subprocess
    import sys

    from fakes.hub import COMMIT, serve

    folder = tmp_path / "root" / "owner" / "Model-GGUF" / "UD-X"
    folder.mkdir(parents=True)
    size = 200 << 20
    with (folder / "Model-UD-X-00001-of-00001.gguf").open("wb") as stream:
        stream.truncate(size)
    code = (
        "import os, sys; from pathlib import Path;"
        "from kimigguf.catalogue.remote import RemoteFile, RemoteSet; from kimigguf.download.fetch import download;"
        "f = RemoteFile(path='UD-X/Model-UD-X-00001-of-00001.gguf', size_bytes=int(sys.argv[2]), sha256=sys.argv[3]);"
        "r = RemoteSet(repository='owner/Model-GGUF', commit=sys.argv[4], quant='UD-X', files=(f,));"
        "download(r, Path(sys.argv[1]), environ=os.environ);"
        # Not ru_maxrss: that begins with what the parent had when it forked.
        "print(next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')))"
    )
    with serve(tmp_path / "root") as hub:
        sha256 = hub.files(COMMIT, "owner/Model-GGUF")[0].sha256
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "got"), str(size), str(sha256), COMMIT],
            env={**os.environ, "HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            check=True,
        )
    assert int(done.stdout) < 150_000  # KiB
