import hashlib
import multiprocessing
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.gguf_set import write_set
from fakes.ollama_store import Ollama
from fakes.sources import source_of

from kimigguf.errors import IntegrityError, KimiggufError, MachineError, NetworkError, ServerError, UsageError
from kimigguf.events import Advance, Event, Notice, ignore
from kimigguf.memory.settings import Settings
from kimigguf.ollama.registration import Registration, default_name, plan, register, remove
from kimigguf.ollama.source import Source


def hashed(source: Source) -> Source:
    """The same set as a download leaves it: every file's hash on record."""
    files = tuple(replace(file, sha256=hashlib.sha256(file.path.read_bytes()).hexdigest()) for file in source.files)
    return replace(source, files=files)


def planned(stand_in: Ollama, source: Source, *, copy: bool = True, **told: Any) -> Registration:
    environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
    return plan(source, environ, copy=copy, **told)


def uploads(stand_in: Ollama) -> int:
    return sum(method == "POST" and path.startswith("/api/blobs/") for method, path in stand_in.requests)


def test_a_set_is_registered_with_k3s_parameters(stand_in: Ollama, source: Source) -> None:
    registration = planned(stand_in, source, settings=Settings(context_tokens=8192), licence="Kimi K3 License")
    assert registration.blocking is None
    blobs = register(registration, ignore)
    assert [blob.sent for blob in blobs] == [True] * 4
    model = stand_in.models()["kimi-k3:ud-iq1_s"]
    shards = [layer["digest"] for layer in model["layers"] if layer["mediaType"].endswith(".model")]
    assert shards == [blob.digest for blob in blobs]
    texts = {layer["mediaType"].rpartition(".")[2]: stand_in.blob(layer["digest"]) for layer in model["layers"]}
    assert '"num_ctx": 8192' in texts["params"].read_text()
    assert '"top_k": 0' in texts["params"].read_text()
    assert texts["license"].read_text() == "Kimi K3 License"


def test_nothing_is_sent_twice(stand_in: Ollama, source: Source) -> None:
    source = hashed(source)
    register(planned(stand_in, source), ignore)
    got = stand_in.received_bytes
    second = planned(stand_in, source, name="again")
    assert (second.need.send_bytes, second.need.present_bytes) == (0, source.size_bytes)
    blobs = register(second, ignore)
    assert not any(blob.sent for blob in blobs)
    assert stand_in.received_bytes == got


def test_a_dropped_connection_is_told_and_the_next_run_goes_on(stand_in: Ollama, source: Source) -> None:
    said: list[Event] = []

    def cut(method: str, path: str) -> None:
        if method == "POST" and path.startswith("/api/blobs/") and uploads(stand_in) == 3:
            stand_in.drop_after_bytes = 5_000

    stand_in.before = cut
    with pytest.raises(NetworkError) as error:
        register(planned(stand_in, source), said.append)
    assert error.value.code == "ollama-connection-lost"
    assert any(isinstance(event, Notice) and "2 blobs" in event.text for event in said)
    assert stand_in.models() == {}
    stand_in.before = None
    blobs = register(planned(stand_in, source), ignore)
    assert [blob.sent for blob in blobs] == [False, False, True, True]


def test_a_cancelled_registration_leaves_no_model_and_no_half_blob(stand_in: Ollama, source: Source) -> None:
    stand_in.bytes_per_second = 100_000

    def interrupt() -> None:
        while uploads(stand_in) < 2:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        register(planned(stand_in, source), ignore)
    thread.join()
    assert stand_in.models() == {}
    stand_in.bytes_per_second = None
    for _ in range(100):
        if all(blob.name.count("-") == 1 and len(blob.name) == 71 for blob in stand_in.blobs.iterdir()):
            break
        time.sleep(0.05)  # the server notices in its own time that nobody is there any more
    register(planned(stand_in, source), ignore)
    assert "kimi-k3:ud-iq1_s" in stand_in.models()


def test_killed_at_any_moment_the_next_run_completes_and_sends_no_blob_twice(stand_in: Ollama, tmp_path: Path) -> None:
    source = source_of(write_set(tmp_path / "many", tensors=16))
    chance = random.Random(5)
    stand_in.bytes_per_second = 400_000
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kimigguf.ollama.registration", "kimigguf.events"])
    kills = 0
    while (registration := planned(stand_in, source)).blocking is None:
        process = processes.Process(target=register, args=(registration, ignore))
        process.start()
        process.join(chance.uniform(0.0, 0.3) if kills < 20 else None)
        if process.exitcode is None:
            kills += 1
            process.kill()
            process.join()
        process.close()
    assert kills >= 8
    shards = [f"sha256:{hashlib.sha256(file.path.read_bytes()).hexdigest()}" for file in source.files]
    assert sorted(stand_in.taken) == sorted(shards)
    assert list(stand_in.models()) == ["kimi-k3:ud-iq1_s"]


def test_progress_reaches_the_end_of_every_file(stand_in: Ollama, source: Source) -> None:
    said: list[Event] = []
    register(planned(stand_in, source), said.append)
    for activity in ("hash", "send"):
        last = {e.item: e for e in said if isinstance(e, Advance) and e.activity == activity}
        assert {name: e.done_bytes for name, e in last.items()} == {f.name: f.size_bytes for f in source.files}


def test_a_recorded_hash_is_not_worked_out_again_and_a_damaged_shard_is_named(stand_in: Ollama, source: Source) -> None:
    source = hashed(source)
    victim = source.files[2]
    data = bytearray(victim.path.read_bytes())
    data[-1] ^= 1
    victim.path.write_bytes(data)
    said: list[Event] = []
    with pytest.raises(IntegrityError) as error:
        register(planned(stand_in, source), said.append)
    assert (error.value.code, victim.name in error.value.message) == ("shard-damaged", True)
    assert not any(isinstance(event, Advance) and event.activity == "hash" for event in said)
    assert stand_in.models() == {}


def test_a_shard_that_vanishes_midway_is_named(stand_in: Ollama, source: Source) -> None:
    registration = planned(stand_in, source)
    source.files[3].path.unlink()
    with pytest.raises(MachineError) as error:
        register(registration, ignore)
    assert error.value.code == "unreadable-shard"


@pytest.mark.parametrize(
    ("told", "code", "kind"),
    [
        ("Error: write /blobs/x: no space left on device", "ollama-no-space", MachineError),
        ("unknown model architecture: 'kimi-k3'", "ollama-load-failed", ServerError),
        ("something new", "ollama-refused", ServerError),
    ],
)
def test_what_ollama_says_while_creating_is_passed_on(
    stand_in: Ollama, source: Source, told: str, code: str, kind: type[KimiggufError]
) -> None:
    stand_in.create_error = told
    with pytest.raises(kind) as error:
        register(planned(stand_in, source), ignore)
    assert (error.value.code, error.value.cause) == (code, told)
    assert stand_in.models() == {}


def refused(stand_in: Ollama, source: Source, kind: type[KimiggufError], code: str, **told: Any) -> KimiggufError:
    """The registration is refused, and nothing was written."""
    before = stand_in.used_bytes()
    registration = planned(stand_in, source, **told)
    with pytest.raises(kind) as error:
        register(registration, ignore)
    assert error.value.code == code
    assert error.value.hint
    assert stand_in.used_bytes() == before
    assert uploads(stand_in) == 0
    return error.value


def test_an_old_ollama_is_refused_before_anything_is_sent(stand_in: Ollama, source: Source) -> None:
    stand_in.version = "0.32.14"
    assert "0.32.15" in str(refused(stand_in, source, MachineError, "ollama-too-old"))


def test_too_little_space_is_refused_with_the_shortage_and_a_way_out(
    stand_in: Ollama, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.version = "0.34.0"
    monkeypatch.setattr("kimigguf.ollama.storage.shutil.disk_usage", lambda _path: SimpleNamespace(free=5_000))
    error = refused(stand_in, source, MachineError, "ollama-no-space")
    assert "1.3 MB of disk are missing" in error.message
    assert "kimigguf serve UD-IQ1_S --ollama-api" in (error.hint or "")
    registration = planned(stand_in, source)
    assert [way.fits for way in registration.survey.candidates] == [False, False]


def test_a_taken_name_is_refused_and_replaced_only_with_force(stand_in: Ollama, source: Source) -> None:
    register(planned(stand_in, source, name="mine"), ignore)
    stand_in.requests.clear()
    refused(stand_in, source, UsageError, "name-taken", name="mine")
    refused(stand_in, source, UsageError, "name-taken", name="MINE:latest")
    register(planned(stand_in, source, name="mine", force=True, settings=Settings(context_tokens=99)), ignore)
    assert list(stand_in.models()) == ["mine:latest"]


@pytest.mark.parametrize("name", ["", "a b", "a:b:c", "../x", "-x", "a/b/c/d", "x" * 200])
def test_a_bad_name_is_refused(stand_in: Ollama, source: Source, name: str) -> None:
    if name:
        refused(stand_in, source, UsageError, "bad-name", name=name)
    else:
        assert planned(stand_in, source, name=name).name == default_name(source)


def test_symbolic_links_are_refused(stand_in: Ollama, source: Source) -> None:
    error = refused(stand_in, replace(source, links=(source.files[0].name,)), UsageError, "symlinked-shards")
    assert "cp -L" in (error.hint or "")


def test_a_projector_among_the_shards_is_refused(stand_in: Ollama, source: Source) -> None:
    refused(stand_in, replace(source, projectors=("mmproj-F16.gguf",)), UsageError, "projector-among-shards")


def test_shards_that_may_not_be_read_are_refused(stand_in: Ollama, source: Source) -> None:
    refused(stand_in, replace(source, unreadable=(source.files[1].name,)), MachineError, "unreadable-shard")


def test_tensor_types_of_a_fork_are_refused(stand_in: Ollama, source: Source) -> None:
    refused(stand_in, replace(source, unread_tensors=3), UsageError, "quant-unsupported")


def test_a_set_that_is_not_here_is_refused_with_the_command_that_gets_it(stand_in: Ollama, source: Source) -> None:
    error = refused(stand_in, replace(source, files=(), folder=Path("/models")), IntegrityError, "not-downloaded")
    assert (error.hint, error.cause) == ("kimigguf download UD-IQ1_S", "nothing of it lies in /models")


def test_a_remote_server_is_refused_unless_it_has_every_shard(
    stand_in: Ollama, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimigguf.ollama.server.is_local", lambda _url: False)
    source = hashed(source)
    refused(stand_in, source, MachineError, "ollama-remote")
    for file in source.files:
        stand_in.add_blob(file.path.read_bytes())
    register(planned(stand_in, source), ignore)
    assert (uploads(stand_in), list(stand_in.models())) == (0, ["kimi-k3:ud-iq1_s"])


def test_an_unknown_models_folder_is_refused_without_force(stand_in: Ollama, source: Source) -> None:
    environ = {"OLLAMA_HOST": stand_in.url}
    with pytest.raises(MachineError) as error:
        register(plan(source, environ), ignore)
    assert error.value.code == "ollama-folder-unknown"
    register(plan(source, environ, force=True), ignore)
    assert list(stand_in.models()) == ["kimi-k3:ud-iq1_s"]


def test_a_folder_that_is_not_this_servers_is_not_measured(stand_in: Ollama, source: Source, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "blobs").mkdir(parents=True)
    (other / "blobs" / f"sha256-{'a' * 64}").write_bytes(b"somebody else's")
    registration = plan(source, {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(other)})
    assert registration.folder is None


def test_a_folder_is_confirmed_by_a_blob_that_the_server_has(stand_in: Ollama, source: Source) -> None:
    assert planned(stand_in, source).folder is not None
    assert planned(stand_in, source).folder.confirmed is None  # type: ignore[union-attr]  # not None, as asserted above
    stand_in.add_blob(b"anything")
    folder = planned(stand_in, source).folder
    assert folder is not None
    assert folder.confirmed is True


def test_a_server_that_is_not_there_is_refused(source: Source, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as error:
        register(plan(source, {"OLLAMA_HOST": "127.0.0.1:9", "PATH": str(tmp_path)}), ignore)
    assert (error.value.code, error.value.hint) == (
        "ollama-unreachable",
        "curl -fsSL https://ollama.com/install.sh | sh",
    )
    assert "no ollama is on PATH" in error.value.message
    (tmp_path / "ollama").touch(mode=0o755)
    with pytest.raises(MachineError) as error:
        register(plan(source, {"OLLAMA_HOST": "127.0.0.1:9", "PATH": str(tmp_path)}), ignore)
    assert (error.value.code, error.value.hint) == ("ollama-unreachable", "ollama serve")


def test_a_model_is_removed_with_its_bytes_and_an_unknown_one_is_named(stand_in: Ollama, source: Source) -> None:
    registration = planned(stand_in, source)
    register(registration, ignore)
    assert remove(registration.server, "kimi-k3:ud-iq1_s") >= source.size_bytes
    assert stand_in.models() == {}
    assert list(stand_in.blobs.iterdir()) == []
    with pytest.raises(UsageError) as error:
        remove(registration.server, "kimi-k3:ud-iq1_s")
    assert error.value.code == "no-such-model"
