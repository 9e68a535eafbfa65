"""A capture by its name, unpacked."""

from pathlib import Path

import pytest
from hardware.captures import Loader, load


@pytest.fixture
def capture(tmp_path: Path) -> Loader:
    return lambda name: load(name, tmp_path / name)
