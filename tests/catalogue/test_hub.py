"""The listing and the headers of a quant, against a loopback hub that lies, fails and vanishes."""

import hashlib
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fakes.gguf_set import write_set
from fakes.hub import COMMIT, Hub, serve
from fakes.hub_faults import Fault, Kind, always, by_seed, first
from fakes.hub_state import File

from kimigguf.catalogue import hub_ranges
from kimigguf.catalogue.hub import _fetch, list_set, remote_headers, resolve
from kimigguf.catalogue.hub_ranges import RangeReader
from kimigguf.catalogue.quants import Quant
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.errors import ExitCode, IntegrityError, KimiggufError, MachineError, NetworkError, UsageError
from kimigguf.events import Advance, Event, Step
from kimigguf.gguf_file.stub import write_stubs

REPOSITORY = "unsloth/Kimi-K3-GGUF"
QUANT = Quant(name="UD-IQ1_S", folder="UD-IQ1_S", size_bytes=1, quality_rank=1)
OTHER = "89abcdef" * 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "hub"
    write_set(root / REPOSITORY / QUANT.folder)
    return root


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with serve(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_sockets_left() -> Iterator[None]:
    yield
    from huggingface_hub import close_session

    close_session()


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "KIMIGGUF_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "nobody")}


def listed(environ: dict[str, str], revision: str = COMMIT) -> RemoteSet:
    return list_set(REPOSITORY, QUANT, revision=revision, environ=environ)


def folder_of(root: Path) -> Path:
    return root / REPOSITORY / QUANT.folder


def code_of(call: Callable[[], object], kind: type[KimiggufError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code


# -- the listing ------------------------------------------------------------------------------------------------------


def test_the_list_has_every_shard_in_load_order_with_size_and_hash(root: Path, environ: dict[str, str]) -> None:
    remote = listed(environ)
    paths = sorted(folder_of(root).glob("*.gguf"))
    assert [file.name for file in remote.files] == [path.name for path in paths]
    assert [file.size_bytes for file in remote.files] == [path.stat().st_size for path in paths]
    assert [file.sha256 for file in remote.files] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert (remote.commit, remote.quant, remote.repository) == (COMMIT, QUANT.name, REPOSITORY)


def test_a_branch_that_moves_on_does_not_move_a_pinned_set(
    hub: Hub, root: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    assert listed(environ, "main").commit == COMMIT
    later = tmp_path / "later"
    write_set(later / REPOSITORY / QUANT.folder, tensors=5)
    hub.add_commit(OTHER, later)
    assert resolve(REPOSITORY, revision="main", environ=environ) == OTHER
    assert len(listed(environ, "main").files) == 6
    assert len(listed(environ).files) == 4


def test_only_the_shards_of_the_folder_are_listed(root: Path, environ: dict[str, str]) -> None:
    count = len(listed(environ).files)
    (folder_of(root) / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder_of(root) / "README.md").write_text("words")
    (root / REPOSITORY / "mmproj-BF16.gguf").write_bytes(b"GGUF")
    write_set(root / REPOSITORY / "UD-IQ1_M", name="Kimi-K3-UD-IQ1_M")
    assert len(listed(environ).files) == count


def test_two_uploads_in_one_folder_are_not_mixed(root: Path, environ: dict[str, str]) -> None:
    write_set(folder_of(root), tensors=5)
    assert code_of(lambda: listed(environ), IntegrityError) == "mixed-set"


def test_two_models_in_one_folder_are_not_chosen_between(root: Path, environ: dict[str, str]) -> None:
    write_set(folder_of(root), name="Another")
    assert code_of(lambda: listed(environ), IntegrityError) == "several-sets"


def test_an_upload_under_way_is_not_taken_for_a_whole_set(root: Path, environ: dict[str, str]) -> None:
    gone = folder_of(root) / "Kimi-K3-UD-IQ1_S-00003-of-00004.gguf"
    gone.unlink()
    with pytest.raises(IntegrityError) as caught:
        listed(environ)
    assert caught.value.code == "missing-shard"
    assert gone.name in (caught.value.cause or "")


def test_a_quant_that_is_not_there_is_told_with_those_that_are(root: Path, environ: dict[str, str]) -> None:
    missing = Quant(name="UD-Q9", folder="UD-Q9", size_bytes=1, quality_rank=1)
    with pytest.raises(UsageError) as caught:
        list_set(REPOSITORY, missing, revision=COMMIT, environ=environ)
    assert caught.value.code == "quant-not-there"
    assert QUANT.folder in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("repository", "revision", "code"),
    [
        (REPOSITORY, OTHER, "unknown-revision"),
        (REPOSITORY, "no-branch", "unknown-revision"),
        ("nobody/nothing", COMMIT, "no-such-repository"),
        ("not a name", COMMIT, "no-such-repository"),
    ],
)
def test_what_the_hub_does_not_have_is_a_question_of_usage(
    environ: dict[str, str], repository: str, revision: str, code: str
) -> None:
    def ask() -> object:
        return list_set(repository, QUANT, revision=revision, environ=environ)

    assert code_of(ask, UsageError) == code


@pytest.mark.parametrize(
    "address", ["nonsense", "http://[bad", "http://a b", "http://a:99999", "ftp://x", "http://x\x00"]
)
def test_an_endpoint_that_is_no_address_is_named(tmp_path: Path, address: str) -> None:
    environ = {"HF_ENDPOINT": address, "KIMIGGUF_CACHE": str(tmp_path)}
    assert code_of(lambda: listed(environ), UsageError) == "bad-endpoint"


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_the_token_reaches_the_hub_and_never_its_storage(hub: Hub, environ: dict[str, str]) -> None:
    hub.token = "hf_secret"
    with_token = environ | {"HF_TOKEN": "hf_secret"}
    remote_headers(listed(with_token), environ=with_token)
    seen = {(request.host, request.authorization) for request in hub.requests}
    assert seen == {("hub", "Bearer hf_secret"), ("cdn", None)}


def test_a_gated_repository_says_what_to_do(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    hub.token = "hf_secret"
    for call in (lambda: listed(environ), lambda: remote_headers(remote, environ=environ)):
        with pytest.raises(NetworkError) as caught:
            call()
        assert caught.value.code == "gated"
        assert "HF_TOKEN" in (caught.value.hint or "")


def test_the_surrounding_environment_is_not_asked(
    environ: dict[str, str], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    remote_headers(listed(environ), environ=environ)
    assert {request.authorization for request in hub.requests} == {None}


# -- the headers ------------------------------------------------------------------------------------------------------


def test_headers_come_without_weights_and_only_once(root: Path, hub: Hub, environ: dict[str, str]) -> None:
    events: list[Event] = []
    remote = listed(environ)
    shards = remote_headers(remote, environ=environ, listen=events.append)
    assert [tensor.name for tensor in shards.tensors] == [f"blk.{n}.ffn_norm.weight" for n in range(3)]
    assert shards.size_bytes == remote.size_bytes
    assert shards.metadata["kimi-k3.block_count"] == 93
    assert any(isinstance(event, Step) for event in events)
    assert any(isinstance(event, Advance) for event in events)
    asked = len(hub.requests)
    assert remote_headers(remote, environ=environ).files == shards.files
    assert len(hub.requests) == asked


def test_kimi_k3_at_its_true_size_costs_less_than_ten_megabytes(
    skeleton: Callable[[str], Path],
    tmp_path: Path,
    environ: dict[str, str],
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = hub.commits[COMMIT]
    shutil.rmtree(folder_of(root))
    folder_of(root).symlink_to(skeleton("UD-IQ1_S"))
    repository = root / REPOSITORY
    for path in sorted(folder_of(root).iterdir()):  # half a terabyte of holes is not hashed for this
        digest = hashlib.sha256(path.name.encode()).hexdigest()
        stat = path.stat()
        hub._hashes[str(path), stat.st_size, stat.st_mtime_ns] = File(
            path=path.relative_to(repository).as_posix(), size=stat.st_size, oid=digest[:40], sha256=digest
        )
    monkeypatch.setattr(Hub, "files", lambda hub, *_: list(hub._hashes.values()))  # rglob does not follow the link
    remote = listed(environ)
    assert remote.size_bytes > 500e9
    shards = remote_headers(remote, environ=environ)
    assert len(shards.tensors) == shards.metadata["split.tensors.count"]
    assert sum(hub.sent_bytes.values()) < 10e6
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    write_stubs(shards, stubs)
    assert sum(path.stat().st_size for path in stubs.iterdir()) == remote.size_bytes
    assert sum(path.stat().st_blocks * 512 for path in stubs.iterdir()) < 50e6


def test_a_shard_that_is_all_header_comes_in_few_requests_and_no_byte_twice() -> None:
    tokens = 163_840
    keys = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, tokens)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + keys + (struct.pack("<Q", 34) + b"t" * 34) * tokens
    file = RemoteFile(path="q/x.gguf", size_bytes=len(data), sha256=None)
    remote = RemoteSet(repository=REPOSITORY, commit=COMMIT, quant="q", files=(file,))
    asked: list[tuple[int, int]] = []

    def read(_file: RemoteFile, start: int, count: int) -> bytes:
        asked.append((start, count))
        return data[start : start + count]

    assert _fetch(read, remote, file)[1] == data
    assert len(data) > 6.8e6
    assert sum(count for _, count in asked) == len(data)
    assert len(asked) <= 7


def test_ctrl_c_leaves_no_thread_reading(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    hub.bytes_per_second = 20_000

    def interrupt(event: Event) -> None:
        if isinstance(event, Advance):
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        remote_headers(remote, environ=environ, listen=interrupt)
    assert time.monotonic() - started < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headers")]


def test_what_was_read_once_is_good_without_a_hub(root: Path, tmp_path: Path) -> None:
    with serve(root) as hub:
        environ = {"HF_ENDPOINT": hub.url, "KIMIGGUF_CACHE": str(tmp_path / "cache")}
        remote = listed(environ)
        shards = remote_headers(remote, environ=environ)
    assert code_of(lambda: listed(environ), NetworkError) == "hub-unreachable"
    assert list_set(REPOSITORY, QUANT, revision=COMMIT, environ=environ, or_known=True) == remote
    offline = environ | {"HF_HUB_OFFLINE": "1"}
    assert listed(offline) == remote
    assert remote_headers(remote, environ=offline).files == shards.files


def test_offline_without_a_memory_is_told_at_once(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    asked = len(hub.requests)
    offline = environ | {"HF_HUB_OFFLINE": "1", "KIMIGGUF_CACHE": environ["KIMIGGUF_CACHE"] + "2"}
    assert code_of(lambda: listed(offline), NetworkError) == "offline"
    assert code_of(lambda: listed(offline, "main"), NetworkError) == "offline"
    assert code_of(lambda: remote_headers(remote, environ=offline), NetworkError) == "offline"
    assert len(hub.requests) == asked


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-40], lambda data: data[:50] + b"\xff" + data[51:], lambda _: b""]
)
def test_a_damaged_memory_is_read_again(hub: Hub, environ: dict[str, str], damage: Callable[[bytes], bytes]) -> None:
    remote = listed(environ)
    shards = remote_headers(remote, environ=environ)
    kept = shards.files[1].header_path
    kept.write_bytes(damage(kept.read_bytes()))
    asked = len(hub.gets())
    assert remote_headers(remote, environ=environ).files == shards.files
    assert len(hub.gets()) == asked + 1


def test_a_memory_that_cannot_be_written_says_which_setting_moves_it(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = environ | {"KIMIGGUF_CACHE": str(tmp_path / "file" / "cache")}
    remote = listed(blocked)
    with pytest.raises(MachineError) as caught:
        remote_headers(remote, environ=blocked)
    assert "KIMIGGUF_CACHE" in (caught.value.hint or "")


def test_a_foreign_shard_is_found_before_a_weight_is_fetched(
    root: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    other = write_set(tmp_path / "other", tensors=5)
    target = folder_of(root) / "Kimi-K3-UD-IQ1_S-00002-of-00004.gguf"
    target.write_bytes(other[1].read_bytes())
    remote = listed(environ)
    with pytest.raises(IntegrityError) as caught:
        remote_headers(remote, environ=environ)
    assert caught.value.code == "foreign-shard"
    assert target.name in caught.value.message


def test_a_set_that_lacks_tensors_is_found_before_a_weight_is_fetched(root: Path, environ: dict[str, str]) -> None:
    path = folder_of(root) / "Kimi-K3-UD-IQ1_S-00001-of-00004.gguf"
    data = path.read_bytes()
    key = b"split.tensors.count" + struct.pack("<Ii", 5, 3)
    assert key in data
    for file in folder_of(root).iterdir():
        file.write_bytes(file.read_bytes().replace(key, b"split.tensors.count" + struct.pack("<Ii", 5, 2573)))
    remote = listed(environ)
    assert code_of(lambda: remote_headers(remote, environ=environ), IntegrityError) == "tensor-count"


def test_a_file_that_is_not_the_listed_one_is_refused(root: Path, environ: dict[str, str]) -> None:
    remote = listed(environ)
    path = folder_of(root) / remote.files[2].name
    path.write_bytes(path.read_bytes() + bytes(64))
    with pytest.raises(IntegrityError) as caught:
        remote_headers(remote, environ=environ)
    assert caught.value.code == "changed-on-hub"
    assert path.name in caught.value.message


def test_a_header_that_claims_everything_fetches_next_to_nothing(hub: Hub, root: Path, environ: dict[str, str]) -> None:
    path = folder_of(root) / "Kimi-K3-UD-IQ1_S-00001-of-00004.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 200 << 20)
    path.write_bytes(head)
    os.truncate(path, 300 << 20)
    remote = listed(environ)
    assert code_of(lambda: remote_headers(remote, environ=environ), IntegrityError) == "header-too-large"
    assert sum(hub.sent_bytes.values()) < 1 << 20


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Kind.CUT, Kind.RESET, Kind.SHORT, Kind.LONG, Kind.WRONG_LENGTH, Kind.IGNORE_RANGE, Kind.MOVED_RANGE,
             Kind.TOO_MANY, Kind.ERROR, Kind.UNAVAILABLE, Kind.EXPIRED, Kind.HTML],
)  # fmt: skip
def test_one_bad_answer_is_got_over(hub: Hub, environ: dict[str, str], kind: Kind) -> None:
    remote = listed(environ)
    hub.faults = first(Fault(kind=kind, after_bytes=10), file=remote.files[1].name)
    assert len(remote_headers(remote, environ=environ).tensors) == 3


def test_answers_of_all_kinds_end_in_headers_or_an_error_of_ours(
    hub: Hub, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = listed(environ)
    kinds = [kind for kind in Kind if kind is not Kind.STALL]
    monkeypatch.setattr(hub_ranges, "_BACKOFF_SECONDS", 0.01)
    for seed in range(12):
        hub.faults = by_seed(seed, rate=0.5, kinds=kinds, per_place=2)
        fresh = environ | {"KIMIGGUF_CACHE": str(tmp_path / f"cache{seed}")}
        try:
            assert len(remote_headers(remote, environ=fresh).tensors) == 3
        except (IntegrityError, NetworkError) as error:
            assert error.message  # noqa: PT017 -- either is right; anything else fails the test


def test_a_hotels_sign_in_page_is_no_model(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    hub.faults = always(Fault(kind=Kind.HTML), file=remote.files[0].name)
    assert code_of(lambda: remote_headers(remote, environ=environ), NetworkError) == "bad-answer"


def test_garbage_is_refused_and_not_remembered(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    hub.faults = always(Fault(kind=Kind.GARBAGE), file=remote.files[1].name)
    assert code_of(lambda: remote_headers(remote, environ=environ), IntegrityError) == "not-gguf"
    hub.faults = lambda _request: None
    assert len(remote_headers(remote, environ=environ).tensors) == 3


def test_silence_is_given_up(hub: Hub, environ: dict[str, str]) -> None:
    remote = listed(environ)
    hub.faults = always(Fault(kind=Kind.STALL, seconds=30))
    reader = RangeReader(remote, environ=environ, most_bytes=1 << 20, wait=lambda _seconds: None, silence_seconds=0.1)
    started = time.monotonic()
    try:
        assert code_of(lambda: reader.read(remote.files[0], 0, 100), NetworkError) == "bad-answer"
    finally:
        reader.close()
    assert time.monotonic() - started < 5


def test_no_hub_is_told_within_seconds_and_with_what_works(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    environ = {"HF_ENDPOINT": url, "KIMIGGUF_CACHE": str(tmp_path)}
    remote = RemoteSet(
        repository=REPOSITORY,
        commit=COMMIT,
        quant="x",
        files=(RemoteFile(path="x/x.gguf", size_bytes=99, sha256=None),),
    )
    started = time.monotonic()
    for call in (lambda: listed(environ), lambda: remote_headers(remote, environ=environ)):
        with pytest.raises(NetworkError) as caught:
            call()
        assert (caught.value.code, caught.value.exit_code) == ("hub-unreachable", ExitCode.NETWORK)
        assert caught.value.hint
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, b"<html>Sign in to the hotel network</html>", "bad-answer"),
        (200, b"[]", "bad-answer"),
        (200, b"{}", "bad-answer"),
        (200, b'{"id":"a/b","sha":"main","siblings":[]}', "bad-answer"),
        (418, b"tea", "bad-answer"),
        (503, b"busy", "hub-unreachable"),
    ],
)
def test_what_is_no_hub_is_not_believed(tmp_path: Path, status: int, body: bytes, code: str) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the name is the base class's
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            environ = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "KIMIGGUF_CACHE": str(tmp_path)}
            assert code_of(lambda: listed(environ), NetworkError) == code
        finally:
            server.shutdown()
            thread.join()
