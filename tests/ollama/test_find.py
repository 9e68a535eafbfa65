from pathlib import Path

from fakes.gguf_set import write_set

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.download.manifest import manifest_of, write_manifest
from kimigguf.download.store import set_folder
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


def test_a_set_of_another_repository_can_be_named_by_its_path(tmp_path: Path) -> None:
    folder = stored(tmp_path, "somebody/Kimi-K3-retrained-GGUF")
    found = find_source(str(folder), {})
    assert (found.folder, found.quant) == (folder, find_quant(load_model(environ={}), "UD-IQ1_S"))
    assert all(file.sha256 for file in found.files)
