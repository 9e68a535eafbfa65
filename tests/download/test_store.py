import json
from dataclasses import replace
from pathlib import Path

import pytest
from download.conftest import QUANT, REPOSITORY, Scene

from kimigguf.download import store
from kimigguf.download.manifest import MANIFEST, manifest_of, read_manifest
from kimigguf.download.store import FileState, SetState, locate, look, managed_sets, models_dir, set_folder
from kimigguf.errors import IntegrityError, UsageError
from kimigguf.whole_file import write_whole


def test_the_models_folder_is_the_nearest_word_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_config_path", lambda _name: tmp_path / "config")
    monkeypatch.setattr("platformdirs.user_data_path", lambda _name: tmp_path / "data")
    assert models_dir({}) == tmp_path / "data" / "models"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text('models_dir = "/mnt/a"')
    assert models_dir({}) == Path("/mnt/a")
    assert models_dir({"KIMIGGUF_MODELS": "/mnt/b"}) == Path("/mnt/b")
    assert models_dir({"KIMIGGUF_MODELS": "/mnt/b"}, Path("/mnt/c")) == Path("/mnt/c")
    (tmp_path / "config" / "config.toml").write_text("models_dir = 3")
    with pytest.raises(UsageError) as error:
        models_dir({})
    assert error.value.code == "bad-config"


def test_two_commits_of_a_quant_never_share_a_folder(scene: Scene) -> None:
    other = replace(scene.remote, commit="f" * 40)
    folders = {set_folder(scene.models, scene.remote), set_folder(scene.models, other)}
    assert len(folders) == 2
    assert all(folder.parent == scene.models / "owner--Model-GGUF" / QUANT for folder in folders)


def test_a_set_is_found_by_quant_and_the_whole_one_is_preferred(scene: Scene) -> None:
    assert locate(scene.models, QUANT) is None
    stored = scene.get()
    newer = replace(scene.remote, commit="f" * 40)
    folder = set_folder(scene.models, newer)
    folder.mkdir(parents=True)
    store_manifest = replace(manifest_of(newer, "hub"), created="2999-01-01T00:00:00Z")
    from kimigguf.download.manifest import write_manifest

    write_manifest(folder, store_manifest)
    assert [s.state for s in managed_sets(scene.models)] == [SetState.PARTIAL, SetState.WHOLE]
    found = locate(scene.models, QUANT, repository=REPOSITORY)
    assert found is not None
    assert found.folder == stored.folder
    assert locate(scene.models, newer).state is SetState.PARTIAL  # type: ignore[union-attr]  # it is there
    assert locate(scene.models, QUANT, repository="someone/else") is None


def test_a_file_that_was_touched_or_replaced_is_not_called_verified(scene: Scene) -> None:
    stored = scene.get()
    path = stored.files[0].path
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    now = look(scene.folder)
    assert now is not None
    assert [file.state for file in now.files] == [FileState.UNVERIFIED, FileState.VERIFIED, FileState.VERIFIED]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "kimigguf.set/99"},
        {"files": []},
        {"files": [{"name": "../../etc/passwd", "size_bytes": 1, "sha256": "00"}]},
        {"files": [{"name": "/etc/passwd", "size_bytes": 1, "sha256": "00"}]},
        {"files": [{"name": "a", "size_bytes": "many", "sha256": "00"}]},
    ],
)
def test_a_manifest_that_is_wrong_or_leaves_its_folder_is_refused(scene: Scene, change: dict[str, object]) -> None:
    scene.get()
    path = scene.folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(IntegrityError) as error:
        look(scene.folder)
    assert error.value.code == "bad-manifest"
    assert str(path) in error.value.message


def test_a_broken_manifest_hides_only_its_own_set(scene: Scene) -> None:
    scene.get()
    broken = scene.models / "a--b" / "UD-Y" / "000000000000"
    broken.mkdir(parents=True)
    (broken / MANIFEST).write_text("{")
    assert len(managed_sets(scene.models)) == 1


def test_a_manifest_is_written_whole_or_not_at_all(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.get()
    before = read_manifest(scene.folder)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        write_whole(scene.folder / MANIFEST, b"{}")
    assert read_manifest(scene.folder) == before
    assert not [path for path in scene.folder.iterdir() if path.name.startswith(f".{MANIFEST}")]


def test_a_hub_that_gives_no_hash_or_a_strange_name_is_refused(scene: Scene) -> None:
    file = scene.remote.files[0]
    for bad, code in ((replace(file, sha256=None), "no-hash"), (replace(file, path="UD-X/.."), "bad-name")):
        with pytest.raises(IntegrityError) as error:
            manifest_of(replace(scene.remote, files=(bad,)), "hub")
        assert error.value.code == code


def test_files_without_a_manifest_are_listed_as_foreign(scene: Scene) -> None:
    scene.get()
    folder = scene.models / "mine"
    folder.mkdir()
    for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf"):
        (folder / name).write_bytes(b"GGUF")
    found = list(store.foreign_sets(scene.models))
    assert [[file.name for file in s.files] for s in found] == [
        ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"],
        ["y.gguf"],
    ]
    assert {s.state for s in found} == {SetState.FOREIGN}
