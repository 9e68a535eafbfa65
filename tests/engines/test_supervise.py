"""What a supervised child can do wrong: each test is named after the harm it prevents."""

import os
import signal
import sys
from pathlib import Path

import pytest
from fakes.processes import is_running, until

from kimigguf.engines.diagnose import Exit
from kimigguf.engines.supervise import Child, fresh_log
from kimigguf.errors import MachineError


def start(code: str, folder: Path) -> Child:
    return Child.start([sys.executable, "-u", "-c", code], dict(os.environ), folder / "child.log")


def said(child: Child, word: str) -> bool:
    return until(lambda: word in child.log_tail())


def test_a_child_that_ends_on_sigterm_ends_within_the_grace(tmp_path: Path) -> None:
    with start("import time; print('up'); time.sleep(60)", tmp_path) as child:
        assert said(child, "up")
    assert child.exit() == Exit(signal_number=signal.SIGTERM)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    child = start(ignore, tmp_path)
    assert said(child, "up")
    assert child.stop(grace_seconds=0.2) == Exit(signal_number=signal.SIGKILL)


@pytest.mark.parametrize("leader_dies_first", [False, True])
def test_a_grandchild_does_not_outlive_the_group(tmp_path: Path, leader_dies_first: bool) -> None:
    code = (
        "import subprocess, sys, time\n"
        "import signal\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'])\n"
        "time.sleep(0.3); print(f'pid={grandchild.pid};')\n" + ("" if leader_dies_first else "time.sleep(60)\n")
    )
    child = start(code, tmp_path)
    assert said(child, ";")
    pid = int(child.log_tail().partition("pid=")[2].partition(";")[0])
    if leader_dies_first:
        assert child.wait(5) == Exit(code=0)
        assert is_running(pid)
    child.stop(grace_seconds=0.5)
    assert until(lambda: not is_running(pid))


def test_a_flood_of_output_does_not_stall_the_child(tmp_path: Path) -> None:
    """Into a pipe that nobody reads it would block at 64 KiB."""
    child = start("print('x' * 5_000_000); print('end')", tmp_path)
    assert child.wait(20) == Exit(code=0)
    assert child.log_tail().endswith("end\n")
    assert len(child.log_tail()) == 64 << 10


def test_a_ctrl_c_on_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    with start("import os; print(f'{os.getpid()} {os.getpgid(0)} {os.getsid(0)};'); input()", tmp_path) as child:
        assert said(child, ";")
    pid, group, session = child.log_tail().partition(";")[0].split()
    assert pid == group == session
    assert int(group) != os.getpgid(0)


def test_stop_may_be_called_again_after_the_end(tmp_path: Path) -> None:
    child = start("raise SystemExit(3)", tmp_path)
    assert child.wait(10) == Exit(code=3)
    assert child.stop() == child.stop() == Exit(code=3)


def test_a_program_that_does_not_exist_is_a_machine_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        Child.start([str(tmp_path / "nothing")], {}, tmp_path / "log")
    assert caught.value.code == "engine-unusable"


def test_a_log_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError) as caught:
        Child.start(["true"], {}, tmp_path / "file" / "log")
    assert caught.value.code == "log-unwritable"


def test_the_log_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """Prompts and file names stand in it."""
    with start("print('up')", tmp_path) as child:
        assert child.log.stat().st_mode & 0o077 == 0


def test_old_logs_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(8):
        fresh_log(tmp_path, "serve-1", keep=3).touch()
    assert len(list(tmp_path.glob("*.log"))) == 3
