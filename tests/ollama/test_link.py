import os
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.ollama_store import Ollama

from kimigguf.errors import IntegrityError, MachineError, ServerError
from kimigguf.events import Advance, Event, ignore
from kimigguf.ollama import link
from kimigguf.ollama.registration import Registration, plan, register, remove
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder


def planned(stand_in: Ollama, source: Source) -> Registration:
    return plan(source, {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)})


@pytest.fixture(autouse=True)
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system of the temporary folder can clone must not decide."""
    monkeypatch.setattr(link, "_clone", lambda _source, _target, _folder: False)


def test_shards_on_the_same_file_system_are_linked_and_nothing_is_sent(stand_in: Ollama, source: Source) -> None:
    registration = planned(stand_in, source)
    assert registration.link
    assert (registration.need.send_bytes, registration.need.peak_bytes) == (0, 0)
    blobs = register(registration, ignore)
    assert all(blob.linked and not blob.sent for blob in blobs)
    assert stand_in.received_bytes == 0
    assert all(stand_in.blob(blob.digest).samefile(blob.file.path) for blob in blobs)
    remove(registration.server, registration.name)
    assert all(file.path.exists() for file in source.files)


def test_a_link_does_not_make_our_files_look_changed(stand_in: Ollama, source: Source) -> None:
    before = [file.path.stat().st_mtime_ns for file in source.files]

    def touch(method: str, path: str) -> None:
        if path == "/api/create":
            for blob in stand_in.blobs.iterdir():
                os.utime(blob)

    stand_in.before = touch
    register(planned(stand_in, source), ignore)
    assert [file.path.stat().st_mtime_ns for file in source.files] == before


def test_a_recorded_hash_alone_is_not_believed_for_a_link(stand_in: Ollama, source: Source) -> None:
    wrong = replace(source, files=tuple(replace(file, sha256="0" * 64) for file in source.files))
    with pytest.raises(IntegrityError) as error:
        register(planned(stand_in, wrong), ignore)
    assert error.value.code == "shard-damaged"
    assert stand_in.models() == {}


def test_a_verified_file_is_not_hashed_again(stand_in: Ollama, source: Source) -> None:
    blobs = register(planned(stand_in, source), ignore)
    stand_in.restart()
    files = tuple(
        replace(file, sha256=blob.digest.removeprefix("sha256:"), verified=True)
        for file, blob in zip(source.files, blobs, strict=True)
    )
    said: list[Event] = []
    register(plan(replace(source, files=files), {"OLLAMA_HOST": stand_in.url}, name="b", force=True), said.append)
    assert not any(isinstance(event, Advance) for event in said)


def test_a_folder_that_is_another_servers_gets_no_link_that_stays(
    stand_in: Ollama, source: Source, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "blobs").mkdir(parents=True)
    registration = plan(source, {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(other)})
    assert registration.link
    with pytest.raises(MachineError) as error:
        register(registration, ignore)
    assert (error.value.code, error.value.hint) == ("cannot-link", "send copies instead: add --copy")
    assert list((other / "blobs").iterdir()) == []


def test_files_that_ollama_does_not_own_are_copied_for_it_may_not_touch_them(stand_in: Ollama, source: Source) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(stand_in.blobs, 12345, -1)
    stand_in.user = 12345
    registration = planned(stand_in, source)
    assert not registration.link
    assert f"{source.files[0].name} belongs to another user" in registration.survey.reason
    register(registration, ignore)
    assert list(stand_in.models()) == ["kimi-k3:ud-iq1_s"]


def test_a_link_to_another_users_file_would_be_refused_by_ollama(stand_in: Ollama, source: Source) -> None:
    registration = planned(stand_in, source)
    stand_in.user = os.getuid() + 1
    with pytest.raises(ServerError) as error:
        register(registration, ignore)
    assert "operation not permitted" in (error.value.cause or "")
    assert stand_in.models() == {}


def test_a_clone_that_is_impossible_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    original = tmp_path / "original"
    original.write_bytes(b"x" * 5000)
    folder = ModelsFolder(
        path=tmp_path, source="", confirmed=None, free_bytes=0, device=0, writable=True, owner=os.getuid()
    )
    if link._clone(original, tmp_path / "sha256-target", folder):
        assert (tmp_path / "sha256-target").read_bytes() == b"x" * 5000
        (tmp_path / "sha256-target").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_a_merged_file_of_another_user_is_no_bug(
    stand_in: Ollama, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root merged it in an earlier run; chmod is then refused."""
    registration = planned(stand_in, source)

    def refused(_path: Path, _mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refused)
    assert registration.folder is not None
    with pytest.raises(MachineError) as error:
        link.hand_over(source.files[0].path, registration.folder)
    assert (error.value.code, error.value.cause) == ("cannot-link", "Operation not permitted")
    assert error.value.hint == "send copies instead: add --copy"
