"""Starts a child process in a session of its own, with a log file, and ends it with everything that it started."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kimigguf.engines.diagnose import Exit
from kimigguf.engines.lifeline import before_exec
from kimigguf.errors import MachineError

GRACE_SECONDS: Final = 10.0
_TAIL_BYTES: Final = 64 << 10
_HEAD_BYTES: Final = 8 << 20


class State(StrEnum):
    """What a server is doing."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"


class Child:
    """One engine process and its group. Only this object signals it; ``stop`` may be called any number of times."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    def start(cls, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> Self:
        """Start ``argv``, its output going to the file ``log``: a pipe would stall or kill it if nobody read.

        Raises:
            MachineError: ``engine-unusable`` if it cannot be started at all, ``log-unwritable``.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MachineError(f"cannot write the log {log}", code="log-unwritable", cause=error.strerror) from error
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C on the terminal is ours to handle, not the engine's
                preexec_fn=before_exec(),  # noqa: PLW1509 -- one prctl call, prepared before the fork; no threads yet
            )
        except OSError as error:
            raise MachineError(
                f"the engine {argv[0]} cannot be started", code="engine-unusable", cause=error.strerror
            ) from error
        finally:
            os.close(output)
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit(self) -> Exit | None:
        """How it ended, None while it runs."""
        code = self._process.poll()
        return None if code is None else Exit.from_return_code(code)

    def wait(self, seconds: float) -> Exit | None:
        """Wait up to ``seconds`` for its end; None if it still runs."""
        try:
            return Exit.from_return_code(self._process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        """The last 64 KiB of the log; empty if it cannot be read."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def log_head(self) -> str:
        """The first 8 MiB of the log; empty if it cannot be read."""
        try:
            with self.log.open("rb") as file:
                return file.read(_HEAD_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def note(self, text: str) -> None:
        """Add a line of our own to its log, marked as such. A log that cannot be written is no reason to fail."""
        with suppress(OSError), self.log.open("a", encoding="utf-8") as file:
            file.write(f"kimigguf {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {text}\n")

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> Exit:
        """SIGTERM to the group, a grace period, then SIGKILL to whatever is left of it, grandchildren included."""
        if self.exit() is None:
            self._signal(signal.SIGTERM)
            with suppress(KeyboardInterrupt):  # a second Ctrl-C ends the grace, not the clean-up
                self.wait(grace_seconds)
        # The leader may be gone and its children not: the group lives as long as any member does.
        self._signal(signal.SIGKILL)
        return Exit.from_return_code(self._process.wait())

    def _signal(self, number: signal.Signals) -> None:
        # The session's leader is the group's leader, so its pid names the group; no such group: all are gone.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()


def fresh_log(folder: Path, name: str, *, keep: int = 5) -> Path:
    """A new log file's path; the oldest of the same name beyond ``keep`` are removed."""
    older = sorted(folder.glob(f"{name}-*.log"))
    for file in older[: max(0, len(older) - keep + 1)]:
        file.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S") + f"{time.time_ns() // 1000 % 1_000_000:06d}"
    return folder / f"{name}-{stamp}.log"
