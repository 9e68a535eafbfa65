"""What a mounted file system tells this user: whether O_DIRECT works, and how much the user's quota leaves.

Both calls may hang on a dead network mount, so callers set a time limit. Nothing is written: O_DIRECT is tried on a
file without a name, or by reading one that is there. Sources: open(2), quotactl(2) and the kernel's quotactl_fd.
"""

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from kimigguf.units import KIB

_QUOTACTL_FD: Final = 443
"""The call's number, the same on every architecture (Linux 5.14)."""
_GET: Final = 0x800007 << 8
_USER, _GROUP = 0, 1
_QUOTA: Final = struct.Struct("=8QI4x")
"""struct if_dqblk: block limits in KiB, hard and soft, bytes used, the same of files, two times, what is valid."""
_BLOCK: Final = 4096
_MOST_ENTRIES: Final = 400
_MOST_DEPTH: Final = 3


def parse_quota(data: bytes) -> int | None:
    """Bytes that a quota still leaves, from a struct if_dqblk; None where it sets no limit."""
    hard, soft, used, *_ = _QUOTA.unpack(data)
    limits = [limit * KIB for limit in (hard, soft) if limit]
    return max(0, min(limits) - used) if limits else None


def quota_room(mount: str) -> int | None:
    """Bytes that the quotas of this user and its group still leave on a mount; None where none limits.

    Raises:
        OSError: The kernel does not tell (an old one, or a file system with quotas of its own kind, such as NFS).
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rooms = [_ask(call, descriptor, kind, number) for kind, number in ((_USER, os.getuid()), (_GROUP, os.getgid()))]
    finally:
        os.close(descriptor)
    return min((room for room in rooms if room is not None), default=None)


def _ask(call: "ctypes._NamedFuncPointer", descriptor: int, kind: int, number: int) -> int | None:
    buffer = ctypes.create_string_buffer(_QUOTA.size)
    if call(_QUOTACTL_FD, descriptor, _GET | kind, number, buffer) == 0:
        return parse_quota(buffer.raw)
    code = ctypes.get_errno()
    # ESRCH: no quotas of that kind are switched on. EPERM and EACCES: a group's may be hidden from its members.
    if code == errno.ESRCH or (kind == _GROUP and code in {errno.EPERM, errno.EACCES}):
        return None
    raise OSError(code, os.strerror(code))


def direct_io_of(mount: str) -> bool:
    """Whether files on a mount can be read past the page cache, by a nameless file, else by a file that is there.

    Raises:
        OSError: It cannot be tried: nothing there may be written or read by this user.
    """
    nameless, direct = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    if not direct:
        raise OSError(errno.ENOSYS, "this system has no O_DIRECT")
    with suppress(OSError):
        os.close(os.open(mount, nameless | os.O_RDWR))
        return _opens(mount, nameless | os.O_RDWR | direct)
    for path in _files(Path(mount)):
        if _opens(path, os.O_RDONLY):
            return _reads(path, os.O_RDONLY | direct)
    raise OSError(errno.EACCES, "no folder there can be written, and no file near the top be read")


def _opens(path: str | Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def _reads(path: Path, flags: int) -> bool:
    """Whether a block can be read so; some file systems let a file be opened and refuse the first read."""
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return False
    try:
        with closing(mmap.mmap(-1, _BLOCK)) as aligned:
            return os.preadv(descriptor, [aligned], 0) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _files(top: Path) -> Iterator[Path]:
    """Regular files of a block and more near the top of a mount, without leaving it; a few hundred entries at most."""
    device = top.stat().st_dev
    waiting, seen = [(top, 0)], 0
    while waiting:
        folder, depth = waiting.pop(0)
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                seen += 1
                if seen > _MOST_ENTRIES:
                    return
                facts = entry.stat(follow_symlinks=False)
                if facts.st_dev != device:
                    continue
                if entry.is_file(follow_symlinks=False) and facts.st_size >= _BLOCK:
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False) and depth < _MOST_DEPTH:
                    waiting.append((Path(entry.path), depth + 1))
