"""Runs code that a model wrote, in a process of its own that can do next to nothing.

On Linux (x86-64 and AArch64) the process shuts itself in before it runs any of that code (``sandbox_child``): no
sockets, no new processes, no signals to others (seccomp); no file but Python's own and an empty folder (Landlock);
little memory, time, file size and few open files (rlimits); no environment, no packages. Its whole group is killed when
the wall clock says so. That holds against code that is careless or curious. It is no virtual machine: a flaw in the
kernel is a way out, so questions of unknown origin belong on a machine that has nothing to lose.

Elsewhere nothing cuts it off from network and files, and then no code is run; the report says so.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kimigguf.engines.printable import printable, sendable
from kimigguf.errors import MachineError
from kimigguf.probe import sandbox_child
from kimigguf.probe.calls import Trial

_POLL_SECONDS: Final = 0.02
_FOLDER_BYTES: Final = 16 << 20
_BLOCK_BYTES: Final = 4096
_KEPT: Final = 400
"""Characters of the last line that the code wrote go into the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What code may use. ``wall_seconds`` is from the start of the process, Python's own start included."""

    cpu_seconds: int = 5
    wall_seconds: float = 15.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    open_files: int = 32


@cache
def closed() -> str | None:
    """Why code could reach the network or other files here; None where it cannot."""
    return sandbox_child.missing()


def run_test(code: str, test: str, limits: Limits | None = None) -> Trial:
    """Run ``code`` and then ``test`` after it. Passed: neither raised and both came to their end.

    Raises:
        MachineError: ``cannot-run`` where there is no room for a process or a folder.
    """
    if (why := closed()) is not None:
        return Trial(passed=None, why=f"UNKNOWN: {why}, so no code was run")
    limits = limits or Limits()
    # Said at the end only: an early exit, with whatever status, is no pass. Code that is out to pass could still find
    # the word in the frames of its own process: what is shut in is what it can reach, not what it says of itself.
    token = secrets.token_hex(16)
    try:
        with tempfile.TemporaryDirectory(prefix="kimigguf-code-") as scratch:
            return _in_folder(Path(scratch), code, test, token, limits)
    except OSError as error:
        raise MachineError(
            "the code of an answer cannot be run", code="cannot-run", cause=str(error), hint="df -h; ulimit -a"
        ) from error


def _in_folder(scratch: Path, code: str, test: str, token: str, limits: Limits) -> Trial:
    room = scratch / "room"
    room.mkdir()
    (scratch / "code.py").write_text(sendable(code), encoding="utf-8")
    (scratch / "test.py").write_text(test, encoding="utf-8")
    command = [
        sys.executable, "-I", "-S", "-B", str(Path(sandbox_child.__file__)), str(scratch), str(limits.cpu_seconds),
        str(limits.memory_bytes), str(limits.file_bytes), str(limits.open_files),
    ]  # fmt: skip
    # A file and no pipe: it is bounded by the limit on files, and nobody has to empty it.
    with (scratch / "said").open("w+b") as said, _started(command, room, said.fileno(), token) as process:
        stopped = _wait(process, room, limits)
        said.seek(0)
        text = said.read(limits.file_bytes).decode("utf-8", "replace")
    lines = text.splitlines()
    if not lines or lines[0] != sandbox_child.READY:
        return Trial(passed=None, why=f"UNKNOWN: the sandbox did not start: {_last(lines)}")
    if stopped is None and process.returncode == 0 and lines[-1] == f"{sandbox_child.PASSED}{token}":
        return Trial(passed=True)
    return Trial(passed=False, why=stopped or _why(process.returncode, lines))


@contextlib.contextmanager
def _started(command: list[str], room: Path, said: int, token: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The process, the leader of a group of its own, all of which is gone afterwards."""
    process = subprocess.Popen(
        command, cwd=room, env={}, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
    )
    try:
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None  # noqa: S101 -- asked for above
            process.stdin.write(token.encode())
            process.stdin.close()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies may not be killed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", room: Path, limits: Limits) -> str | None:
    """Wait until it ends or must be ended; why, in the latter case."""
    until = time.monotonic() + limits.wall_seconds
    while process.poll() is None:
        if time.monotonic() > until:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {limits.wall_seconds:g} s"
        if _bytes_in(room) > _FOLDER_BYTES:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped: it wrote more than {_FOLDER_BYTES >> 20} MiB"
        time.sleep(_POLL_SECONDS)
    return None


def _bytes_in(folder: Path) -> int:
    """What its files take, an empty one a block too; there are no folders in it."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it may go while it is counted
                total += max(_BLOCK_BYTES, entry.stat(follow_symlinks=False).st_size)
    return total


def _why(status: int, said: list[str]) -> str:
    if status in {-signal.SIGXCPU, -signal.SIGKILL}:
        return "stopped: it used more than its share of the processor"
    if status < 0:
        return f"ended by {_signal(-status)}"
    return _last(said[1:]) or f"ended with {status} before its test did"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _last(said: list[str]) -> str:
    """The last thing that was said, which for an exception is what it is: no paths of this machine."""
    return printable(next((line.strip()[-_KEPT:] for line in reversed(said) if line.strip()), ""))
