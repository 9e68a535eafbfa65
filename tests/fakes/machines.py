"""Machines that this one is made to look like."""

import pytest

from kimigguf.hardware.snapshot import DETECTED, THIS_MACHINE, Accelerator, Machine, MemoryKind, Ram
from kimigguf.units import GIB


def two_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a small GPU first on its bus and a large one behind it."""
    small = Accelerator(name="NVIDIA GeForce RTX 3090", memory_kind=MemoryKind.DISCRETE, total_bytes=24 * GIB)
    large = Accelerator(name="NVIDIA RTX PRO 6000", memory_kind=MemoryKind.DISCRETE, total_bytes=96 * GIB)
    here = Machine(
        name=THIS_MACHINE, source=DETECTED, ram=Ram(total_bytes=1024 * GIB), accelerators=(small, large), disks=()
    )
    assert here.is_this_one
    monkeypatch.setattr("kimigguf.hardware.detect.detect", lambda **_: here)
