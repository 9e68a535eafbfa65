import random

import pytest

from kimigguf.probe.calls import Arm, Call, Fault, FaultKind, Outcome, Reply, Shape
from kimigguf.probe.intervals import Verdict
from kimigguf.probe.score import Metric, Scores, score
from kimigguf.probe.suites import Item, Number, Suite


def suite(count: int, *, template: str | None = None) -> Suite:
    items = [Item(id=f"i{n}", prompt="?", check=Number(value=n), template=template) for n in range(count)]
    return Suite(name="test", items=tuple(items), sha256="0" * 64)


def reply(content: str, finish_reason: str = "stop", *, thinking: str = "", tool_calls: int = 0) -> Reply:
    return Reply(
        content=content,
        thinking=thinking,
        finish_reason=finish_reason,
        tool_calls=tool_calls,
        prompt_tokens=5,
        completion_tokens=11,
        first_token_seconds=0.5,
        seconds=1.5,
        max_tokens=None,
    )


FAULT = Fault(kind=FaultKind.RATE_LIMIT, status=429, text="slow down", tries=3)


def calls(count: int, **arms: list[Outcome]) -> list[Call]:
    """One call per arm and item; an arm that is not given answers right."""
    made = []
    for arm in Arm:
        outcomes = arms.get(arm.replace("-", "_"), [reply(str(n)) for n in range(count)])
        made += [Call(arm=arm, item=f"i{n}", repeat=0, outcome=outcome) for n, outcome in enumerate(outcomes)]
    return made


def metric(scores: Scores, name: str) -> Metric:
    return next(found for found in scores.metrics if found.name == name)


def test_the_same_answers_are_the_same_where_there_are_enough_of_them() -> None:
    found = score(suite(150), calls(150), tolerance=0.05)
    assert found.verdict is Verdict.SAME
    assert all(one.candidate == one.reference == 1.0 and one.noise == 0.0 for one in found.metrics)


def test_the_same_answers_to_few_questions_prove_nothing() -> None:
    found = score(suite(10), calls(10), tolerance=0.05)
    assert found.verdict is Verdict.NOT_ENOUGH
    more = metric(found, "right answers").more_needed
    assert more is not None
    assert more > 50


def test_a_candidate_that_is_often_wrong_is_worse() -> None:
    wrong: list[Outcome] = [reply(str(n) if n % 2 else "777") for n in range(60)]
    found = score(suite(60), calls(60, candidate=wrong), tolerance=0.05)
    assert found.verdict is Verdict.WORSE
    assert metric(found, "right answers").verdict is Verdict.WORSE
    assert metric(found, "right answers").candidate == pytest.approx(0.5)
    assert metric(found, "answered at all").verdict is not Verdict.WORSE


def test_a_candidate_that_answers_nothing_is_worse_in_answering() -> None:
    silent: list[Outcome] = [reply("" if n % 2 else str(n)) for n in range(60)]
    found = score(suite(60), calls(60, candidate=silent), tolerance=0.05)
    assert metric(found, "answered at all").verdict is Verdict.WORSE
    assert found.arms[0].shapes[Shape.EMPTY] == 30


def test_what_the_reference_differs_from_itself_is_not_held_against_the_candidate() -> None:
    """Both arms of the reference and the candidate guess alike: right seven times in ten."""
    chance = random.Random(11)

    def guesses() -> list[Outcome]:
        return [reply(str(n) if chance.random() < 0.7 else str(chance.randrange(1000, 9999))) for n in range(200)]

    found = score(
        suite(200), calls(200, candidate=guesses(), reference=guesses(), reference_again=guesses()), tolerance=0.05
    )
    assert found.verdict in {Verdict.SAME, Verdict.NOT_ENOUGH}
    noise = metric(found, "right answers").noise
    assert noise is not None
    assert 0.3 < noise < 0.55


@pytest.mark.parametrize(
    "outcome",
    [FAULT, reply("", "length", thinking="let me"), reply("", tool_calls=1), reply("no", "content_filter")],
    ids=["fault", "cut off while thinking", "tool call", "filter"],
)
@pytest.mark.parametrize("arm", ["candidate", "reference", "reference_again"])
def test_what_is_no_answer_of_the_model_never_counts_as_a_wrong_one(arm: str, outcome: Outcome) -> None:
    spoilt: list[Outcome] = [outcome if n % 2 else reply(str(n)) for n in range(60)]
    found = score(suite(60), calls(60, **{arm: spoilt}), tolerance=0.05)
    assert metric(found, "right answers").items == 30
    assert metric(found, "right answers").candidate == 1.0
    assert found.verdict is not Verdict.WORSE


def test_faults_are_counted_by_kind_and_apart_from_replies() -> None:
    arm = score(suite(4), calls(4, candidate=[FAULT, FAULT, reply("2"), reply("3")]), tolerance=0.05).arms[0]
    assert (arm.calls, dict(arm.faults), arm.right, arm.checked) == (4, {FaultKind.RATE_LIMIT: 2}, 2, 2)
    assert (arm.first_token_seconds, arm.seconds, arm.tokens_per_second) == (0.5, 1.5, 10.0)
    assert (arm.prompt_tokens, arm.completion_tokens) == (10, 22)


def test_without_a_second_reference_there_is_no_noise_floor_and_no_verdict() -> None:
    found = score(suite(60), calls(60, reference_again=[FAULT] * 60), tolerance=0.05)
    assert {one.verdict for one in found.metrics} == {Verdict.UNKNOWN}
    assert found.verdict is Verdict.UNKNOWN


def test_free_texts_that_differ_each_time_are_not_called_the_same_as_anything() -> None:
    """No two of the reference's own answers are alike, so neither would be those of a candidate that is broken."""
    free = Suite(name="free", items=tuple(Item(id=f"i{n}", prompt="?") for n in range(150)))
    chance = random.Random(5)

    def talk() -> list[Outcome]:
        return [reply(f"text {chance.random()}") for _ in range(150)]

    found = score(free, calls(150, candidate=talk(), reference=talk(), reference_again=talk()), tolerance=0.05)
    assert metric(found, "same answer as the reference").verdict is Verdict.UNKNOWN
    assert found.verdict is Verdict.UNKNOWN


def test_a_reference_that_is_never_right_proves_nothing() -> None:
    wrong: list[Outcome] = [reply("777") for _ in range(200)]
    arms = {"candidate": wrong, "reference": wrong, "reference_again": wrong}
    found = score(suite(200), calls(200, **arms), tolerance=0.05)
    assert metric(found, "right answers").verdict is Verdict.UNKNOWN


def test_variants_of_one_template_count_once() -> None:
    wrong: list[Outcome] = [reply("777")] * 60
    found = score(suite(60, template="the same"), calls(60, candidate=wrong), tolerance=0.05)
    assert metric(found, "right answers").verdict is Verdict.NOT_ENOUGH


def test_items_without_a_check_are_compared_but_not_judged() -> None:
    free = Suite(name="free", items=tuple(Item(id=f"i{n}", prompt="?") for n in range(150)))
    found = score(free, calls(150), tolerance=0.05)
    assert [one.name for one in found.metrics] == ["same answer as the reference", "answered at all"]
    assert found.verdict is Verdict.SAME


def test_the_order_of_calls_changes_nothing() -> None:
    made = calls(40, candidate=[reply("777") if n % 3 else FAULT for n in range(40)])
    mixed = made[:]
    random.Random(1).shuffle(mixed)
    assert score(suite(40), mixed, tolerance=0.05).metrics == score(suite(40), made, tolerance=0.05).metrics


def two_categories(count: int, rare: int) -> Suite:
    """``rare`` of the questions are about tools, the others about sums."""
    items = [
        Item(id=f"i{n}", prompt="?", check=Number(value=n), category="tools" if n < rare else "sums")
        for n in range(count)
    ]
    return Suite(name="test", items=tuple(items), sha256="0" * 64)


def test_what_is_broken_in_one_category_does_not_drown_among_the_others() -> None:
    candidate: list[Outcome] = [reply("wrong" if n < 16 else str(n)) for n in range(400)]
    made = calls(400, candidate=candidate)
    found = score(two_categories(400, 16), made, tolerance=0.05)
    assert metric(found, "right answers").verdict is not Verdict.WORSE
    assert metric(found, "right answers: tools").verdict is Verdict.WORSE
    assert metric(found, "right answers: sums").verdict is not Verdict.WORSE
    assert found.verdict is Verdict.WORSE
    assert score(suite(400), made, tolerance=0.05).verdict is not Verdict.WORSE


def test_a_small_category_does_not_hold_back_the_verdict_of_the_whole() -> None:
    found = score(two_categories(200, 8), calls(200), tolerance=0.05)
    assert metric(found, "right answers: tools").verdict is Verdict.NOT_ENOUGH
    assert found.verdict is Verdict.SAME


def test_a_candidate_that_will_not_take_questions_gives_no_answers_to_them() -> None:
    refusal = Fault(kind=FaultKind.REQUEST, status=400, text="exceeds the available context size", tries=1)
    candidate: list[Outcome] = [refusal if n < 20 else reply(str(n)) for n in range(150)]
    found = score(suite(150), calls(150, candidate=candidate), tolerance=0.05)
    assert metric(found, "answered at all").verdict is Verdict.WORSE
    assert metric(found, "right answers").candidate == 1.0
    reference = score(suite(150), calls(150, reference=candidate), tolerance=0.05)
    assert reference.verdict is Verdict.SAME
