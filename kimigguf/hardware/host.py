"""The machine looked at, as the few things a detector may touch: files under a root, commands, file system sizes.

Detectors take a ``Host``; tests give one whose root is a capture. Whatever cannot be read is None, never a guess.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Final, TypeAlias

from kimigguf.hardware.file_systems import direct_io_of, quota_room

_MAX_TEXT_BYTES: Final = 8 << 20
_READ_BYTES: Final = 64 << 10
COMMAND_LIMIT_SECONDS: Final = 0.9


class CommandError(Exception):
    """A command could not be run, failed or took too long; the text says which."""


Runner: TypeAlias = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystemSize:
    """Sizes of a mounted file system; ``free_bytes`` is what an unprivileged user may still write."""

    total_bytes: int
    free_bytes: int


def run_command(argv: Sequence[str]) -> str:
    """The standard output of a command, killed after its time limit; it gets no input.

    Raises:
        CommandError: It is not there, failed or hung.
    """
    try:
        done = subprocess.run(
            list(argv),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_LIMIT_SECONDS,
            env={"PATH": os.defpath + os.pathsep + "/usr/sbin:/sbin", "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise CommandError(f"there is no command {argv[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{argv[0]} did not answer within {COMMAND_LIMIT_SECONDS} s") from error
    except OSError as error:
        raise CommandError(f"{argv[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise CommandError(f"{argv[0]} failed with exit code {done.returncode}")
    return done.stdout.decode("utf-8", errors="replace")


def file_system_size(mount: str) -> FileSystemSize:
    """What statvfs says of a mount; reserved blocks count as taken.

    Raises:
        OSError: It cannot be asked. On a dead network mount this never returns, so callers set a time limit.
    """
    info = os.statvfs(mount)
    return FileSystemSize(total_bytes=info.f_blocks * info.f_frsize, free_bytes=info.f_bavail * info.f_frsize)


def _read(file: RawIOBase) -> bytes:
    """All of a file in small reads: /proc/sys refuses a read of 4 MiB and more, and small ones lose nothing."""
    parts: list[bytes] = []
    while sum(map(len, parts)) < _MAX_TEXT_BYTES and (part := file.read(_READ_BYTES)):
        parts.append(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine's files, commands and environment. ``system`` is ``sys.platform``'s name for it."""

    root: Path = Path("/")
    system: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Runner = run_command
    size_of: Callable[[str], FileSystemSize] = file_system_size
    direct_io_of: Callable[[str], bool] = direct_io_of
    quota_room: Callable[[str], int | None] = quota_room

    def path(self, name: str) -> Path:
        """The file ``name`` (absolute on that machine) under the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """The text of a file without the blanks around it; None where it cannot be read."""
        try:
            with self.path(name).open("rb", buffering=0) as file:
                return _read(file).decode("utf-8", errors="replace").strip(" \t\r\n\0")
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The whole number that a file holds, decimal or 0x-hexadecimal; None where it holds none."""
        text = self.text(name)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """The names in a folder, sorted; empty where there is no such folder."""
        try:
            return tuple(sorted(os.listdir(self.path(folder))))  # noqa: PTH208 -- names are wanted, not paths
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        return self.path(name).exists()

    def real(self, name: str) -> str | None:
        """Where a name leads after its links, as a name on that machine; None if out of the root or nowhere."""
        try:
            target = self.path(name).resolve(strict=True)
            return "/" + str(target.relative_to(self.root.resolve()))
        except (OSError, ValueError, RuntimeError):
            return None
