import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.gguf_set import write_set

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.download.manifest import manifest_of, write_manifest
from kimigguf.download.store import set_folder
from kimigguf.errors import IntegrityError, MachineError, UsageError
from kimigguf.ollama.find import find_source


def stored(models: Path, repository: str) -> Path:
    """A downloaded UD-IQ1_S of a repository."""
    remote = RemoteSet(repository=repository, commit="a" * 40, quant="UD-IQ1_S", files=())
    folder = set_folder(models, remote)
    files = tuple(
        RemoteFile(path=f"UD-IQ1_S/{path.name}", size_bytes=path.stat().st_size, sha256="0" * 64)
        for path in write_set(folder)
    )
    whole = RemoteSet(repository=repository, commit=remote.commit, quant=remote.quant, files=files)
    write_manifest(folder, manifest_of(whole, "hub"))
    return folder


def test_a_quant_of_the_same_name_from_another_repository_is_not_registered(tmp_path: Path) -> None:
    stored(tmp_path, "somebody/Kimi-K3-retrained-GGUF")
    found = find_source("UD-IQ1_S", {}, tmp_path)
    assert (found.files, found.folder) == ((), tmp_path)
    own = stored(tmp_path, load_model(environ={}).repository.id or "")
    assert find_source("UD-IQ1_S", {}, tmp_path).folder == own


def test_what_is_to_be_pasted_means_the_same_models_folder(tmp_path: Path) -> None:
    place = tmp_path / "my models"
    assert find_source("iq1_s", {}, place).pasted == f"UD-IQ1_S --models-dir '{place}'"
    assert find_source("iq1_s", {"KIMIGGUF_MODELS": str(place)}).pasted == "UD-IQ1_S"
    stored(place, load_model(environ={}).repository.id or "")
    assert find_source("iq1_s", {}, place).pasted == f"iq1_s --models-dir '{place}'"


def test_a_set_of_another_repository_can_be_named_by_its_path(tmp_path: Path) -> None:
    folder = stored(tmp_path, "somebody/Kimi-K3-retrained-GGUF")
    found = find_source(str(folder), {})
    assert (found.folder, found.quant) == (folder, find_quant(load_model(environ={}), "UD-IQ1_S"))
    assert all(file.sha256 for file in found.files)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be a user without rights for a while; only root can."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A set in a folder that everybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("HOME", "/nonexistent")
        write_set(folder / "UD-IQ1_S")
        find_source(str(folder / "UD-IQ1_S"), {})  # whatever is imported late is now
        yield folder / "UD-IQ1_S"


@pytest.mark.parametrize("mode", [0o700, 0o711, 0o644])
def test_a_folder_that_may_not_be_entered_is_named_with_the_command_that_opens_it(open_folder: Path, mode: int) -> None:
    first = min(open_folder.glob("*.gguf"))
    open_folder.chmod(mode)
    for path in (open_folder, first):
        with nobody(), pytest.raises(MachineError) as error:
            find_source(str(path), {})
        assert error.value.code == "unreadable-folder"
        assert error.value.hint == f"sudo chmod a+rx {open_folder}"


def test_a_shard_that_may_not_be_read_is_named_whichever_was_given(open_folder: Path) -> None:
    files = sorted(open_folder.glob("*.gguf"))
    files[2].chmod(0o600)
    with nobody():
        assert find_source(str(open_folder), {}).unreadable == (files[2].name,)
        assert find_source(str(files[0]), {}).unreadable == (files[2].name,)


def test_a_middle_shard_means_its_set_and_a_set_that_lacks_one_is_refused(tmp_path: Path) -> None:
    files = write_set(tmp_path / "UD-IQ1_S")
    assert [file.path for file in find_source(str(files[2]), {}).files] == list(files)
    files[1].unlink()
    with pytest.raises(IntegrityError, match="00002-of-00004") as error:
        find_source(str(files[2]), {})
    assert error.value.code == "missing-shard"
    assert "None" not in (error.value.hint or "")  # nobody knows where these came from
    with pytest.raises(UsageError, match="no file or folder"):
        find_source(str(tmp_path / "nothing"), {})


def test_a_home_that_nobody_has_is_no_bug() -> None:
    with pytest.raises(UsageError) as error:
        find_source("~no-such-user/K3.gguf", {})
    assert "~no-such-user" in error.value.message


def test_a_folder_here_that_is_called_like_a_quant_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every other command: ``./UD-IQ1_S`` is the folder."""
    write_set(tmp_path / "UD-IQ1_S")
    monkeypatch.chdir(tmp_path)
    environ = {"KIMIGGUF_MODELS": str(tmp_path / "sets")}
    assert find_source("UD-IQ1_S", environ).files == ()
    assert len(find_source("./UD-IQ1_S", environ).files) == 4
