"""Stubs must answer for the model: true headers, true sizes, no room taken."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kimigguf.errors import MachineError
from kimigguf.gguf_file.shards import find_set, read_set
from kimigguf.gguf_file.stub import write_stubs


def test_a_stub_of_half_a_terabyte_has_the_true_size_and_takes_megabytes(
    skeleton: Callable[[str], Path], tmp_path: Path
) -> None:
    shards = read_set(find_set(skeleton("UD-IQ1_S")))
    first = write_stubs(shards, tmp_path)
    assert first.name == shards.files[0].name
    again = read_set(find_set(first))
    assert again.tensors == shards.tensors
    assert again.metadata == shards.metadata
    assert [(f.name, f.size_bytes) for f in again.files] == [(f.name, f.size_bytes) for f in shards.files]
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 50_000_000


def test_a_stub_holds_no_weights(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    shards = read_set(find_set(tiny("UD-IQ1_M")))
    write_stubs(shards, tmp_path)
    for file in shards.files:
        data = (tmp_path / file.name).read_bytes()
        start = file.header.data_offset
        assert data[:start] == file.header_path.read_bytes()[:start]
        assert not any(data[start:])


def test_a_folder_that_cannot_be_written_is_the_machines_fault(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError) as caught:
        write_stubs(read_set(find_set(tiny("UD-IQ1_M"))), tmp_path / "file")
    assert caught.value.code == "cannot-write"


@pytest.mark.native
def test_the_engine_answers_for_a_stub_as_for_the_model(
    skeleton: Callable[[str], Path], native_bin: Path, tmp_path: Path
) -> None:
    shards = read_set(find_set(skeleton("UD-IQ1_S")))
    argv = [str(native_bin / "llama-fit-params"), "-c", "131072", "-fitp", "on", "-m"]
    answers = [
        subprocess.run([*argv, str(path)], capture_output=True, text=True, check=True, timeout=120).stdout
        for path in (shards.files[0].header_path, write_stubs(shards, tmp_path))
    ]
    assert answers[0] == answers[1]
    # All weights lie on the host here; the engine counts each buffer in whole MiB.
    device, model, context, _ = answers[1].split()
    assert device == "Host"
    weights = sum(tensor.size_bytes or 0 for tensor in shards.tensors)
    assert int(model) == pytest.approx(weights / 2**20, abs=2)
    assert int(context) == (131_072 * 27_648 + 464_633_856) >> 20
