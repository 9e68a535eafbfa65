"""The registry of running servers: files are never believed over the process table."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes.processes import free_port, is_running, until

from kimigguf.engines import registry
from kimigguf.engines.deaths import deaths
from kimigguf.engines.footprint import Baseline, Held
from kimigguf.engines.registry import (
    Entry,
    Life,
    ProcessId,
    check_name,
    entered,
    entries,
    find,
    life_of,
    require_new,
    reserved,
    restarting,
    stop,
)
from kimigguf.errors import MachineError, UsageError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def me() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def entry(name: str = "k3", *, supervisor: ProcessId | None = None, engine: ProcessId | None = None) -> Entry:
    return Entry(
        name=name,
        supervisor=supervisor or me(),
        engine=engine or me(),
        host="127.0.0.1",
        port=free_port(),
        alias="kimi-k3",
        quant=None,
        log="/dev/null",
        plan_file="p.json",
        arguments=("UD-IQ1_M",),
        folder="/",
        started_at="2026-11-30T00:00:00Z",
        planned_bytes=1,
    )


def ended() -> ProcessId:
    """A process that has ended: its id may be another's any moment."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        found = ProcessId.of(process.pid)
    assert found is not None
    return found


def test_a_server_is_registered_while_it_runs_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    mine = entry()
    with entered(tmp_path, mine):
        assert entries(tmp_path) == (mine,)
        assert (tmp_path / "k3.json").stat().st_mode & 0o077 == 0
    assert entries(tmp_path) == ()


def test_a_process_id_that_another_process_has_by_now_is_not_taken_for_ours(tmp_path: Path) -> None:
    """After a reboot the file is still there and the id belongs to anybody: to stop that would be a disaster."""
    before_reboot = replace(me(), started=me().started - 1000)
    assert before_reboot.process() is None
    other = entry(supervisor=before_reboot, engine=before_reboot)
    assert life_of(other) is Life.ENDED
    stop(other, grace_seconds=0.1)  # this test would end here
    assert is_running(os.getpid())


def test_files_of_servers_that_are_gone_are_cleared(tmp_path: Path) -> None:
    gone = ended()
    with entered(tmp_path, entry(supervisor=gone, engine=gone)):
        assert entries(tmp_path) == ()
        assert list(tmp_path.glob("[!.]*")) == []


def test_an_end_that_nobody_saw_is_remembered_and_one_in_order_is_not(tmp_path: Path) -> None:
    """A supervisor that ends in order removes its entry, so one that is left over is of a crash."""
    gone = ended()
    left = entry("crashed", supervisor=gone, engine=gone)
    (tmp_path / "crashed.json").write_text(json.dumps(asdict(left)))
    with entered(tmp_path, entry("stopped")):
        pass
    assert [one.name for one in entries(tmp_path)] == []
    (death,) = deaths(tmp_path)
    assert (death.name, death.seen, death.log, death.arguments) == ("crashed", False, left.log, left.arguments)


@pytest.mark.parametrize("content", ["", "{}", "no json"])
def test_a_file_that_tells_of_no_death_is_cleared(tmp_path: Path, content: str) -> None:
    (tmp_path / ".x.died").write_text(content)
    assert deaths(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_waits_to_be_started_again_is_found(tmp_path: Path) -> None:
    waiting = entry(engine=ended())
    with entered(tmp_path, waiting):
        assert entries(tmp_path) == (waiting,)
        assert life_of(waiting) is Life.ENDED


@pytest.mark.parametrize("content", ["", "{}", "no json", json.dumps({"schema": "kimigguf.server/9"})])
def test_a_file_that_is_no_registration_does_no_harm(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    assert entries(tmp_path) == ()


def test_an_engine_whose_supervisor_was_killed_is_found_and_stopped(tmp_path: Path) -> None:
    engine = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        running = ProcessId.of(engine.pid)
        assert running is not None
        orphan = entry(supervisor=ended(), engine=running)
        with entered(tmp_path, orphan):
            assert life_of(orphan) is Life.ORPHANED
            assert entries(tmp_path) == (orphan,)
            stop(orphan, grace_seconds=5)
            assert until(lambda: not is_running(engine.pid))
    finally:
        engine.kill()
        engine.wait()


def test_a_supervisor_that_nobody_reaps_is_not_waited_for() -> None:
    with subprocess.Popen(SLEEP) as unreaped:  # it stays a zombie until the block ends
        supervisor = ProcessId.of(unreaped.pid)
        began = time.monotonic()
        stop(entry(supervisor=supervisor, engine=ended()), grace_seconds=20)
        assert time.monotonic() - began < 10


def test_a_living_engine_that_does_not_answer_is_silent_not_ready() -> None:
    assert life_of(entry()) is Life.SILENT


def test_one_server_needs_no_name_and_several_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find(tmp_path, None)
    assert caught.value.code == "no-server"
    with entered(tmp_path, entry("a")):
        assert find(tmp_path, None).name == "a"
        with entered(tmp_path, entry("b")):
            with pytest.raises(UsageError) as caught:
                find(tmp_path, None)
            assert caught.value.code == "which-server"
            assert "a, b" in (caught.value.hint or "")
            assert find(tmp_path, "b").name == "b"
            with pytest.raises(UsageError) as caught:
                find(tmp_path, "c")
            assert "a, b" in (caught.value.hint or "")


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    with entered(tmp_path, entry("a")):
        with pytest.raises(UsageError):
            require_new(tmp_path, "a")
        require_new(tmp_path, "b")


HOLD = """
import sys, time
from pathlib import Path
from kimigguf.engines.registry import reserved
with reserved(Path(sys.argv[1]), "twin"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_name_is_taken_before_its_server_runs_and_free_once_its_holder_is_dead(tmp_path: Path) -> None:
    """Two that are started together load for minutes before either is registered."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UsageError) as caught, reserved(tmp_path, "twin"):
                pytest.fail("two have the name")
            assert caught.value.code == "name-in-use"
            with reserved(tmp_path, "other"):
                pass
        finally:
            holder.kill()
    with reserved(tmp_path, "twin"):
        assert entries(tmp_path) == ()


def test_the_name_of_a_living_server_cannot_be_reserved_even_if_its_holder_is_dead(tmp_path: Path) -> None:
    orphan = entry("twin", supervisor=ended())
    with entered(tmp_path, orphan), pytest.raises(UsageError), reserved(tmp_path, "twin"):
        pytest.fail("the engine of that name lives")


def test_who_ends_removes_nobody_elses_entry(tmp_path: Path) -> None:
    other = entry("twin")
    with entered(tmp_path, entry("twin")):
        (tmp_path / "twin.json").write_text(json.dumps(asdict(other)))
    assert entries(tmp_path) == (other,)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_name_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_an_entry_made_while_a_dead_one_is_cleared_away_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``restart`` writes the new server's file under the old one's name at the moment when ``status`` clears it."""
    path, new = tmp_path / "twin.json", entry("twin")
    path.write_text(json.dumps(asdict(entry("twin", supervisor=ended(), engine=ended()))))
    read = registry._read

    def late(asked: Path) -> Entry | None:
        found = read(asked)
        monkeypatch.setattr(registry, "_read", read)
        path.write_text(json.dumps(asdict(new)))  # after it was read and before it is removed
        return found

    monkeypatch.setattr(registry, "_read", late)
    assert entries(tmp_path) == ()
    assert entries(tmp_path) == (new,)


def test_an_entry_that_vanishes_between_listing_and_reading_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = tmp_path / "twin.json", entry("twin")
    path.touch()
    read = registry._read

    def vanishing(asked: Path) -> Entry | None:
        path.unlink()
        monkeypatch.setattr(registry, "_read", read)
        found = read(asked)
        path.write_text(json.dumps(asdict(new)))
        return found

    monkeypatch.setattr(registry, "_read", vanishing)
    assert entries(tmp_path) == ()
    assert entries(tmp_path) == (new,)


def test_what_is_learned_when_a_server_is_ready_is_kept_with_it(tmp_path: Path) -> None:
    stands = Baseline(resident=None, held=Held(requests=4), generated_tokens=120)
    mine = entry()
    with entered(tmp_path, mine) as registration:
        registration.write(replace(mine, ready=stands))
        assert entries(tmp_path)[0].ready == stands
    assert entries(tmp_path) == ()


def test_a_full_disk_ends_no_server_that_has_loaded_but_refuses_one_that_nobody_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mine = entry()
    with entered(tmp_path, mine) as registration:
        monkeypatch.setattr(Path, "write_text", full)
        registration.write(replace(mine, planned_bytes=9))
        assert entries(tmp_path) == (mine,)
    assert entries(tmp_path) == ()
    with pytest.raises(MachineError) as error, entered(tmp_path, mine):
        pytest.fail("it serves and cannot be found")
    assert (error.value.code, error.value.cause) == ("state-unwritable", "No space left on device")
    assert list(tmp_path.glob("*.part")) == []


def test_a_living_server_of_another_version_keeps_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(asdict(entry("newer")) | {"schema": "kimigguf.server/2"}))
    assert entries(tmp_path) == ()
    assert path.exists()
    path.write_text(json.dumps(asdict(entry("newer", supervisor=ended(), engine=ended())) | {"schema": "x"}))
    assert entries(tmp_path) == ()
    assert not path.exists()


def test_two_cannot_restart_one_server_at_the_same_time(tmp_path: Path) -> None:
    with restarting(tmp_path, "twin"):
        with pytest.raises(UsageError) as caught, restarting(tmp_path, "twin"):
            pytest.fail("two have the right")
        assert caught.value.code == "name-in-use"
        with pytest.raises(UsageError), reserved(tmp_path, "twin", to_start=True):
            pytest.fail("serve --detach starts what restart is starting")
        with reserved(tmp_path, "twin"):  # the process that is started takes the name itself
            pass
