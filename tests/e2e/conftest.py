"""A tiny random K3 that every test here serves, written once, and a home of its own for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_k3
from fakes.place import Place, placed


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_k3.write(folder)
    return folder


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Iterator[Place]:
    with placed(tmp_path, model) as place:
        yield place
