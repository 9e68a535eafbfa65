"""Ties a process's life to that of the one that started it, so that no engine outlives a killed supervisor."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the starting process dies. Linux only; elsewhere it does nothing.

    The kernel watches the *thread* that started this process, so start it from a thread that lives as long.
    """
    if setter := _setter():
        setter()


def before_exec() -> Callable[[], None] | None:
    """What to run between fork and exec for the same effect on a program that is not ours; None where unsupported.

    The library is loaded here, before the fork: the returned function makes one system call and no Python import.
    """
    return _setter()


def _setter() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # a C library without it
        return None
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # The parent may have died between the fork and this call; then nobody is left to be watched.
        if os.getpid() != parent and os.getppid() != parent:
            os._exit(0)

    return ask
