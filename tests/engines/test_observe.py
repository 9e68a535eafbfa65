"""What ``status`` knows of a running server."""

from dataclasses import replace

from fakes.plans import make_plan

from kimigguf.engines.observe import device_records, metrics
from kimigguf.hardware.snapshot import Accelerator
from kimigguf.memory.ledger import Column, Component, Ledger, Row, Source
from kimigguf.placement.plan import PlannedMachine
from kimigguf.units import GIB


def test_prometheus_numbers_are_read_by_name() -> None:
    page = (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens\n# TYPE llamacpp:prompt_tokens_total counter\n"
        "llamacpp:prompt_tokens_total 345\nllamacpp:predicted_tokens_seconds 5.25\nbroken\n"
    )
    assert metrics(page) == {"prompt_tokens_total": 345.0, "predicted_tokens_seconds": 5.25}


def test_each_card_stands_with_what_was_planned_on_it_and_what_is_in_use() -> None:
    rows = tuple(
        Row(component=Component.TRUNK, device=device, size_bytes=(device + 1) * GIB, source=Source.HEADER,
            column=Column.MODEL)
        for device in range(3)
    )  # fmt: skip
    names = ("RTX 3090", "RTX 4090", "RTX 3090")
    machine = PlannedMachine(name="m", ram_bytes=None, device_names=names, device_bytes=(24 * GIB,) * 3)
    plan = replace(make_plan(), ledger=Ledger(devices=("gpu0", "gpu1", "gpu2"), rows=rows), machine=machine)
    found = (
        Accelerator(name="RTX 3090", total_bytes=24 * GIB, free_bytes=20 * GIB),
        Accelerator(name="RTX 3090", total_bytes=24 * GIB, free_bytes=21 * GIB),
    )
    first, second, third = device_records(plan, found)
    assert first == {
        "device": "gpu0", "name": "RTX 3090", "planned_bytes": GIB, "used_bytes": 4 * GIB, "total_bytes": 24 * GIB,
    }  # fmt: skip
    assert (second["planned_bytes"], second["used_bytes"]) == (2 * GIB, None)  # not there any more
    assert (third["planned_bytes"], third["used_bytes"]) == (3 * GIB, 3 * GIB)
    assert [record["used_bytes"] for record in device_records(plan, None)] == [None] * 3
