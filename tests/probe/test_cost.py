from pathlib import Path

import pytest

from kimigguf.errors import UsageError
from kimigguf.probe.calls import Arm, Call, Reply, Spent
from kimigguf.probe.cost import Costs, Economics, SideCosts, cost_rows, economics, load_costs, usd
from kimigguf.probe.references import Prices
from kimigguf.probe.score import solved
from kimigguf.probe.suites import Item, Number, Rubric, Suite

PRICES = Prices(input_usd=1.0, output_usd=10.0)
SUITE = Suite(
    name="s",
    items=(
        *(Item(id=f"i{n}", prompt="?", check=Number(value=n)) for n in range(4)),
        Item(id="free", prompt="?"),
        Item(id="judged", prompt="?", check=Rubric(rubric="be kind")),
    ),
)


def reply(content: str, *, seconds: float = 9.0, tokens: int | None = 1000, earlier: tuple[Spent, ...] = ()) -> Reply:
    return Reply(
        content=content, thinking="", finish_reason="stop", tool_calls=0, prompt_tokens=100, completion_tokens=tokens,
        first_token_seconds=1.0, seconds=seconds, max_tokens=None, earlier=earlier,
    )  # fmt: skip


def calls(arm: Arm, wrong: int, *, repeats: int = 1, seconds: float = 9.0) -> list[Call]:
    """Four tasks, the first ``wrong`` of them unsolved in every try, and two questions that are none."""
    made = [
        Call(arm=arm, item=f"i{n}", repeat=r, outcome=reply("x" if n < wrong else str(n), seconds=seconds))
        for n in range(4)
        for r in range(repeats)
    ]
    return [*made, *(Call(arm=arm, item=other, repeat=0, outcome=reply("x")) for other in ("free", "judged"))]


def found(costs: Costs, *made: Call, prices: Prices | None = PRICES, parallel: int = 1) -> Economics:
    both = made or (*calls(Arm.CANDIDATE, 2), *calls(Arm.REFERENCE, 1), *calls(Arm.REFERENCE_AGAIN, 0))
    return economics(both, solved(SUITE, both), costs, prices, parallel=parallel)


def test_no_price_is_made_up() -> None:
    nothing = found(Costs(), prices=None)
    for side in (nothing.candidate, nothing.reference):
        assert (side.usd_per_task, side.usd_per_solved_task, side.tasks) == (None, None, 4)
        assert side.not_counted == ("machine time, electricity or tokens", "storage", "operations", "correction")
    assert nothing.break_even_tasks_per_month is None
    assert nothing.meaning.startswith("unknown")
    half = found(Costs())
    assert half.candidate.usd_per_solved_task is None
    assert half.meaning.startswith("unknown: nobody has said what the candidate")


def test_the_reference_pays_its_tokens_and_not_those_of_the_noise_floor() -> None:
    reference = found(Costs()).reference
    assert (reference.solved, reference.tasks, reference.tries) == (3, 4, 4)
    assert reference.usd_per_task == pytest.approx((100 * 1 + 1000 * 10) / 1e6)
    assert reference.usd_per_solved_task == pytest.approx(4 * 0.0101 / 3)
    own = found(Costs(reference=SideCosts(usd_per_million_input=2.0, usd_per_million_output=20.0))).reference
    assert own.usd_per_task == pytest.approx(0.0202)


def test_electricity_is_paid_for_the_time_it_answers_and_shared_by_what_it_answers_at_once() -> None:
    kettle = SideCosts(watts=1000, usd_per_kwh=0.4)
    alone = found(Costs(candidate=kettle)).candidate
    assert alone.machine_seconds == 36
    assert alone.usd_per_task == pytest.approx(9 / 3600 * 0.4)
    assert found(Costs(candidate=kettle), parallel=3).candidate.usd_per_task == pytest.approx(3 / 3600 * 0.4)
    rented = found(Costs(candidate=SideCosts(usd_per_hour=3.6))).candidate
    assert rented.usd_per_solved_task == pytest.approx(9 * 0.001 * 4 / 2)


def test_a_thrown_away_answer_is_paid_and_an_unsolved_task_is_corrected_once() -> None:
    cut = Spent(seconds=1.0, prompt_tokens=100, completion_tokens=500)
    made = [Call(arm=Arm.CANDIDATE, item="i0", repeat=r, outcome=reply("x", earlier=(cut,))) for r in range(3)]
    made += [Call(arm=Arm.CANDIDATE, item="i1", repeat=r, outcome=reply("1" if r == 2 else "x")) for r in range(3)]
    costs = Costs(candidate=SideCosts(usd_per_hour=3600.0), correction_usd=7.0)
    side = found(costs, *made).candidate
    assert (side.tasks, side.solved, side.tries) == (2, 1, 9)
    assert side.machine_seconds == 6 * 9 + 3 * 1
    assert side.usd_per_solved_task == pytest.approx(57 + 7)


def test_what_is_paid_by_the_month_is_shared_by_the_months_tasks() -> None:
    own = SideCosts(usd_per_hour=0.0, storage_usd_per_month=20, operations_usd_per_month=80)
    side = found(Costs(candidate=own, tasks_per_month=1000)).candidate
    assert side.monthly_usd == 100
    assert side.usd_per_solved_task == pytest.approx(0.1 * 4 / 2)
    assert side.not_counted == ("correction",)


def test_the_break_even_is_where_a_solved_task_costs_the_same_on_both_sides() -> None:
    def at(volume: float) -> Economics:
        return found(Costs(candidate=SideCosts(usd_per_hour=0.36, operations_usd_per_month=50), tasks_per_month=volume))

    volume = at(1000).break_even_tasks_per_month
    assert volume is not None
    there = at(volume)
    assert there.candidate.usd_per_solved_task == pytest.approx(there.reference.usd_per_solved_task)
    fewer, more = at(volume / 2), at(volume * 2)
    assert (fewer.candidate.usd_per_solved_task or 0) > (fewer.reference.usd_per_solved_task or 0)
    assert (more.candidate.usd_per_solved_task or 0) < (more.reference.usd_per_solved_task or 0)
    assert at(1).meaning == f"the candidate is the cheaper one above {volume:,.0f} tasks a month"


def test_a_break_even_beyond_what_the_machine_can_do_is_told_as_that() -> None:
    slow = [*calls(Arm.CANDIDATE, 0, seconds=3600), *calls(Arm.REFERENCE, 0)]
    costs = Costs(candidate=SideCosts(usd_per_hour=0.0, operations_usd_per_month=500), tasks_per_month=100)
    told = found(costs, *slow)
    assert told.capacity_tasks_per_month == pytest.approx(30 * 24)
    assert told.meaning.endswith("but this machine can do 720")


@pytest.mark.parametrize(
    ("side", "wrong", "meaning"),
    [
        (SideCosts(usd_per_hour=0.0), 0, "cheaper one at any volume"),
        (SideCosts(usd_per_hour=99.0, operations_usd_per_month=1), 0, "dearer one at any volume"),
        (SideCosts(usd_per_hour=0.0), 4, "solves nothing"),
    ],
)
def test_where_there_is_no_break_even_the_reason_is_told(side: SideCosts, wrong: int, meaning: str) -> None:
    made = [*calls(Arm.CANDIDATE, wrong), *calls(Arm.REFERENCE, 1)]
    assert meaning in found(Costs(candidate=side, tasks_per_month=10), *made).meaning


def test_an_endpoint_that_counts_no_tokens_has_an_unknown_price() -> None:
    made = [Call(arm=Arm.REFERENCE, item="i0", repeat=0, outcome=reply("0", tokens=None))]
    assert found(Costs(), *made).reference.usd_per_task is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[candidate]\nwatts = 900", "need each other"),
        ("[reference]\nusd_per_million_input = 1", "need each other"),
        ("[candidate]\nstorage_usd_per_month = 9", "tasks_per_month"),
        ("correction_usd = -1", "below zero"),
        ("tasks_per_month = 0", "volume of nothing"),
        ("[candidate]\nwats = 900", "wats"),
        ("tasks_per_month = 'many'", "tasks_per_month"),
    ],
)
def test_prices_that_do_not_go_together_are_refused_with_the_reason(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_costs(path)
    assert problem in f"{raised.value.message} {raised.value.cause}"


def test_prices_are_read_as_the_help_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("tasks_per_month = 20000\ncorrection_usd = 2.0\n[candidate]\nwatts = 1100\nusd_per_kwh = 0.30\n")
    costs = load_costs(path)
    assert costs == Costs(
        candidate=SideCosts(watts=1100, usd_per_kwh=0.3), tasks_per_month=20000, correction_usd=2.0
    )  # fmt: skip


def test_prices_read_as_a_person_writes_them() -> None:
    assert [usd(value) for value in (None, 0.0, 0.000012, 0.0123456, 0.5, 3.5, 1234.5)] == [
        "unknown", "$0.00", "$0.000012", "$0.0123", "$0.500", "$3.50", "$1,234.50",
    ]  # fmt: skip
    rows = {name: cells for name, *cells in cost_rows(found(Costs()))}
    assert rows["tasks solved"] == ["2 of 4", "3 of 4"]
    assert rows["cost of a solved task"] == ["unknown", "$0.0135"]
