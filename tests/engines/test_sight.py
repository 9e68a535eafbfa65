"""What an engine sees: a plan for accelerators that it cannot drive, or in another order, misplaces bytes."""

from dataclasses import replace

from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine
from kimigguf.engines.sight import seen_by, undescribed, unseen
from kimigguf.hardware.snapshot import Accelerator, Machine, MemoryKind, Unknown
from kimigguf.units import GIB

PRO = Accelerator(
    name="NVIDIA RTX PRO 6000 Blackwell", memory_kind=MemoryKind.DISCRETE, total_bytes=96 * GIB, free_bytes=95 * GIB
)
OLD = Accelerator(
    name="NVIDIA GeForce RTX 3090", memory_kind=MemoryKind.DISCRETE, total_bytes=24 * GIB, free_bytes=23 * GIB
)


def engine(*devices: EngineDevice, known: bool = True) -> FoundEngine:
    return FoundEngine(
        kind=EngineKind.LLAMA_SERVER,
        path="/opt/llama-server",
        version="v",
        build=11434,
        supports_k3=True,
        backends=("cpu",),
        devices=devices if known else None,
    )


def machine(*accelerators: Accelerator) -> Machine:
    return Machine(name="m", source="test", accelerators=accelerators)


def test_the_engines_order_wins_over_the_drivers() -> None:
    seen = seen_by(
        machine(OLD, PRO),
        engine(
            EngineDevice(name="CUDA0", description="NVIDIA RTX PRO 6000 Blackwell", total_bytes=95 * GIB),
            EngineDevice(name="CUDA1", description="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB),
        ),
    )
    assert [a.name for a in seen.accelerators or ()] == [PRO.name, OLD.name]


def test_what_the_engine_finds_free_counts_where_it_is_less() -> None:
    device = EngineDevice(name="CUDA0", description="NVIDIA GeForce RTX 3090", free_bytes=10 * GIB)
    (seen,) = seen_by(machine(OLD), engine(device)).accelerators or ()
    assert seen.free_bytes == 10 * GIB
    assert seen.total_bytes == 24 * GIB


def test_an_engine_without_devices_gets_no_plan_for_any_and_says_so() -> None:
    assert seen_by(machine(PRO, OLD), engine()).accelerators == ()
    sentence = unseen(machine(PRO, OLD), engine())
    assert sentence is not None
    assert "2 of this machine's 2" in sentence
    assert unseen(machine(), engine()) is None


def test_a_vulkan_driver_that_computes_on_the_processor_is_no_accelerator() -> None:
    device = EngineDevice(name="Vulkan0", description="llvmpipe (LLVM 15.0.7, 256 bits)", total_bytes=64 * GIB)
    assert seen_by(machine(), engine(device)).accelerators == ()


def test_an_accelerator_that_only_the_engine_knows_has_memory_of_unknown_kind() -> None:
    device = EngineDevice(name="Vulkan0", description="AMD Radeon Graphics", total_bytes=8 * GIB)
    (seen,) = seen_by(machine(), engine(device)).accelerators or ()
    assert seen.memory_kind is None
    assert seen.total_bytes == 8 * GIB


def test_an_engine_that_could_not_be_asked_changes_nothing() -> None:
    assert seen_by(machine(PRO), engine(known=False)) == machine(PRO)
    assert unseen(machine(PRO), engine(known=False)) is None


def test_a_device_of_whose_memory_nothing_is_known_is_not_left_out_in_silence() -> None:
    """NVIDIA's driver did not answer in time: a plan without the card looks like one for a machine without it."""
    device = EngineDevice(name="CUDA0", description="NVIDIA RTX PRO 6000 Blackwell", total_bytes=95 * GIB)
    silent = Machine(
        name="m", source="test", unknown=(Unknown(what="accelerators.nvidia", reason="no answer within 10 s"),)
    )
    for known in (silent, replace(silent, accelerators=(Accelerator(name=device.description),))):
        sentence = undescribed(known, engine(device))
        assert sentence is not None
        assert "CUDA0 (NVIDIA RTX PRO 6000 Blackwell)" in sentence
        assert "no answer within 10 s" in sentence


def test_nothing_is_said_about_devices_that_are_known() -> None:
    device = EngineDevice(name="CUDA0", description="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)
    assert undescribed(machine(OLD), engine(device)) is None
    assert undescribed(machine(), engine(EngineDevice(name="MTL0", description="Apple M3 Ultra"))) is None
    assert undescribed(machine(), engine(known=False)) is None
