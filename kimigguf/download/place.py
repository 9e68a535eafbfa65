"""Where the models go if nobody says: the user's data folder, or the fastest local NVMe with room.

Decided before the first download, said once, and remembered beside the data folder, so that every later command looks
for sets where they are. What a user has named (``--models-dir``, KIMIGGUF_MODELS, the configuration) always wins, and
a data folder that holds a set is kept.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf import units
from kimigguf.download import disk, store
from kimigguf.download.manifest import MANIFEST
from kimigguf.errors import MachineError
from kimigguf.events import Listener, Notice, ignore
from kimigguf.hardware.mounts import Mount
from kimigguf.hardware.snapshot import Disk, DiskKind
from kimigguf.whole_file import write_whole

_SYSTEM: Final = frozenset({"boot", "efi", "dev", "proc", "sys", "run", "snap", "usr", "etc", "var", "tmp"})
"""A mount under one of these has another purpose: to put models there is for a user to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """The disks of a machine that may be filled, and the one that the data folder lies on."""

    usable: tuple[Disk, ...]
    own: Disk | None


def choose(disks: Disks, need_bytes: int) -> Disk | None:
    """The disk to put models on rather than the data folder's own, None to stay there.

    The own disk is left only for an NVMe drive with room, and not if it is one itself. Of several the one with the
    most free space is taken, of equal ones the first by name.
    """
    if disks.own is not None and _is_fast(disks.own, need_bytes):
        return None
    fast = [d for d in disks.usable if _is_fast(d, need_bytes) and not _is_system(d.mount)]
    return min(fast, key=lambda d: (-(d.free_bytes or 0), d.mount), default=None)


def _is_fast(one: Disk, need_bytes: int) -> bool:
    room = one.free_bytes is not None and one.free_bytes >= need_bytes
    return one.kind is DiskKind.NVME and not one.read_only and room


def _is_system(mount: str) -> bool:
    return any(mount == f"/{name}" or mount.startswith(f"/{name}/") for name in _SYSTEM)


def own_disk(folder: Path, disks: Sequence[Disk], mounts: tuple[Mount, ...]) -> Disk | None:
    """The disk that ``folder`` (links resolved) lies on, None if it is none that could hold a model (a tmpfs)."""
    mount = disk.mount_of(folder, mounts)
    if mount is None:
        return None
    # A file system that is mounted twice is listed once, by its shortest path.
    same = (d for d in disks if (d.device, d.file_system) == (mount.source, mount.file_system))
    return next((d for d in disks if d.mount == mount.mount_point), next(same, None))


def settle(models: Path, size_bytes: int, *, remember: bool = True, listen: Listener = ignore) -> Path:
    """The folder for a set of this size, where ``models`` is what ``store.models_dir`` has found.

    Anything but the data folder, and a data folder with a set in it, is left as it is. ``remember`` False: only look.

    Raises:
        MachineError: ``disk-gone`` if the disk that was chosen once is not mounted.
        UsageError: ``bad-config``.
    """
    _refuse_gone(models)
    if models != store.data_models_dir() or _holds_a_set(models):
        return models
    chosen = choose(_look(models), size_bytes + disk.slack_bytes(size_bytes))
    if chosen is None or not chosen.mount.isprintable():
        return models
    folder = disk.folder_on(chosen)
    try:
        if remember:
            folder.mkdir(parents=True, exist_ok=True)
            _remember(folder, chosen.mount)
    except OSError:  # then nothing later would find it
        return models
    listen(
        Notice(
            text=f"models go to {folder}, on the local NVMe drive with the most room "
            f"({units.storage(chosen.free_bytes or 0)} free); "
            f"elsewhere: --models-dir DIR, or models_dir in {store.config_path()}"
        )
    )
    return folder


def _holds_a_set(models: Path) -> bool:
    """Whether anything of a set lies there, be it a part."""
    for _folder, _folders, names in os.walk(models):
        if any(name == MANIFEST or name.endswith((".gguf", store.PART)) for name in names):
            return True
    return False


def _remember(folder: Path, mount: str) -> None:
    path = store.choice_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A JSON string is a TOML string too.
    lines = (
        "# Written by kimigguf. Remove this file to have it choose again.",
        f"models_dir = {json.dumps(str(folder))}",
    )
    write_whole(path, "\n".join((*lines, f"mount = {json.dumps(mount)}", "")).encode())


def _refuse_gone(models: Path) -> None:
    """Never fill the disk below a mount point because what was mounted there is not."""
    choice = store.read_choice()
    if choice is None or choice.folder != models or models.exists() or os.path.ismount(choice.mount):
        return
    raise MachineError(
        f"the disk that models go to is not mounted at {choice.mount}",
        code="disk-gone",
        cause=f"{models} was chosen for them, and is not there",
        hint=f"mount it, or have another place chosen: rm {shlex.quote(str(store.choice_path()))}",
    )


def _look(models: Path) -> Disks:
    """The disks of this machine. A system whose disks can't be told has none."""
    every = disk.read_all()
    mounts = disk.read_mounts()
    own = own_disk(disk.existing(models).resolve(), every, mounts)
    return Disks(usable=disk.usable(every), own=own)
