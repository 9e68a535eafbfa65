"""What the probe finds and what it leaves alone, over 100 comparisons drawn from real answers of a small model.

The pool (scripts/record_probe_pool) holds answers of SmolLM2-135M-Instruct to the suite "basics", several to each
question, from a sound server and from damaged ones. A run draws one answer to each question for each arm, never the
same sample twice, and goes through the scoring that every report goes through.
"""

import gzip
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from kimigguf.probe.calls import Arm, Call, Outcome
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.score import score
from kimigguf.probe.suites import Suite, load_suite

POOL = Path(__file__).parents[1] / "data" / "probe" / "pool.jsonl.gz"
RUNS = 100
SOUND = "sound"


@cache
def recipe() -> dict[str, Any]:
    return dict(_rows()[0])


@cache
def pool() -> dict[str, dict[str, list[Outcome]]]:
    """The outcomes of each recording by item."""
    adapter: TypeAdapter[Outcome] = TypeAdapter(Outcome)
    found: dict[str, dict[str, list[Outcome]]] = {}
    for row in _rows()[1:]:
        told = {key: value for key, value in row.items() if key not in {"recording", "item", "sample"}}
        timed = told if "kind" in told else {**told, "seconds": 1.0, "first_token_seconds": None}
        found.setdefault(row["recording"], {}).setdefault(row["item"], []).append(adapter.validate_python(timed))
    return found


@cache
def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(POOL.read_bytes()).decode().splitlines()]


@cache
def suite() -> Suite:
    return load_suite(recipe()["suite"], {})


def drawn(candidate: str, seed: int) -> tuple[Suite, list[Call]]:
    """One run: an answer of each arm to each question, all of them different samples."""
    chance = random.Random(seed)
    calls = []
    for item in suite().items:
        own = pool()[SOUND][item.id]
        if candidate == SOUND:
            judged, reference, again = chance.sample(own, 3)
        else:
            reference, again = chance.sample(own, 2)
            judged = chance.choice(pool()[candidate][item.id])
        for arm, outcome in zip(Arm, (judged, reference, again), strict=True):
            calls.append(Call(arm=arm, item=item.id, repeat=0, outcome=outcome))
    return suite(), calls


def verdicts(candidate: str) -> Counter[Verdict]:
    return Counter(score(*drawn(candidate, seed), tolerance=0.05).verdict for seed in range(RUNS))


FAULTS = sorted({*recipe()["recordings"]} - {SOUND})


def test_the_pool_is_of_the_questions_that_there_are_and_runs_differ() -> None:
    assert recipe()["suite_sha256"] == suite().sha256
    for name, told in recipe()["recordings"].items():
        assert {item.id for item in suite().items} == set(pool()[name])
        assert {len(found) for found in pool()[name].values()} == {told["samples"]}
    assert drawn(SOUND, 1)[1] != drawn(SOUND, 2)[1]


def test_the_model_judged_by_itself_is_called_worse_in_at_most_five_of_a_hundred() -> None:
    assert verdicts(SOUND)[Verdict.WORSE] <= 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_at_least_ninety_five_of_a_hundred(fault: str) -> None:
    assert verdicts(fault)[Verdict.WORSE] >= 95
