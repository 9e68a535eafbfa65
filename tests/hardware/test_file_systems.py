"""What a mount tells this user: O_DIRECT and quotas, tried without writing anything."""

import os
import struct
from pathlib import Path

import pytest
from hardware.captures import Loader

from kimigguf.hardware.disks import read_disks
from kimigguf.hardware.file_systems import direct_io_of, parse_quota
from kimigguf.units import GIB, KIB

TMPFILE = getattr(os, "O_TMPFILE", 0)
DIRECT = getattr(os, "O_DIRECT", 0)


def quota(hard: int, soft: int, used: int) -> bytes:
    """provenance: constructed, from struct if_dqblk in quotactl(2)."""
    return struct.pack("=8QI4x", hard // KIB, soft // KIB, used, 0, 0, 5, 0, 0, 63)


@pytest.mark.parametrize(
    ("hard", "soft", "used", "room"),
    [(0, 0, 5 * GIB, None), (10 * GIB, 0, 4 * GIB, 6 * GIB), (10 * GIB, 8 * GIB, 4 * GIB, 4 * GIB),
     (4 * GIB, 0, 9 * GIB, 0)],
)  # fmt: skip
def test_a_quota_leaves_what_its_tightest_limit_leaves(hard: int, soft: int, used: int, room: int | None) -> None:
    assert parse_quota(quota(hard, soft, used)) == room


def test_every_disk_says_o_direct_and_what_the_quota_leaves_or_why_not(capture: Loader) -> None:
    facts = read_disks(capture("disks"))
    disks = {disk.mount: disk for disk in facts.disks or ()}
    assert (disks["/"].direct_io, disks["/"].free_bytes) == (True, 3000000000000)
    assert (disks["/raid"].direct_io, disks["/raid"].free_bytes) == (False, 1000000000000)
    reasons = {one.what: one.reason for one in facts.unknown}
    data = list(disks).index("/data")
    assert disks["/data"].direct_io is None
    assert "no folder there can be written" in reasons[f"disks.{data}.direct_io"]
    assert "Function not implemented" in reasons[f"disks.{data}.quota"]
    assert "disks.0.quota" not in reasons


@pytest.mark.parametrize("refused", [False, True])
def test_a_folder_that_cannot_be_written_is_tried_by_reading_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 8192)
    real = os.open

    def guarded(path: str | Path, flags: int) -> int:
        if (flags & TMPFILE) == TMPFILE or (refused and flags & DIRECT):
            raise OSError(30 if (flags & TMPFILE) == TMPFILE else 22, "refused")
        return real(path, flags & ~DIRECT)

    monkeypatch.setattr("kimigguf.hardware.file_systems.os.open", guarded)
    assert direct_io_of(str(tmp_path)) is not refused
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "file"]
    (tmp_path / "a" / "file").unlink()
    with pytest.raises(OSError, match="no folder there can be written"):
        direct_io_of(str(tmp_path))
