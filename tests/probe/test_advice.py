import random
from dataclasses import replace

import pytest

from kimigguf.probe.advice import advice
from kimigguf.probe.barren import Reason
from kimigguf.probe.calls import Arm, Call, Reply
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.report import headline, sentence
from kimigguf.probe.score import Metric, Scores, score
from kimigguf.probe.suites import Item, Number, Suite, load_suite, sizes

SUITES = {"quick": 32, "standard": 228, "basics": 202, "long": 35}


def reply(content: str) -> Reply:
    return Reply(
        content=content, thinking="", finish_reason="stop", tool_calls=0, prompt_tokens=5, completion_tokens=11,
        first_token_seconds=0.5, seconds=1.5, max_tokens=None,
    )  # fmt: skip


def compared(
    count: int,
    answers: dict[Arm, list[str]] | None = None,
    *,
    temperature: float | None = None,
    suites: dict[str, int] | None = None,
    tolerance: float = 0.05,
    checked: bool = True,
) -> Scores:
    items = [Item(id=f"i{n}", prompt=f"{n}?", check=Number(value=n) if checked else None) for n in range(count)]
    calls = [
        Call(arm=arm, item=f"i{n}", repeat=0, outcome=reply((answers or {}).get(arm, list(map(str, range(count))))[n]))
        for n in range(count)
        for arm in Arm
    ]
    found = score(Suite(name="mine", items=tuple(items)), calls, tolerance=tolerance)
    return replace(found, temperature=temperature, suites=SUITES if suites is None else suites)


def metric(found: Scores, name: str) -> Metric:
    return next(one for one in found.metrics if one.name == name)


def test_too_few_questions_come_with_the_suites_that_have_enough() -> None:
    found = compared(32)
    assert found.verdict is Verdict.NOT_ENOUGH
    said = advice(found)
    assert said is not None
    assert said.startswith("what would tell: about 73 questions in place of 32: --suite standard (228) or ")
    assert "--suite basics (202), or a suite of your own (--suite FILE" in said
    assert "long" not in said
    assert "--repeat" not in said  # nothing differs from itself: more rounds would say the same again


def test_where_no_suite_is_large_enough_that_is_said() -> None:
    said = advice(compared(32, suites={"quick": 32, "standard": 70}))
    assert said is not None
    assert "no suite here has so many (standard, the largest, has 70), only a suite of your own" in said


def test_more_rounds_are_offered_only_where_the_reference_differs_from_itself() -> None:
    again = [str(n) if n % 4 else "9999" for n in range(60)]
    candidate = [str(n) if n % 5 else "9999" for n in range(60)]
    said = advice(compared(60, {Arm.CANDIDATE: candidate, Arm.REFERENCE_AGAIN: again}, suites={}))
    assert said is not None
    less = "; the reference differs from itself: --temperature 0, where it takes one, or --repeat 3 makes that less"
    assert said.endswith(less)
    cold = advice(compared(60, {Arm.CANDIDATE: candidate, Arm.REFERENCE_AGAIN: again}, suites={}, temperature=0.0))
    assert (cold or "").endswith("; the reference differs from itself: --repeat 3 makes that less")


def test_a_number_that_nobody_will_ask_is_no_advice() -> None:
    found = compared(32, tolerance=0.001)
    assert sentence(found.metrics[0]).endswith(": no practical number of items would tell")
    said = advice(found)
    assert said is not None
    assert said.startswith("no practical number of questions would tell")
    assert "more items would tell" not in " ".join(map(sentence, found.metrics))


def test_what_more_questions_can_settle_is_told_apart_from_what_they_cannot() -> None:
    found = compared(32)
    few, many, settled = found.metrics
    mixed = replace(
        found, metrics=(few, replace(many, more_needed=9000), replace(settled, verdict=Verdict.SAME, more_needed=None))
    )
    said = advice(mixed)
    assert said is not None
    assert said.startswith("what would tell about right answers: about 73 questions in place of 32: --suite standard")
    assert "no practical number of questions would tell about same answer as the reference: the difference" in said
    assert "answered at all" not in said


@pytest.mark.parametrize(("count", "verdict"), [(32, Verdict.NOT_ENOUGH), (150, Verdict.UNKNOWN)])
def test_a_reference_that_is_never_right_is_not_told_to_need_more_questions(count: int, verdict: Verdict) -> None:
    wrong = dict.fromkeys(Arm, ["777777"] * count)
    found = compared(count, wrong)
    right = metric(found, "right answers")
    assert (found.verdict, right.reason, right.more_needed) == (verdict, Reason.NEVER_RIGHT, None)
    why = "the reference is never right here: these questions are too hard for it, or --max-tokens is too small"
    assert sentence(right).endswith(why)
    assert (advice(found) or "").endswith(f"{why}; --suite basics (202 questions) is easier")
    assert "basics" not in (advice(replace(found, suite="basics")) or "")
    assert "gave nothing to compare with" not in headline(found)


def test_a_reference_that_never_says_the_same_twice_is_called_that_with_the_way_out() -> None:
    chance = random.Random(3)
    answers = {arm: [f"text {chance.random()}" for _ in range(150)] for arm in Arm}
    found = compared(150, answers, checked=False)
    same = metric(found, "same answer as the reference")
    assert (same.verdict, same.reason) == (Verdict.UNKNOWN, Reason.NEVER_THE_SAME_TWICE)
    assert headline(found) == "unknown: the reference never says the same twice"
    assert sentence(same).endswith("the reference never says the same twice: --temperature 0, where it takes one")
    cold = compared(150, answers, checked=False, temperature=0.0)
    assert "--temperature" not in sentence(cold.metrics[0], temperature=0.0) + (advice(cold) or "")
    sometimes = {arm: ["yes" if n < 3 else text for n, text in enumerate(said)] for arm, said in answers.items()}
    assert headline(compared(150, sometimes, checked=False)) == "unknown: the reference hardly ever says the same twice"


def test_a_reference_with_anything_to_lose_has_no_reason() -> None:
    assert {one.reason for one in compared(32).metrics} == {None}
    worse = compared(60, {Arm.CANDIDATE: ["777777"] * 60})
    assert worse.verdict is Verdict.WORSE
    assert advice(worse) is None


def test_the_sizes_of_the_suites_are_those_that_are_asked() -> None:
    found = sizes({})
    assert {"quick", "standard", "tools", "basics", "long"} <= found.keys()
    assert {name: found[name] for name in ("quick", "standard")} == {
        name: len(load_suite(name, {}).items) for name in ("quick", "standard")
    }
