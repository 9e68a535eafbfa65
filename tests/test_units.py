"""Sizes are parsed exactly, refused when ambiguous, and printed with their unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf import units
from kimigguf.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("1B", 1),
        ("900GB", 900 * 10**9),
        ("900 GiB", 900 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("594.040923616GB", 594_040_923_616),
        ("0.5kb", 500),
        (" 2mib ", 2 * 2**20),
    ],
)
def test_sizes_people_write_are_read_exactly(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["900G", "900g", "1.5T", "64M", "3k"])
def test_ambiguous_unit_is_refused_naming_both_readings(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_size(text)
    assert caught.value.code == "ambiguous-size"
    letter = text[-1].upper()
    assert f"{text[:-1]}{letter}B" in (caught.value.hint or "")
    assert f"{text[:-1]}{letter}iB" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "1,5GB", "nan", "1GBps", "1.GB", "9" * 40])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_size(text)
    assert caught.value.code == "bad-size"


@pytest.mark.parametrize("text", ["16", "1536", "1.5", "1048575"])
def test_a_number_that_lacks_its_unit_is_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        units.parse_size(text)
    assert caught.value.code == "ambiguous-size"
    assert f"{text}GiB" in (caught.value.hint or "")


def test_no_bytes_need_no_unit() -> None:
    assert (units.parse_size("0"), units.parse_size("16B")) == (0, 16)


@given(st.integers(min_value=2**20, max_value=2**62))
def test_plain_bytes_survive_unchanged(size_bytes: int) -> None:
    assert units.parse_size(str(size_bytes)) == size_bytes


def test_memory_is_gib_and_storage_is_gb() -> None:
    assert units.memory(594_040_923_616) == "553.2 GiB"
    assert units.storage(594_040_923_616) == "594.0 GB"
    assert units.storage(1_561_157_884_384) == "1.56 TB"
    assert units.memory(464_633_856) == "443.1 MiB"
    assert (units.memory(0), units.storage(0)) == ("0 GiB", "0 GB")
    assert units.rate(118_300_000) == "118.3 MB/s"


def test_unknown_is_printed_as_unknown() -> None:
    assert {units.memory(None), units.storage(None), units.rate(None), units.duration(None)} == {"unknown"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (42, "42 s"), (119.6, "2 min 00 s"), (4800, "1 h 20 min")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text
