"""What counts as progress of a load, so that a stall is named and a slow disk is not."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kimigguf.engines.progress import Activity, advanced, read_activity
from kimigguf.units import MIB

BEFORE = Activity(read_bytes=10 * MIB, resident_bytes=20 * MIB, processor_seconds=5.0, log_bytes=100)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, False),
        (replace(BEFORE, log_bytes=101), True),
        (replace(BEFORE, read_bytes=11 * MIB), True),  # though more is resident than read
        (replace(BEFORE, resident_bytes=21 * MIB), True),
        (replace(BEFORE, resident_bytes=15 * MIB), True),  # pages were dropped and are being read again
        (replace(BEFORE, processor_seconds=8.0), True),  # a third of a core: it converts or copies
        (replace(BEFORE, processor_seconds=5.5), False),  # what 100 answers to /health cost
        (replace(BEFORE, read_bytes=10 * MIB + 100, resident_bytes=20 * MIB + 4096), False),
        (Activity(read_bytes=None, resident_bytes=None, processor_seconds=None, log_bytes=100), True),  # all was lost
    ],
)
def test_ten_seconds_of_loading_are_told_from_ten_of_waiting(after: Activity, expected: bool) -> None:
    assert advanced(BEFORE, after, 10.0) is expected


def test_where_nothing_can_be_read_only_the_log_counts() -> None:
    blind = Activity(read_bytes=None, resident_bytes=None, processor_seconds=None, log_bytes=1)
    assert not advanced(blind, blind, 1000.0)
    assert advanced(blind, replace(blind, log_bytes=2), 1000.0)


def test_a_living_process_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("12345")
    activity = read_activity(os.getpid(), tmp_path / "log")
    assert activity.log_bytes == 5
    assert activity.loaded_bytes > MIB
    assert activity.processor_seconds is not None
