"""No capture may pass for what it is not."""

import json
from pathlib import Path

import pytest
from hardware.captures import DATA, provenance, unpack

CAPTURES = sorted(DATA.glob("*.capture"))
NVML = sorted(DATA.glob("*.nvml.json"))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_capture_says_where_it_is_from(path: Path) -> None:
    assert provenance(path.read_text()) in {"real", "constructed"}


@pytest.mark.parametrize("path", NVML, ids=lambda path: path.stem)
def test_every_nvml_capture_says_where_it_is_from(path: Path) -> None:
    assert json.loads(path.read_text())["provenance"].startswith(("real: ", "constructed"))


def test_a_capture_without_provenance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="real or constructed"):
        unpack("@@ proc/meminfo\nMemTotal: 1 kB\n", tmp_path)
