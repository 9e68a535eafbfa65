"""What-ifs: one thing changed, the rest as it was."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.errors import UsageError
from kimigguf.hardware.machines import known_accelerators, load_machine
from kimigguf.hardware.snapshot import Machine, MemoryKind, Ram
from kimigguf.hardware.what_if import change, find_accelerator
from kimigguf.units import GIB, TB

KNOWN = known_accelerators({})
EPYC = load_machine("epyc-768g-rtx-pro-6000", {})


def own(machine: Machine) -> list[int | None]:
    return [card.total_bytes for card in machine.accelerators or () if card.memory_kind is MemoryKind.DISCRETE]


def test_the_issues_own_example() -> None:
    machine = change(EPYC, ["ram=1536GiB", "gpu+=rtx-pro-6000"], KNOWN)
    assert machine.ram == Ram(total_bytes=1536 * GIB)
    assert own(machine) == [96 * GIB, 96 * GIB]
    assert machine.disks == EPYC.disks
    assert machine.name == "epyc-768g-rtx-pro-6000 with ram=1536GiB, gpu+=rtx-pro-6000"


def test_no_change_is_the_same_machine() -> None:
    assert change(EPYC, [], KNOWN) is EPYC


def test_changes_are_made_in_order() -> None:
    assert own(change(EPYC, ["gpu=none", "gpu+=2xrtx-4090", "gpu+=24GiB"], KNOWN)) == [
        24564 << 20,
        24564 << 20,
        24 * GIB,
    ]
    assert own(change(EPYC, ["gpu=8xh200"], KNOWN)) == [143771 << 20] * 8
    assert change(EPYC, ["ram+=256GiB"], KNOWN).ram.total_bytes == 1024 * GIB
    assert [disk.free_bytes for disk in change(EPYC, ["disk+=8TB"], KNOWN).disks or ()] == [3 * TB, 8 * TB]


def test_what_was_measured_of_the_old_memory_does_not_bind_the_new() -> None:
    live = Machine(
        name="x",
        source="detected",
        ram=Ram(total_bytes=GIB, available_bytes=1, cgroup_limit_bytes=2, swap_total_bytes=3),
    )
    assert change(live, ["ram=2GiB"], ()).ram == Ram(total_bytes=2 * GIB, swap_total_bytes=3)


def test_the_pool_of_a_mac_grows_with_its_ram() -> None:
    (card,) = change(load_machine("mac-studio-512g", {}), ["ram=1024GiB"], KNOWN).accelerators or ()
    assert (card.total_bytes, card.working_set_bytes) == (1024 * GIB, 768 * GIB)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ram", "bad-change"),
        ("cpu=9", "bad-change"),
        ("ram=900G", "ambiguous-size"),
        ("ram=lots", "bad-size"),
        ("gpu+=none", "bad-change"),
        ("gpu=0xrtx-4090", "bad-change"),
        ("gpu+=rtx-9999", "unknown-gpu"),
        ("gpu+=-", "unknown-gpu"),
        ("gpu+=24", "unknown-gpu"),
        ("gpu+=rtx", "ambiguous-gpu"),
        ("gpu+=apple-m3-ultra", "unknown-gpu"),
        ("disk=", "bad-change"),
    ],
)
def test_a_change_that_makes_no_sense_is_told(text: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        change(EPYC, [text], KNOWN)
    assert caught.value.code == code
    assert caught.value.hint


def test_nothing_is_added_to_an_unknown_size() -> None:
    with pytest.raises(UsageError, match="unknown"):
        change(Machine(name="x", source="y"), ["ram+=1GiB"], ())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("h200", "NVIDIA H200"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("rtx-pro-6000-server", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("mi300x", "AMD Instinct MI300X"),
        ("NVIDIA B200", "NVIDIA B200"),
    ],
)
def test_cards_are_found_by_the_words_people_use(text: str, name: str) -> None:
    assert find_accelerator(text, KNOWN).name == name


@given(st.text())
def test_no_text_is_a_bug(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert change(EPYC, [text], KNOWN).ram.total_bytes is not None


def test_a_card_by_a_size_without_its_unit_is_told_how_to_write_it() -> None:
    with pytest.raises(UsageError) as caught:
        change(EPYC, ["gpu+=24"], KNOWN)
    assert "24GiB for a card of that much memory" in (caught.value.hint or "")
