"""Models that every room's tests share, written once per run."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import k3_skeleton
import pytest
import tiny_k3
from fakes.processes import ONE_THREAD

ROOT = Path(__file__).parents[1]
os.environ |= ONE_THREAD


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random K3 of any quant; shared, so never written to."""
    base = tmp_path_factory.mktemp("tiny-k3")

    def folder(quant: str = "UD-IQ1_M") -> Path:
        if not (base / quant).is_dir():
            tiny_k3.write(base / quant, quant=quant)
        return base / quant

    return folder


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of K3 at its true size without weights (sparse), of any quant; shared, so never written to."""
    base = tmp_path_factory.mktemp("k3-skeleton")

    def folder(quant: str = "UD-IQ1_S") -> Path:
        if not (base / quant).is_dir():
            k3_skeleton.write(base / quant, quant)
        return base / quant

    return folder


@pytest.fixture(scope="session")
def native_bin() -> Path:
    """The folder of the native llama.cpp that scripts/build_engine made; skips where there is none."""
    answer = subprocess.run(
        [ROOT / "scripts" / "build_engine", "--print-dir"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        pytest.skip("no native llama.cpp: run scripts/build_engine")
    return Path(answer.stdout.strip())
