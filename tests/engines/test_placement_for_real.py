"""A plan's placement, said to a real llama-server with loopback RPC workers as devices, is where the bytes end up.

The engine's own load log is the judge: the field's accidents were placements that read well and were not carried out.
"""

import os
from pathlib import Path

import pytest
import tiny_k3
from fakes.plans import make_layout, make_plan
from fakes.processes import free_port
from rpc_devices import rpc_devices

from kimigguf.engines.command import Command
from kimigguf.engines.llama_server import Address, Server
from kimigguf.engines.loaded import parse_log
from kimigguf.gguf_file.shards import read_set
from kimigguf.memory.layout import Layout
from kimigguf.memory.ledger import Column, ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import PlannedFile
from kimigguf.units import KIB

pytestmark = [pytest.mark.engine, pytest.mark.native]

LAYOUTS = {
    "all on one": make_layout([0] * 6, head=0, devices=1),
    "trunk on one, experts on the host": make_layout([0] * 6, experts=[None] * 6, head=0, devices=1),
    "split by layers": make_layout([None, 0, 0, 1, 1, 1], head=1, devices=2),
    "experts crossed": make_layout([0, 0, 0, 1, 1, 1], experts=[0, 1, None, 0, None, 1], head=1, devices=2),
    "head on the host": make_layout([None, None, 0, 0, 1, 1], head=None, devices=2),
    "head alone": make_layout([None] * 6, head=1, devices=2),
    "a device with experts alone": make_layout([0] * 6, experts=[1] * 6, head=0, devices=2),
    "one tensor moved": Layout(
        devices=("gpu0", "gpu1"),
        layers=make_layout([0] * 6, experts=[None] * 6).layers,
        head=0,
        moved=(("blk.3.ffn_up_exps.weight", 1), ("blk.4.ffn_down_exps.weight", 0)),
    ),
}
ALIGNMENT_BYTES = 64 * KIB
"""Of all tensors of a device together; what the ledger leaves out."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bytes_lie_where_the_plan_says(tiny: Path, native_bin: Path, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    files = sorted(tiny.glob("*.gguf"))
    spec = ModelSpec.from_shards(read_set(files))
    settings = Settings(context_tokens=1024, ubatch_tokens=64, prompt_cache_bytes=0, checkpoints=0)
    planned_files = tuple(PlannedFile(name=file.name, size_bytes=file.stat().st_size) for file in files)
    plan = make_plan(layout=layout, settings=settings, folder=tiny, files=planned_files)
    counted = ledger(spec, settings, layout)
    count = len(layout.devices)
    with rpc_devices(native_bin, count) as running:
        spoken = running.command(plan).argv
        port = free_port()
        argv = tuple(
            str(port) if before == "--port" else word for before, word in zip(("", *spoken), spoken, strict=False)
        )
        made = Command(argv=(argv[0], "--rpc", running.addresses(count), *argv[1:]), environ=dict(os.environ))
        address = Address(host="127.0.0.1", port=port)
        with Server.start(made, address, alias="kimi-k3", log=tmp_path / "log", total_bytes=1) as server:
            server.wait_ready()
            log = server.log_text()
        # Every RPC device's memory is called RPC0[its address].
        for index, one in enumerate(running.ports):
            log = log.replace(f"RPC0[127.0.0.1:{one}]", f"RPC{index}")
    names = [f"RPC{index}" for index in range(count)]
    report = parse_log(log, names)
    assert report is not None
    for index, device in enumerate(names):
        assert abs(report[device].model_bytes - counted.total_bytes(index, column=Column.MODEL)) < ALIGNMENT_BYTES
        assert abs(report[device].context_bytes - counted.total_bytes(index, column=Column.CONTEXT)) < ALIGNMENT_BYTES


def test_the_tiny_model_has_as_many_layers_as_these_layouts() -> None:
    assert all(len(layout.layers) == tiny_k3.LAYERS for layout in LAYOUTS.values())
