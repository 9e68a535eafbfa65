"""Plans for tests: a real plan value over any layout, with files that need not exist."""

from pathlib import Path

from kimigguf.memory.layout import LayerPlace, Layout
from kimigguf.memory.ledger import Ledger
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import Plan, PlannedFile, PlannedMachine, PlannedModel


def make_layout(
    trunk: list[int | None], *, experts: list[int | None] | None = None, head: int | None = None, devices: int = 0
) -> Layout:
    experts = trunk if experts is None else experts
    return Layout(
        devices=tuple(f"gpu{index}" for index in range(devices)),
        layers=tuple(LayerPlace(trunk=t, experts=e) for t, e in zip(trunk, experts, strict=True)),
        head=head,
    )


def make_plan(
    *,
    layout: Layout | None = None,
    settings: Settings | None = None,
    folder: Path | None = None,
    files: tuple[PlannedFile, ...] | None = None,
    architecture: str = "kimi-k3",
) -> Plan:
    layout = layout or Layout.on_host(93)
    if files is None:
        files = tuple(
            PlannedFile(name=f"Kimi-K3-UD-IQ1_M-{n:05}-of-00003.gguf", size_bytes=n * 1000) for n in range(1, 4)
        )
    return Plan(
        model=PlannedModel(
            architecture=architecture,
            quant="UD-IQ1_M",
            repository=None,
            commit=None,
            folder=str(folder) if folder else "/models/k3",
            files=files,
        ),
        machine=PlannedMachine(name="test", ram_bytes=None, device_names=(), device_bytes=()),
        settings=settings or Settings(),
        layout=layout,
        ledger=Ledger(devices=layout.devices, rows=()),
    )
