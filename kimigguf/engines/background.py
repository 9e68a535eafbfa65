"""Starts ``kimigguf serve`` as a process of its own that outlives the terminal, and follows it until it is ready."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kimigguf.errors import (
    IntegrityError,
    KimiggufError,
    MachineError,
    NetworkError,
    ServerError,
    UsageError,
)
from kimigguf.events import Advance, Listener, Notice, Step

_KINDS: Final[tuple[type[KimiggufError], ...]] = (UsageError, MachineError, NetworkError, IntegrityError, ServerError)
_POLL_SECONDS: Final = 0.1
_STOP_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Follower:
    """Reads a growing file line by line, whole lines only."""

    path: Path
    offset: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    def read(self, listen: Listener) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            lines = file.read().split(b"\n")
        self.offset += sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            self._take(line, listen)

    def _take(self, line: bytes, listen: Listener) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        match record:
            case {"schema": "kimigguf.error/1"}:
                self.errors.append(record)
            case {"event": "step", "text": str(text)}:
                listen(Step(text=text))
            case {"event": "notice", "text": str(text)}:
                listen(Notice(text=text))
            case {"event": "advance", "activity": activity, "item": item, "done_bytes": done, "total_bytes": total}:
                listen(Advance(activity=activity, item=item, done_bytes=done, total_bytes=total))
            case _:
                return


def start_detached(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: Path,
    name: str,
    listen: Listener,
    working_folder: str | None = None,
) -> dict[str, Any]:
    """Run ``kimigguf serve`` with ``arguments`` in a session of its own; returns its answer once it is ready.

    The answer's ``state`` is ``ready``, or ``does-not-fit`` with nothing running.

    Raises:
        KimiggufError: What the other process failed with, as it said it.
        MachineError: ``state-unwritable``.
        KeyboardInterrupt: The wait was interrupted; the other process has been ended.
    """
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    argv = [sys.executable, "-m", "kimigguf", "serve", "--json", *arguments]
    with ExitStack() as files:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stdout, stderr = files.enter_context(_private(out)), files.enter_context(_private(err))
        except OSError as error:
            raise MachineError(f"cannot write to {folder}", code="state-unwritable", cause=error.strerror) from error
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            cwd=working_folder,
        )
    follower = _Follower(err)
    try:
        return _until_ready(process, out, follower, listen)
    except KeyboardInterrupt:
        _end(process)
        raise


def _until_ready(
    process: "subprocess.Popen[bytes]", out: Path, follower: _Follower, listen: Listener
) -> dict[str, Any]:
    while True:
        ended = process.poll()
        follower.read(listen)
        answer = _answer(out)
        if ended is None and answer is not None:
            # It is to outlive this process: nobody here waits for it any more.
            process.returncode = 0
            return answer
        if ended is not None and answer is not None and answer.get("state") == "does-not-fit":
            return answer
        if ended is not None:
            raise _failure(ended, answer, follower)
        time.sleep(_POLL_SECONDS)


def _answer(out: Path) -> dict[str, Any] | None:
    """The other process's answer, None until it is whole."""
    try:
        record = json.loads(out.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _failure(code: int, answer: Mapping[str, Any] | None, follower: _Follower) -> KimiggufError:
    if follower.errors:
        record = follower.errors[-1]
        kinds: dict[int, Callable[..., KimiggufError]] = {int(kind.exit_code): kind for kind in _KINDS}
        make = kinds.get(int(record["exit_code"]), ServerError)
        return make(record["message"], code=record["code"], cause=record["cause"], hint=record["hint"])
    reason = (answer or {}).get("reason")
    return ServerError(
        "the server ended before it was ready",
        code="server-died",
        cause=str(reason) if reason else f"exit code {code}",
        hint=f"see {follower.path}",
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _private(path: Path) -> Any:  # noqa: ANN401 -- a binary file
    """A new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")
