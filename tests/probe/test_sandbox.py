import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from kimigguf.probe import sandbox, sandbox_child
from kimigguf.probe.sandbox import Limits, run_test

pytestmark = pytest.mark.skipif(sandbox.closed() is not None, reason=str(sandbox.closed()))


def refused(code: str, **limits: float) -> str:
    """Why the code did not come to its end; that it did is what no test here wants."""
    found = run_test(code, "", Limits(**limits) if limits else None)  # type: ignore[arg-type]  # whole numbers
    assert found.passed is False, found
    return found.why


def test_good_code_passes_and_wrong_code_says_what_it_raised() -> None:
    code = "import math, json, re\ndef area(r): return round(math.pi * r * r, 2)"
    assert run_test(code, "assert area(2) == 12.57").passed is True
    found = run_test(code, "assert area(2) == 12, f'it says {area(2)}'")
    assert (found.passed, found.why) == (False, "AssertionError: it says 12.57")


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit('passed')"])
def test_an_early_exit_is_no_pass(leave: str) -> None:
    refused(leave)


def test_saying_that_it_passed_is_no_pass() -> None:
    refused(f"print('{sandbox_child.READY}'); print('{sandbox_child.PASSED}1'); import os; os._exit(0)")


def test_an_endless_loop_ends_with_its_share_of_the_processor() -> None:
    assert "processor" in refused("while True: pass", cpu_seconds=1)


def test_a_sleeper_is_stopped_by_the_clock() -> None:
    started = time.monotonic()
    assert refused("import time; time.sleep(60)", wall_seconds=1.0) == "stopped after 1 s"
    assert time.monotonic() - started < 20


def test_a_hog_of_memory_gets_none() -> None:
    assert refused("x = []\nwhile True: x.append(bytearray(10 ** 7))") == "MemoryError"


def test_a_fork_bomb_makes_not_one_process() -> None:
    for code in (
        "import os\nos.fork()",
        "import subprocess\nsubprocess.Popen(['sleep', '4321'])",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()",
    ):
        assert "not permitted" in refused(code), code
    assert not [p for p in psutil.process_iter(["cmdline"]) if "4321" in (p.info["cmdline"] or [])]


def test_threads_are_allowed_for_answers_use_them() -> None:
    code = "import threading\nt = threading.Thread(target=lambda: None); t.start(); t.join()"
    assert run_test(code, "").passed is True


def test_no_signal_reaches_another_process() -> None:
    for code in (f"import os; os.kill({os.getpid()}, 9)", "import os; os.kill(-1, 9)", "import os; os.killpg(0, 9)"):
        assert "not permitted" in refused(code), code


def test_there_is_no_network_not_even_this_machine() -> None:
    for code in (
        "import socket; socket.socket(socket.AF_INET)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1/')",
    ):
        assert "not permitted" in refused(code), code


def test_secrets_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-1")
    monkeypatch.setenv("MOONSHOT_API_KEY", "sk-2")
    for code in (
        f"open({str(secret)!r}).read()",
        "open('/etc/passwd').read()",
        "import os; os.listdir(os.path.expanduser('~'))",
        "open('/proc/self/environ').read()",
        "open('/proc/1/cmdline').read()",
        "import os; os.listdir('..')",
        "open('../test.py').read()",
    ):
        assert "denied" in refused(code), code
    assert run_test("import os", "assert 'MOONSHOT_API_KEY' not in os.environ and 'PATH' not in os.environ").passed


def test_files_outside_are_neither_written_nor_changed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    kept.chmod(0o600)
    before = kept.stat()
    for code in (
        f"open({str(kept)!r}, 'a').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.chmod({str(kept)!r}, 0o777)",
        f"import os; os.utime({str(kept)!r}, (0, 0))",
        "import os; os.symlink('/etc', 'etc'); os.listdir('etc')",
        f"import os; os.rename({str(kept)!r}, 'mine')",
    ):
        refused(code)
    assert kept.read_text() == "mine"
    assert (kept.stat().st_mode, kept.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert not (tmp_path / "new").exists()


def test_its_own_folder_is_small_and_gone_afterwards() -> None:
    assert run_test("open('a', 'w').write('x')", "assert open('a').read() == 'x'").passed is True
    assert "too large" in refused("open('a', 'w').write('x' * 10 ** 7)")
    many = "import itertools\nfor n in itertools.count(): open(str(n), 'w').write('x' * 10 ** 6)"
    assert refused(many) == "stopped: it wrote more than 16 MiB"


def test_a_flood_of_output_fills_nothing() -> None:
    assert len(refused("while True: print('x' * 1000)")) <= 400


def test_a_crash_of_python_itself_is_told() -> None:
    assert refused("import ctypes; ctypes.string_at(0)") == "ended by SIGSEGV"


def test_a_call_by_its_number_is_refused_too() -> None:
    numbers = {"x86_64": 41, "aarch64": 198}
    code = (
        "import ctypes, platform\n"
        f"found = ctypes.CDLL(None, use_errno=True).syscall({numbers}[platform.machine()], 2, 1, 0)"
    )
    assert run_test(code, "assert found == -1 and ctypes.get_errno() == 1").passed is True


def test_packages_of_this_installation_are_not_there() -> None:
    assert "No module named" in refused("import numpy")


def test_where_nothing_can_be_closed_off_no_code_runs_and_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "closed", lambda: "this kernel has no seccomp, so the network cannot be cut off")
    found = run_test(f"open({str(tmp_path / 'ran')!r}, 'w')", "")
    assert found.passed is None
    assert found.why.startswith("UNKNOWN: this kernel has no seccomp")
    assert not (tmp_path / "ran").exists()


def test_a_sandbox_that_does_not_start_is_unknown_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = run_test("", "")
    assert found.passed is None
    assert "did not start" in found.why


def test_other_systems_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "network" in str(sandbox_child.missing())


def test_no_other_process_is_ended_by_the_signals_of_a_file() -> None:
    """Linux sends a file's events to whom its owner names, by the signal that he names: SIGKILL too."""
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            for code in (
                f"import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 8, {victim.pid})",
                "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 10, 9)",
                f"import fcntl, os, struct; r, w = os.pipe()\nfcntl.fcntl(r, 15, struct.pack('ii', 1, {victim.pid}))",
                (
                    "import fcntl, socket, struct; a, b = socket.socketpair()\n"
                    f"fcntl.ioctl(a, 0x8901, struct.pack('i', {victim.pid}))"
                ),
            ):
                assert "not permitted" in refused(code), code
            assert victim.poll() is None
        finally:
            victim.kill()
    assert run_test("import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)", "").passed


def test_no_program_that_listens_on_this_machine_is_reached(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listener:
        path = tmp_path / "s"
        listener.bind(str(path))
        listener.setblocking(False)
        for way in (f"a.sendto(b'x', {str(path)!r})", f"a.sendmsg([b'x'], [], 0, {str(path)!r})", "a.bind('')"):
            code = f"import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); {way}"
            assert "not permitted" in refused(code), way
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def test_code_that_waits_for_its_own_tasks_runs() -> None:
    """asyncio wakes itself up through a pair of sockets, which reach nobody else."""
    code = "import asyncio\nasync def two(): return await asyncio.to_thread(lambda: 2)"
    assert run_test(code, "assert asyncio.run(two()) == 2").passed is True


def test_root_has_no_powers_in_it() -> None:
    """Whoever runs the probe as root, as in a container, lends the code of an answer none of that."""
    limits = "import ctypes; r = ctypes.CDLL(None, use_errno=True).syscall({'x86_64': 160, 'aarch64': 164}"
    code = f"import platform; {limits}[platform.machine()], 7, (ctypes.c_ulong * 2)(9000, 9000))"
    assert run_test(code, "assert r == -1 and ctypes.get_errno() == 1").passed is True
    assert "not permitted" in refused("import os; os.setgid(7)")


def test_a_signal_without_a_name_ends_no_run() -> None:
    assert refused("import signal; signal.raise_signal(35)") == "ended by signal 35"


def test_folders_within_folders_are_not_made_and_nothing_stays() -> None:
    before = set(Path(tempfile.gettempdir()).glob("kimigguf-code-*"))
    assert "denied" in refused("import os\nwhile True:\n    os.mkdir('a'); os.chdir('a')")
    assert refused("import itertools\nfor n in itertools.count(): open(str(n), 'w').close()").startswith("stopped")
    assert set(Path(tempfile.gettempdir()).glob("kimigguf-code-*")) <= before


def test_what_code_says_cannot_command_a_terminal_and_halves_of_characters_are_code_too() -> None:
    assert "\x1b" not in refused("raise ValueError('\\x1b]0;owned\\x07')")
    assert run_test("x = '\ud800'", "assert x").passed is True
