import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimigguf.download.lock import hold
from kimigguf.errors import MachineError
from kimigguf.events import Event, Step, ignore

HOLDER = """
import sys, time
from pathlib import Path
from kimigguf.download.lock import hold
from kimigguf.events import ignore
with hold(Path(sys.argv[1]), what="the set", wait=False, listen=ignore):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "in" / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_the_holder_is_named_and_a_dead_one_holds_nothing(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    lock = tmp_path / "in" / "lock"
    try:
        with pytest.raises(MachineError) as error, hold(lock, what="the set", wait=False, listen=ignore):
            pass
        assert error.value.code == "set-busy"
        assert f"process {holder.pid}" in error.value.message
        assert f"kill {holder.pid}" in (error.value.hint or "")
    finally:
        stop(holder)
    with hold(lock, what="the set", wait=False, listen=ignore):
        assert str(os.getpid()) in lock.read_text()
    assert lock.read_text() == ""


def test_waiting_says_for_whom_and_takes_over_when_they_die(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        stop(holder)

    started = time.monotonic()
    with hold(tmp_path / "in" / "lock", what="the set", wait=True, listen=listen):
        pass
    assert time.monotonic() - started < 10
    assert [isinstance(event, Step) and str(holder.pid) in event.text for event in events] == [True]


def _count(path: Path, lock: Path) -> None:
    for _ in range(20):
        with hold(lock, what="the counter", wait=True, listen=ignore):
            value = int(path.read_text())
            time.sleep(0.001)
            path.write_text(str(value + 1))


def test_only_one_process_at_a_time_is_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.download.lock._POLL_SECONDS", 0.005)
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(counter, tmp_path / "lock")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert counter.read_text() == "60"


def test_a_lock_that_is_removed_with_its_set_does_not_let_two_in(tmp_path: Path) -> None:
    lock = tmp_path / "in" / "lock"
    inside: list[str] = []
    with hold(lock, what="the set", wait=False, listen=ignore):
        waiter = threading.Thread(target=_enter, args=(lock, inside))
        waiter.start()
        time.sleep(0.2)
        lock.unlink()
        lock.parent.rmdir()
    waiter.join(10)
    assert inside == ["in"]


def _enter(lock: Path, inside: list[str]) -> None:
    with hold(lock, what="the set", wait=True, listen=ignore):
        assert str(os.getpid()) in lock.read_text()
        with pytest.raises(MachineError), hold(lock, what="the set", wait=False, listen=ignore):
            pass
        inside.append("in")
