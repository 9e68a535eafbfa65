"""What a test may ask of the system: a free port, whether a port is taken, which processes are left."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Final

import psutil

ONE_THREAD: Final = {"OMP_THREAD_LIMIT": "1"}
"""Threads of one engine that spin for each other stand still on a machine with more to do."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_word(word: str) -> list[int]:
    """Processes with ``word`` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(word in part for part in process.cmdline()) and is_running(process.pid):
                found.append(process.pid)
    return found


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    """Wait until a condition holds; whether it did in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
