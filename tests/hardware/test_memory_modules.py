"""Memory modules without root."""

import pytest
from hardware.captures import Loader
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.hardware.linux import read_ram
from kimigguf.hardware.memory_modules import Module, describe, parse_udev, rated_bytes_per_second
from kimigguf.units import GIB

DIMM = Module(size_bytes=32 * GIB, kind="DDR5", transfers_per_second=4_800_000_000, channel="P0 CHANNEL A")


def dimm(**changes: object) -> Module:
    from dataclasses import replace

    return replace(DIMM, **changes)  # type: ignore[arg-type]  # a test's own fields


def test_modules_are_told_without_root_and_empty_slots_are_none(capture: Loader) -> None:
    facts = read_ram(capture("ddr5-two-channels"))
    assert facts.ram is not None
    assert facts.ram.modules == "2 x 32 GiB DDR5-5600"
    assert facts.ram.rated_bytes_per_second == 89_600_000_000
    assert facts.unknown == ()


def test_where_nothing_tells_the_command_that_would_is_named(capture: Loader) -> None:
    (unknown,) = read_ram(capture("gb10")).unknown
    assert unknown.what == "ram.modules"
    assert "sudo dmidecode -t memory" in unknown.reason


@pytest.mark.parametrize(
    ("modules", "rated"),
    [
        ((), None),
        ((DIMM, dimm(channel="P0 CHANNEL B")), 76_800_000_000),
        ((DIMM, DIMM), 38_400_000_000),  # two modules on one channel carry no more than one
        ((DIMM, dimm(channel="P1 CHANNEL A", transfers_per_second=4_000_000_000)), 64_000_000_000),
        ((DIMM, dimm(channel=None)), None),
        ((DIMM, dimm(transfers_per_second=None, channel="P0 CHANNEL B")), None),
        ((dimm(kind="LPDDR5"),), None),
    ],
)
def test_the_rated_speed_counts_channels_and_not_modules(modules: tuple[Module, ...], rated: int | None) -> None:
    assert rated_bytes_per_second(modules) == rated


def test_unlike_modules_are_listed_apart() -> None:
    assert describe((DIMM, DIMM, dimm(size_bytes=16 * GIB, kind=None, transfers_per_second=None))) == (
        "2 x 32 GiB DDR5-4800, 1 x 16 GiB memory"
    )


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    assert all(module.size_bytes > 0 for module in parse_udev(text))
