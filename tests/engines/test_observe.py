"""What ``status`` knows of a running server."""

import os
import threading
from dataclasses import replace
from pathlib import Path

from fakes.plans import make_plan
from fakes.processes import free_port

from kimigguf.engines.llama_server import Address
from kimigguf.engines.observe import baseline, device_records, metrics
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


def test_the_self_tests_last_request_is_not_counted_as_a_clients(tmp_path: Path) -> None:
    """It is answered a moment before the log tells its end."""
    log = tmp_path / "log"
    log.write_bytes(b"I slot launch_slot_: id  0 | task 1 | processing task, is_child = 0\n")

    def end() -> None:
        with log.open("ab") as file:
            file.write(b"I slot release: id  0 | task 1 | stop processing: n_tokens = 24, truncated = 0\n")

    threading.Timer(0.2, end).start()
    nobody = Address(host="127.0.0.1", port=free_port())
    assert baseline(nobody, None, pid=os.getpid(), log=log).held.finished == 1
