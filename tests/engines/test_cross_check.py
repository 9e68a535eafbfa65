"""What an engine can use against what the machine has."""

from dataclasses import replace

import pytest

from kimigguf.engines.cross_check import disagreements
from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine
from kimigguf.hardware.machines import load_machine
from kimigguf.hardware.snapshot import Machine
from kimigguf.units import GIB

ENGINE = FoundEngine(
    kind=EngineKind.LLAMA_SERVER, path="/x", version="b1", build=11434, supports_k3=True, backends=("cpu", "cuda")
)
CARD = EngineDevice(name="CUDA0", description="NVIDIA GeForce RTX 3090", total_bytes=24126 << 20)


@pytest.mark.parametrize(
    ("machine", "devices", "said"),
    [
        ("xeon-768g-2x-rtx-3090", (CARD, CARD), None),
        ("xeon-768g-2x-rtx-3090", None, None),
        ("xeon-768g-2x-rtx-3090", (), "sees none of the 2 accelerator(s)"),
        ("xeon-768g-2x-rtx-3090", (CARD,), "lists 1 accelerator(s) (NVIDIA GeForce RTX 3090), this machine shows 2"),
        ("epyc-1536g-cpu", (CARD,), "this machine shows 0"),
        ("epyc-1536g-cpu", (), None),
        (
            "xeon-768g-2x-rtx-3090",
            (CARD, replace(CARD, total_bytes=12 * GIB)),
            "counts 12.0 GiB on an accelerator that the driver says has 24.0 GiB",
        ),
        ("dgx-spark", (replace(CARD, total_bytes=GIB),), None),
    ],
)
def test_a_disagreement_is_one_sentence(
    machine: str, devices: tuple[EngineDevice, ...] | None, said: str | None
) -> None:
    found = disagreements(load_machine(machine, {}), [replace(ENGINE, devices=devices)])
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_an_unknown_machine_and_a_refused_engine_disagree_with_nobody() -> None:
    assert disagreements(Machine(name="x", source="y"), [replace(ENGINE, devices=())]) == ()
    assert disagreements(load_machine("8x-b200", {}), [replace(ENGINE, devices=(), supports_k3=False)]) == ()
