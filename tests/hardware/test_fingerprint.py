"""Which machine it was: the same facts hold a plan and a measurement."""

from dataclasses import replace

import pytest

from kimigguf.hardware.fingerprint import Card, Fingerprint, differences, fingerprint
from kimigguf.hardware.snapshot import Accelerator, Cpu, Machine, Ram

MACHINE = Machine(
    name="box",
    source="test",
    cpu=Cpu(model="AMD EPYC 9355"),
    ram=Ram(total_bytes=768 << 30),
    accelerators=(Accelerator(name="RTX", total_bytes=96 << 30, free_bytes=1),),
)
BOX = fingerprint(MACHINE)


def test_a_fingerprint_holds_what_stays_and_nothing_that_changes() -> None:
    assert Fingerprint(
        name="box", cpu="AMD EPYC 9355", ram_bytes=768 << 30, cards=(Card(name="RTX", total_bytes=96 << 30),)
    ) == fingerprint(replace(MACHINE, ram=replace(MACHINE.ram, available_bytes=5)))
    assert fingerprint(replace(MACHINE, accelerators=None)).cards is None
    assert fingerprint(replace(MACHINE, accelerators=())).cards == ()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BOX, ()),
        (replace(BOX, ram_bytes=760 << 30), ()),
        (replace(BOX, ram_bytes=None), ()),
        (replace(BOX, ram_bytes=384 << 30), ("RAM: 384.0 GiB installed, 768.0 GiB in the plan",)),
        (replace(BOX, cards=()), ("accelerators: 0 now, 1 in the plan",)),
        (
            replace(BOX, cards=(Card(name="GTX", total_bytes=24 << 30),)),
            ("gpu0: GTX with 24.0 GiB now, RTX with 96.0 GiB in the plan",),
        ),
    ],
)
def test_what_differs_is_named_with_both_sides(now: Fingerprint, said: tuple[str, ...]) -> None:
    assert differences(BOX, now, told_by="the plan") == said
