"""Fetching against a hub that works, and one that does not."""

import threading
import time
from dataclasses import replace

import pytest
from download.conftest import FAST, KIB, Scene
from fakes.hub_faults import REFUSALS, TRANSIENT, Fault, Kind, always, by_seed, first

from kimigguf.download.store import SetState
from kimigguf.errors import IntegrityError, KimiggufError, MachineError, NetworkError
from kimigguf.events import Advance, Notice


def test_a_set_arrives_whole_with_several_ranges_in_flight(scene: Scene) -> None:
    stored = scene.get()
    scene.assert_whole()
    assert stored.state is SetState.WHOLE
    assert stored.first.name.endswith("00001-of-00003.gguf")
    assert len(scene.hub.gets()) >= 1 + 11 + 8
    last = [event for event in scene.events if isinstance(event, Advance)][-1]
    assert (last.item, last.done_bytes, last.total_bytes) == ("total", scene.remote.size_bytes, scene.remote.size_bytes)


def test_a_second_run_asks_for_nothing(scene: Scene) -> None:
    scene.get()
    before = len(scene.hub.requests)
    assert scene.get().state is SetState.WHOLE
    assert len(scene.hub.requests) == before


def test_a_touched_file_is_hashed_not_fetched(scene: Scene) -> None:
    stored = scene.get()
    stored.files[1].path.touch()
    before = len(scene.hub.requests)
    assert scene.get().state is SetState.WHOLE
    assert len(scene.hub.requests) == before


def test_a_damaged_file_is_fetched_again_and_the_others_are_not(scene: Scene) -> None:
    stored = scene.get()
    path = stored.files[1].path
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    scene.hub.requests.clear()
    assert scene.get().state is SetState.WHOLE
    scene.assert_whole()
    assert {request.file for request in scene.hub.gets()} == {scene.remote.files[1].path}


@pytest.mark.parametrize("kind", [kind for kind in TRANSIENT if kind is not Kind.STALL])
def test_one_fault_of_a_kind_costs_an_attempt_not_the_download(scene: Scene, kind: Kind) -> None:
    scene.hub.faults = first(Fault(kind=kind, after_bytes=30_000), Fault(kind=kind, after_bytes=10))
    scene.get()
    scene.assert_whole()
    assert scene.hub.sent_bytes[scene.remote.files[1].path] <= 2 * scene.remote.files[1].size_bytes + 1_300_000


def test_a_stall_is_noticed(scene: Scene) -> None:
    scene.hub.faults = first(Fault(kind=Kind.STALL, after_bytes=1000, seconds=60))
    started = time.monotonic()
    scene.get()
    assert time.monotonic() - started < 10
    scene.assert_whole()


@pytest.mark.parametrize("redirect", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_hub_full_of_faults_delivers_in_the_end(scene: Scene, seed: int, redirect: bool) -> None:
    scene.hub.redirect = redirect
    scene.hub.signed_uses = 1
    kinds = [kind for kind in TRANSIENT if redirect or kind is not Kind.EXPIRED]  # only a store signs addresses
    scene.hub.faults = by_seed(seed, rate=0.5, stall_seconds=5, kinds=kinds)
    scene.get(replace(FAST, patience_seconds=20))
    scene.assert_whole()


def test_garbage_is_fetched_once_more_and_never_gets_the_name(scene: Scene) -> None:
    scene.hub.faults = first(Fault(kind=Kind.GARBAGE), file="00002-of-00003.gguf")
    scene.get()
    scene.assert_whole()
    assert any(isinstance(event, Notice) and "wrong SHA-256" in event.text for event in scene.events)


def test_garbage_for_ever_ends_with_the_name_of_the_shard(scene: Scene) -> None:
    scene.hub.faults = always(Fault(kind=Kind.GARBAGE), file="00002-of-00003.gguf")
    with pytest.raises(IntegrityError) as error:
        scene.get()
    assert error.value.code == "hash-mismatch"
    assert "00002-of-00003" in error.value.message
    scene.assert_nothing_wrong()
    assert not (scene.folder / scene.remote.files[1].name).exists()


@pytest.mark.parametrize("kind", [*REFUSALS, Kind.IGNORE_RANGE, Kind.EXPIRED, Kind.CUT])
def test_a_fault_that_does_not_end_is_said_with_its_reason_and_what_is_there_is_kept(scene: Scene, kind: Kind) -> None:
    scene.get(replace(FAST))
    (scene.folder / scene.remote.files[1].name).unlink()
    scene.hub.faults = always(Fault(kind=kind), file="00002-of-00003.gguf")
    with pytest.raises(NetworkError) as error:
        scene.get(replace(FAST, patience_seconds=0.3))
    assert error.value.code == "hub-unreachable"
    assert error.value.cause
    assert (scene.folder / scene.remote.files[2].name).exists()
    scene.assert_nothing_wrong()


def test_retry_after_is_honoured(scene: Scene) -> None:
    scene.hub.faults = first(Fault(kind=Kind.TOO_MANY, seconds=1))
    started = time.monotonic()
    scene.get()
    assert time.monotonic() - started >= 1
    scene.assert_whole()


def test_a_wait_longer_than_our_patience_is_refused_at_once(scene: Scene) -> None:
    scene.hub.faults = first(Fault(kind=Kind.UNAVAILABLE, seconds=4000))
    with pytest.raises(NetworkError, match="does not arrive") as error:
        scene.get()
    assert "4000 s" in (error.value.cause or "")


def test_a_file_that_changes_midway_is_noticed_and_the_good_bytes_stay(scene: Scene) -> None:
    path, seen = scene.served(2), 0

    def change(request: object) -> None:
        nonlocal seen
        if getattr(request, "body", False) and str(getattr(request, "file", "")).endswith("00002-of-00003.gguf"):
            seen += 1
            if seen == 6:
                other = path.with_suffix(".new")
                other.write_bytes(bytes(len(original)))
                other.replace(path)

    original = path.read_bytes()
    scene.hub.before = change
    with pytest.raises(IntegrityError) as error:
        scene.get()
    assert error.value.code == "changed-on-hub"
    scene.assert_nothing_wrong()
    scene.hub.before = None
    path.write_bytes(original)
    scene.hub.sent_bytes.clear()
    scene.get()
    scene.assert_whole()
    assert scene.hub.sent_bytes[scene.remote.files[1].path] < len(original)


def test_other_nodes_with_other_etags_do_not_stop_a_sound_download(scene: Scene) -> None:
    counter = 0

    def touch(_request: object) -> None:
        nonlocal counter
        counter += 1
        import os

        os.utime(scene.served(2), ns=(counter, counter))

    scene.hub.before = touch
    scene.get()
    scene.assert_whole()


def test_a_gated_repository_needs_the_token_and_only_the_hub_sees_it(scene: Scene) -> None:
    scene.hub.token = "hf_secret_of_the_test"
    with pytest.raises(NetworkError) as error:
        scene.get()
    assert error.value.code == "gated"
    scene.get(HF_TOKEN="hf_secret_of_the_test")
    scene.assert_whole()
    assert {request.authorization for request in scene.hub.requests if request.host == "cdn"} == {None}
    for path in scene.models.rglob("*"):
        assert path.is_dir() or b"hf_secret_of_the_test" not in path.read_bytes()
    assert "hf_secret_of_the_test" not in repr(scene.events)


def test_a_name_that_is_gone_from_the_hub_is_said(scene: Scene) -> None:
    scene.served(3).unlink()
    with pytest.raises(NetworkError) as error:
        scene.get()
    assert error.value.code == "not-on-hub"


def test_nothing_listens(scene: Scene) -> None:
    with pytest.raises(NetworkError) as error:
        scene.get(replace(FAST, patience_seconds=0.2), HF_ENDPOINT="http://127.0.0.1:9")
    assert error.value.code == "hub-unreachable"
    assert "refused" in (error.value.cause or "")


def test_a_second_fetch_of_the_same_set_is_told_who_holds_it(scene: Scene) -> None:
    scene.hub.bytes_per_second = 200_000
    outcome: list[KimiggufError] = []
    thread = threading.Thread(target=scene.get)
    thread.start()
    while not scene.hub.gets():
        time.sleep(0.01)
    with pytest.raises(MachineError) as error:
        scene.get(wait=False)
    outcome.append(error.value)
    scene.hub.bytes_per_second = None
    scene.get(wait=True)
    thread.join()
    assert outcome[0].code == "set-busy"
    assert "process" in outcome[0].message
    scene.assert_whole()


def test_ctrl_c_joins_every_thread_and_the_next_run_continues(scene: Scene) -> None:
    scene.hub.bytes_per_second = 100_000
    started = time.monotonic()

    def interrupt(event: object) -> None:
        if isinstance(event, Advance) and event.item == "total" and event.done_bytes > 100 * KIB:
            raise KeyboardInterrupt

    scene.events = type("Sink", (list,), {"append": lambda _self, event: interrupt(event)})()
    with pytest.raises(KeyboardInterrupt):
        scene.get()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kimigguf-")]
    assert time.monotonic() - started < 10
    scene.assert_nothing_wrong()
    scene.events = []
    scene.hub.bytes_per_second = None
    scene.hub.sent_bytes.clear()
    scene.get()
    scene.assert_whole()
    assert sum(scene.hub.sent_bytes.values()) <= scene.remote.size_bytes - 100 * KIB + 5 * FAST.mark_bytes


def test_a_rate_limit_is_kept(scene: Scene) -> None:
    started = time.monotonic()
    scene.get(replace(FAST, bytes_per_second=1_000_000))
    assert time.monotonic() - started >= scene.remote.size_bytes / 1_000_000 - 0.2


def test_the_disk_is_asked_before_the_first_byte(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.download.disk.free_bytes", lambda _folder: scene.remote.size_bytes)
    with pytest.raises(MachineError) as error:
        scene.get()
    assert error.value.code == "disk-full"
    assert not scene.hub.gets()
