from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.gguf_set import write_set
from fakes.ollama import serve
from fakes.ollama_store import Ollama
from fakes.sources import source_of

from kimigguf.ollama import storage
from kimigguf.ollama.source import Source


@pytest.fixture(autouse=True)
def no_other_ollama(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ollama that happens to be installed here must not decide what the tests see."""
    monkeypatch.setattr(storage, "_from_process", lambda: None)
    monkeypatch.setattr(storage, "_from_unit", lambda: None)
    monkeypatch.setattr(storage, "_SERVICE_MODELS", Path("/nonexistent"))


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Ollama]:
    with serve(tmp_path / "models") as server:
        yield server


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, ...]:
    return write_set(tmp_path / "UD-IQ1_S")


@pytest.fixture
def source(shards: tuple[Path, ...]) -> Source:
    return source_of(shards)
