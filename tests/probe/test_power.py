"""What the statistics find and what they leave alone, over 100 simulated comparisons of 180 questions each."""

import random
from collections.abc import Callable

import pytest

from kimigguf.probe.calls import Arm, Call, Reply
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.score import score
from kimigguf.probe.suites import Item, Number, Suite

COUNT = 180
SUITE = Suite(name="drawn", items=tuple(Item(id=f"i{n}", prompt="?", check=Number(value=n)) for n in range(COUNT)))
HARDNESS = [random.Random(n).betavariate(4, 1) for n in range(COUNT)]
"""How often the reference gets each question right: mostly nearly always, a few seldom."""

Answer = Callable[[random.Random, int], str]


def honest(chance: random.Random, item: int) -> str:
    return str(item) if chance.random() < HARDNESS[item] else str(1000 + chance.randrange(4))


def weaker(chance: random.Random, item: int) -> str:
    return honest(chance, item) if chance.random() < 0.75 else str(1000 + chance.randrange(4))


def silent(chance: random.Random, item: int) -> str:
    return honest(chance, item) if chance.random() < 0.85 else ""


def wild(chance: random.Random, item: int) -> str:
    return honest(chance, item) if chance.random() < 0.75 else str(chance.randrange(5000, 9000))


def verdicts(candidate: Answer) -> list[Verdict]:
    found = []
    for seed in range(100):
        chance = random.Random(seed)
        calls = [
            Call(
                arm=arm,
                item=f"i{n}",
                repeat=0,
                outcome=reply((candidate if arm is Arm.CANDIDATE else honest)(chance, n)),
            )
            for n in range(COUNT)
            for arm in Arm
        ]
        found.append(score(SUITE, calls, tolerance=0.05).verdict)
    return found


def reply(content: str) -> Reply:
    return Reply(
        content=content, thinking="", finish_reason="stop", tool_calls=0, prompt_tokens=None, completion_tokens=None,
        first_token_seconds=None, seconds=1.0, max_tokens=None,
    )  # fmt: skip


def test_the_reference_judged_by_itself_is_called_worse_in_at_most_five_of_a_hundred() -> None:
    assert verdicts(honest).count(Verdict.WORSE) <= 5


@pytest.mark.parametrize("fault", [weaker, silent, wild])
def test_a_planted_fault_is_found_in_at_least_ninety_five_of_a_hundred(fault: Answer) -> None:
    assert verdicts(fault).count(Verdict.WORSE) >= 95
