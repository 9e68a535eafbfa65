"""The ledger against the engine's own memory report, to the MiB."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import QUANTS, ask, differences, golden, random_case
from rpc_devices import rpc_devices

from kimigguf.gguf_file.shards import find_set, read_set
from kimigguf.memory.model import ModelSpec

LIVE_CASES = 12
LIVE_SECONDS = 40.0


@pytest.mark.parametrize("quant", QUANTS)
def test_no_recorded_answer_of_the_engine_differs_by_a_mebibyte(skeleton: Callable[[str], Path], quant: str) -> None:
    spec = ModelSpec.from_shards(read_set(find_set(skeleton(quant))))
    cases = [(case, answer) for case, answer in golden() if case.quant == quant]
    assert len(cases) >= 40
    for case, answer in cases:
        wrong = [str(one) for one in differences(spec, case, answer) if one.percent or not one.is_within_the_bar]
        assert not wrong, f"{case}: {wrong}"


@pytest.mark.native
def test_the_engine_agrees_on_command_lines_that_nobody_recorded(
    native_bin: Path, skeleton: Callable[[str], Path]
) -> None:
    """A failure names the seed; scripts/check_ledger --live N --seed S goes through the same lines again."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    files = {quant: find_set(skeleton(quant)) for quant in QUANTS}
    specs = {quant: ModelSpec.from_shards(read_set(files[quant])) for quant in QUANTS}
    answered = 0
    with rpc_devices(native_bin, 4) as running:
        deadline = time.monotonic() + LIVE_SECONDS
        for _ in range(LIVE_CASES):
            if time.monotonic() > deadline:
                break
            case = random_case(chance)
            answer = ask(running, files[case.quant][0], case)
            if not answer:
                continue
            answered += 1
            compared = differences(specs[case.quant], case, answer)
            outside = [str(one) for one in compared if not one.is_within_the_bar]
            assert not outside, f"seed {seed}, {case}: {outside}"
    assert answered, f"seed {seed}: the engine answered none of the command lines"
