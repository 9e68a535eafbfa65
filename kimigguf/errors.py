"""The error tree and the exit codes. Every failure a user can meet is one of these; anything else is a bug.

KimiggufError                    code, message, cause, hint
├── UsageError            exit 2    the request cannot be meant (unknown quant, impossible context, not a GGUF)
├── MachineError          exit 3    this machine lacks something (engine, disk, driver, memory)
├── NetworkError          exit 4    the hub or another endpoint did not answer, or said no
├── IntegrityError        exit 5    a file is damaged, foreign, missing or incomplete
└── ServerError           exit 6    the server died or never got ready

"No" as an answer (nothing fits, a probe below the bar) is a value, not an exception; the command exits with 1.
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the process returns; part of the command line's contract."""

    DONE = 0
    ANSWERED_NO = 1
    USAGE = 2
    MACHINE = 3
    NETWORK = 4
    INTEGRITY = 5
    SERVER = 6
    BUG = 70
    INTERRUPTED = 130


class KimiggufError(Exception):
    """An expected failure: what happened, why, and what to do.

    Args:
        message: One sentence that says what happened, naming the file, quant or address.
        code: A kebab-case name of the kind of failure, stable across versions, for scripts.
        cause: The reason, where it is known and not already in the message.
        hint: What to do. A command in it can be pasted and works on this machine.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, message: str, *, code: str, cause: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.cause = cause
        self.hint = hint


class UsageError(KimiggufError):
    """The request cannot be meant as it stands."""

    exit_code = ExitCode.USAGE


class MachineError(KimiggufError):
    """This machine lacks what the request needs."""

    exit_code = ExitCode.MACHINE


class NetworkError(KimiggufError):
    """The hub or another endpoint did not answer as needed."""

    exit_code = ExitCode.NETWORK


class IntegrityError(KimiggufError):
    """A file on disk is damaged, foreign, missing or incomplete."""

    exit_code = ExitCode.INTEGRITY


class ServerError(KimiggufError):
    """The model server died or never got ready."""

    exit_code = ExitCode.SERVER
