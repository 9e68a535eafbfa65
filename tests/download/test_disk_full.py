"""A disk that is full, for real: a small tmpfs, where this machine lets the tests mount one."""

import contextlib
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from download.conftest import FAST, KIB, Scene

from kimigguf.download.disk import mount_of, other_place, refuse_network, slack_bytes
from kimigguf.download.store import SetState, look
from kimigguf.errors import MachineError
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.snapshot import Disk, DiskKind

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as stream:
        for size in (MIB, 4 * KIB, 1):
            with contextlib.suppress(OSError):
                while stream.write(bytes(size)):
                    pass


def test_what_cannot_fit_is_refused_before_the_first_byte(scene: Scene, small_disk: Path) -> None:
    scene.models = small_disk / "models"
    (small_disk / "ballast").write_bytes(bytes(8 * MIB))
    with pytest.raises(MachineError) as error:
        scene.get()
    assert error.value.code == "disk-full"
    assert error.value.exit_code == 3
    assert "missing" in (error.value.cause or "")
    assert not scene.hub.requests


@pytest.mark.parametrize("nth", [3, 12, 19])
def test_a_disk_that_fills_up_midway_keeps_the_parts_and_goes_on_after_room_is_made(
    scene: Scene, small_disk: Path, nth: int
) -> None:
    scene.models = small_disk / "models"
    turns, filled = itertools.count(1), threading.Event()

    def before(request: object) -> None:
        if getattr(request, "body", False) and next(turns) == nth:
            fill(small_disk / "ballast")
            filled.set()

    scene.hub.before = before
    with pytest.raises(MachineError) as error:
        scene.get(replace(FAST, connections=2))
    assert error.value.code == "disk-full"
    assert error.value.exit_code == 3
    scene.assert_nothing_wrong()
    scene.hub.before = None
    assert filled.wait(10)
    kept = look(scene.folder)
    assert kept is not None
    assert kept.state is SetState.PARTIAL
    (small_disk / "ballast").unlink()
    scene.hub.sent_bytes.clear()
    assert scene.get().state is SetState.WHOLE
    scene.assert_whole()
    assert sum(scene.hub.sent_bytes.values()) == scene.remote.size_bytes - kept.done_bytes


def test_the_rest_of_a_download_needs_only_the_room_of_the_rest(scene: Scene, small_disk: Path) -> None:
    scene.models = small_disk / "models"
    scene.get()
    (scene.folder / scene.remote.files[2].name).unlink()
    room = os.statvfs(small_disk)
    spare = slack_bytes(500 * KIB) + 600 * KIB
    (small_disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - spare))
    assert scene.get().state is SetState.WHOLE


def test_a_folder_that_cannot_be_written_is_said(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    scene.models = tmp_path / "file"
    with pytest.raises(MachineError) as error:
        scene.get()
    assert error.value.code == "cannot-write"
    assert "--models-dir" in (error.value.hint or "")


def test_the_place_named_instead_is_the_fastest_local_disk_with_room() -> None:
    def disk(mount: str, kind: DiskKind | None, free: int | None, *, read_only: bool = False) -> Disk:
        return Disk(mount=mount, kind=kind, free_bytes=free, read_only=read_only)

    everything = (
        disk("/", DiskKind.NVME, 10),
        disk("/hdd", DiskKind.HDD, 900),
        disk("/nv", DiskKind.NVME, 500),
        disk("/net", DiskKind.NETWORK, 9000),
        disk("/vm", None, 600),
        disk("/cd", DiskKind.NVME, 800, read_only=True),
        disk("/x", DiskKind.NVME, None),
    )
    assert other_place(everything, 400) == "/nv/kimigguf/models"
    assert other_place(everything, 550) == "/vm/kimigguf/models"
    assert other_place(everything, 700) == "/hdd/kimigguf/models"
    assert other_place(everything, 1000) is None


MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 254:1 / /home/models rw - xfs /dev/nvme0n1 rw
"""


def test_the_mount_of_a_folder_is_the_innermost_one() -> None:
    mounts = parse_mountinfo(MOUNTS)
    kinds = [mount_of(Path(p), mounts) for p in ("/x", "/home/me", "/home/models/a", "/homes")]
    assert [mount.file_system for mount in kinds if mount] == ["ext4", "nfs4", "xfs", "ext4"]


def test_a_network_mount_is_not_filled_without_being_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:40 / {tmp_path} rw - nfs4 server:/home rw\n"
    monkeypatch.setattr(Path, "read_text", lambda _path, **_more: text)
    with pytest.raises(MachineError) as error:
        refuse_network(tmp_path / "models" / "a--b" / "UD-X" / "0123")
    assert error.value.code == "network-mount"
    assert f"--models-dir {tmp_path / 'models'}" in (error.value.hint or "")
    refuse_network(tmp_path.parent / "models" / "a--b" / "UD-X" / "0123")
