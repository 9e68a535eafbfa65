from pathlib import Path

import pytest
import tiny_k3
from fakes.plans import make_plan

from kimigguf.memory.layout import Layout
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import Plan, PlannedFile
from kimigguf.units import MIB


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random K3 in shards."""
    folder = tmp_path_factory.mktemp("tiny-k3")
    tiny_k3.write(folder)
    return folder


@pytest.fixture
def tiny_plan(tiny: Path) -> Plan:
    files = tuple(PlannedFile(name=f.name, size_bytes=f.stat().st_size) for f in sorted(tiny.glob("*.gguf")))
    settings = Settings(context_tokens=4096, ubatch_tokens=128, prompt_cache_bytes=16 * MIB, checkpoints=2)
    return make_plan(layout=Layout.on_host(tiny_k3.LAYERS), settings=settings, folder=tiny, files=files)
