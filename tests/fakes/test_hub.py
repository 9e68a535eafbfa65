"""The stand-in hub is itself held to what huggingface_hub expects of the real one."""

import hashlib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fakes.hub import COMMIT, serve
from fakes.hub_faults import Fault, Kind, first
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile, RepoFolder

REPO = "owner/Model-GGUF"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / REPO / "UD-X"
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        (folder / f"Model-UD-X-0000{number}-of-00003.gguf").write_bytes(bytes([number]) * 1000 * number)
    (folder.parent / "README.md").write_text("read me")
    return tmp_path / "root"


def test_the_real_client_lists_resolves_and_reads_it(root: Path, tmp_path: Path) -> None:
    with serve(root) as hub:
        hub.page_size = 2
        api = HfApi(endpoint=hub.url, token=False)
        assert api.model_info(REPO).sha == COMMIT
        tree = list(api.list_repo_tree(REPO, recursive=True, revision="main"))
        shards = [entry for entry in tree if isinstance(entry, RepoFile) and entry.lfs]
        assert len(shards) == 3
        assert shards[1].lfs is not None
        assert shards[1].lfs.sha256 == hashlib.sha256(b"\2" * 2000).hexdigest()
        assert [type(entry) for entry in api.list_repo_tree(REPO)] == [RepoFolder, RepoFile]
        assert len(list(api.list_repo_tree(REPO, "UD-X"))) == 3
        got = api.hf_hub_download(REPO, shards[2].path, local_dir=tmp_path / "got")
        assert Path(got).read_bytes() == b"\3" * 3000
        with pytest.raises(RevisionNotFoundError):
            list(api.list_repo_tree(REPO, revision="nope"))
        with pytest.raises(RemoteEntryNotFoundError):
            list(api.list_repo_tree(REPO, "UD-Y"))


def test_a_gated_repository_refuses_without_its_token_and_the_second_host_never_sees_it(
    root: Path, tmp_path: Path
) -> None:
    with serve(root, token="hf_secret") as hub:
        with pytest.raises(GatedRepoError):
            HfApi(endpoint=hub.url, token=False).model_info(REPO)
        api = HfApi(endpoint=hub.url, token="hf_secret")
        api.hf_hub_download(REPO, "UD-X/Model-UD-X-00001-of-00003.gguf", local_dir=tmp_path / "got")
        assert [request.authorization for request in hub.gets()] == [None]


def test_ranges_are_answered_exactly_and_a_changed_etag_gives_the_whole_file(root: Path) -> None:
    with serve(root) as hub:
        url = f"{hub.url}/{REPO}/resolve/main/UD-X/Model-UD-X-00002-of-00003.gguf"

        def get(**headers: str) -> tuple[int, str | None, bytes]:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                return answer.status, answer.headers["Content-Range"], answer.read()

        assert get(Range="bytes=10-19") == (206, "bytes 10-19/2000", b"\2" * 10)
        assert get(**{"Range": "bytes=10-19", "If-Range": '"other"'}) == (200, None, b"\2" * 2000)
        with pytest.raises(urllib.error.HTTPError) as error:
            get(Range="bytes=2000-")
        assert error.value.code == 416
        error.value.close()


def test_a_signed_address_expires(root: Path) -> None:
    with serve(root) as hub:
        hub.signed_uses = 1
        url = f"{hub.url}/{REPO}/resolve/main/UD-X/Model-UD-X-00001-of-00003.gguf"
        with urllib.request.urlopen(url) as answer:
            signed = answer.geturl()
        assert signed.startswith(hub.cdn_url)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(signed)
        assert error.value.code == 403
        error.value.close()


def test_a_stalled_answer_ends_with_the_hub(root: Path) -> None:
    with serve(root, faults=first(Fault(kind=Kind.STALL, after_bytes=5, seconds=600))) as hub:
        hub.redirect = False
        answer = urllib.request.urlopen(f"{hub.url}/{REPO}/resolve/main/UD-X/Model-UD-X-00001-of-00003.gguf")
        assert answer.read(5) == b"\1" * 5
    answer.close()
