"""API keys: read from a file of their own, never from a command line."""

import os
import secrets
import shlex
import stat
from pathlib import Path

from kimigguf.errors import MachineError, UsageError


def new_key(path: Path) -> str:
    """Make a key and keep it in ``path``, readable by its owner alone; an older one there is replaced.

    Raises:
        MachineError: ``state-unwritable``.
    """
    key = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
    except OSError as error:
        raise MachineError(f"cannot write {path}", code="state-unwritable", cause=error.strerror) from error
    return key


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Raises:
        UsageError: ``bad-key-file`` if it cannot be read, is empty, others on this machine can read it, or a key has
            characters that cannot stand in an HTTP header.
    """
    try:
        mode = path.stat().st_mode
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the key file {path}", code="bad-key-file", cause=str(error)) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH) and stat.S_ISREG(mode):
        raise UsageError(
            f"others on this machine can read the key file {path}",
            code="bad-key-file",
            hint=f"chmod 600 {shlex.quote(str(path))}",
        )
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    for number, line in enumerate(lines, start=1):
        if line in keys and not (line.isascii() and line.isprintable()):
            raise UsageError(
                f"line {number} of the key file {path} is no key that a client can send",
                code="bad-key-file",
                cause="it has characters other than printable ASCII, which no HTTP header carries",
                hint="kimigguf serve --new-api-key makes a good one",
            )
    if not keys:
        raise UsageError(f"the key file {path} holds no key", code="bad-key-file", hint="write one key a line")
    return keys
