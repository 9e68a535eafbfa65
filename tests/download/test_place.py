"""Where models go if nobody says: never where it is slow, foreign or gone, and later commands look there too."""

import os
from pathlib import Path

import pytest

from kimigguf.download import disk, place, store
from kimigguf.download.place import Disks, choose, own_disk, settle
from kimigguf.errors import MachineError
from kimigguf.events import Event, Notice
from kimigguf.hardware.host import Host
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.snapshot import Disk, DiskKind

GB = 10**9
SET = 600 * GB


def a_disk(
    mount: str,
    kind: DiskKind | None = DiskKind.NVME,
    free: int | None = 1000 * GB,
    *,
    read_only: bool = False,
    members: tuple[str, ...] = (),
) -> Disk:
    return Disk(mount=mount, kind=kind, free_bytes=free, read_only=read_only, members=members)


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (a_disk("/"), (a_disk("/nv", free=9000 * GB),), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/nv"),), "/nv"),
        (a_disk("/", None), (a_disk("/nv"),), "/nv"),
        (a_disk("/", DiskKind.NETWORK), (a_disk("/nv"),), "/nv"),
        (None, (a_disk("/nv"),), "/nv"),
        (a_disk("/", free=10 * GB), (a_disk("/nv"),), "/nv"),
        (a_disk("/", free=10 * GB), (a_disk("/ssd", DiskKind.SSD), a_disk("/hdd", DiskKind.HDD)), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/nv", free=10 * GB),), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/nv", free=None),), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/nv", read_only=True),), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/b", free=SET), a_disk("/a", free=SET), a_disk("/c", free=SET - 1)), "/a"),
        (a_disk("/", DiskKind.HDD), (a_disk("/a", free=SET), a_disk("/b", free=SET + 1)), "/b"),
        (a_disk("/", DiskKind.HDD), (a_disk("/boot"), a_disk("/var/lib/x"), a_disk("/tmp")), None),
        (a_disk("/", DiskKind.HDD), (a_disk("/variety"),), "/variety"),
        (a_disk("/home", DiskKind.SSD), (a_disk("/"), a_disk("/home", DiskKind.SSD)), "/"),
    ],
)
def test_a_place_is_left_only_for_a_local_nvme_with_room(
    own: Disk | None, others: tuple[Disk, ...], chosen: str | None
) -> None:
    for usable in (others, others[::-1]):
        found = choose(Disks(usable=usable, own=own), SET)
        assert (found.mount if found else None) == chosen


MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
23 22 0:30 / /tmp rw - tmpfs tmpfs rw
30 22 254:1 / /data rw - xfs /dev/nvme0n1 rw
31 22 254:1 /sub /home/me/sub rw - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("folder", "mount"), [("/home/me", "/"), ("/data/x", "/data"), ("/home/me/sub/x", "/data"), ("/tmp/x", None)]
)
def test_the_own_disk_is_known_by_its_mount_even_if_that_is_listed_under_another(
    folder: str, mount: str | None
) -> None:
    disks = (
        Disk(mount="/", device="/dev/vda", file_system="ext4"),
        Disk(mount="/data", device="/dev/nvme0n1", file_system="xfs"),
    )
    own = own_disk(Path(folder), disks, parse_mountinfo(MOUNTS))
    assert (own.mount if own else None) == mount


def test_what_is_foreign_removable_or_not_ours_to_write_is_never_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = {
        "nvme0n1": ("pci0000:00/0000:01:00.0/nvme/nvme0", "0", "fixed"),
        "nvme1n1": ("pci0000:00/0000:02:00.0/nvme/nvme1", "0", "removable"),
        "sda": ("pci0000:00/0000:03:00.0/usb1/1-1/host0/block", "0", "unknown"),
        "mmcblk0": ("pci0000:00/0000:04:00.0/mmc0", "1", "fixed"),
    }
    (tmp_path / "sys" / "class" / "block").mkdir(parents=True)
    for name, (above, removable, plug) in drives.items():
        folder = tmp_path / "sys" / "devices" / above / name
        folder.mkdir(parents=True)
        (folder / "removable").write_text(removable)
        (folder.parents[1] / "removable").write_text(plug)
        (tmp_path / "sys" / "class" / "block" / name).symlink_to(folder)
    for mount in ("good", "theirs", "plugged", "stick", "card", "media/me/disk", "net", "ro"):
        (tmp_path / mount).mkdir(parents=True)
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: access(path, mode) and path != tmp_path / "theirs")
    disks = (
        a_disk("/good", members=("nvme0n1",)),
        a_disk("/theirs", members=("nvme0n1",)),
        a_disk("/plugged", members=("nvme0n1", "nvme1n1")),
        a_disk("/stick", DiskKind.SSD, members=("sda",)),
        a_disk("/card", DiskKind.SSD, members=("mmcblk0",)),
        a_disk("/media/me/disk", members=("nvme0n1",)),
        a_disk("/net", DiskKind.NETWORK),
        a_disk("/ro", read_only=True),
    )
    assert [found.mount for found in disk.usable(disks, Host(root=tmp_path))] == ["/good"]
    (tmp_path / "theirs" / "kimigguf").mkdir()  # an administrator has made us one
    assert [found.mount for found in disk.usable(disks, Host(root=tmp_path))] == ["/good", "/theirs"]


@pytest.fixture
def nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any word on the models folder, and an NVMe drive with room."""
    drive = tmp_path / "nvme"
    drive.mkdir()
    monkeypatch.setattr("platformdirs.user_config_path", lambda _name: tmp_path / "config")
    monkeypatch.setattr("platformdirs.user_data_path", lambda _name: tmp_path / "data")
    monkeypatch.setattr(disk, "read_all", lambda: (a_disk(str(drive)),))
    monkeypatch.setattr(place, "_SYSTEM", frozenset())  # these tests run under /tmp
    return drive


def test_the_place_is_said_once_and_every_later_look_finds_it(nvme: Path) -> None:
    said: list[Event] = []
    folder = settle(store.models_dir({}), SET, listen=said.append)
    assert folder == nvme / "kimigguf" / "models"
    assert store.models_dir({}) == folder
    assert settle(store.models_dir({}), SET, listen=said.append) == folder
    (notice,) = said
    assert isinstance(notice, Notice)
    assert str(folder) in notice.text
    assert "--models-dir" in notice.text


def test_only_to_look_leaves_no_trace(nvme: Path, tmp_path: Path) -> None:
    assert settle(store.models_dir({}), SET, remember=False) == nvme / "kimigguf" / "models"
    assert store.models_dir({}) == tmp_path / "data" / "models"
    assert not list(nvme.iterdir())


@pytest.mark.parametrize("name", ["kimigguf.json", "a-00001-of-00002.gguf", "a-00001-of-00002.gguf.part"])
def test_a_data_folder_with_anything_of_a_set_in_it_is_kept(nvme: Path, name: str) -> None:
    models = store.models_dir({})
    (models / "a--b" / "UD-X" / "0123").mkdir(parents=True)
    (models / "a--b" / "UD-X" / "0123" / name).write_text("")
    assert settle(models, SET) == models
    assert not list(nvme.iterdir())


def test_a_word_of_the_user_wins_over_what_was_chosen(nvme: Path, tmp_path: Path) -> None:
    settle(store.models_dir({}), SET)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text(f'models_dir = "{tmp_path}/mine"')
    assert store.models_dir({}) == tmp_path / "mine"
    assert store.models_dir({"KIMIGGUF_MODELS": "/mnt/b"}) == Path("/mnt/b")
    assert settle(tmp_path / "mine", SET) == tmp_path / "mine"
    assert nvme.is_dir()


def test_a_chosen_disk_that_is_not_mounted_is_said_and_nothing_is_written_below_its_mount_point(nvme: Path) -> None:
    folder = settle(store.models_dir({}), SET)
    folder.rmdir()
    with pytest.raises(MachineError) as error:
        settle(store.models_dir({}), SET)
    assert error.value.code == "disk-gone"
    assert str(nvme) in error.value.message
    assert not folder.exists()
    hint = str(error.value.hint)
    Path(hint.partition("rm ")[2]).unlink()
    assert settle(store.models_dir({}), SET) == folder


@pytest.mark.parametrize("refuses", ["the disk", "the memory of it"])
def test_a_place_that_cannot_be_made_or_remembered_is_not_used(
    nvme: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    real = Path.mkdir
    fault = nvme if refuses == "the disk" else store.choice_path().parent

    def mkdir(path: Path, *arguments: object, **more: object) -> None:
        if path.is_relative_to(fault):
            raise PermissionError(13, "Permission denied")
        real(path, *arguments, **more)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Path, "mkdir", mkdir)
    models = store.models_dir({})
    assert settle(models, SET) == models
    assert store.models_dir({}) == models


def test_a_mount_with_blanks_and_quotes_is_remembered_as_it_is(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / 'my "fast" disk\\ä'
    drive.mkdir()
    monkeypatch.setattr(disk, "read_all", lambda: (a_disk(str(drive)),))
    assert settle(store.models_dir({}), SET) == drive / "kimigguf" / "models"
    assert store.models_dir({}) == drive / "kimigguf" / "models"
    assert nvme.is_dir()
