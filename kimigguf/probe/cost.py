"""What a solved task costs on either side, and from which volume on the own machine is the cheaper one. Pure.

Cost per successful task = (GPU or electricity, or API charges, + storage + operations + correction) / unique tasks
solved. Every try is paid for, answers that were thrown away too; a task counts as solved once however often it was
asked, and is corrected once if no try solved it. What nobody has given a price for is not counted, and is said not to
be: no price is made up here.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from kimigguf import profile_files
from kimigguf.errors import UsageError
from kimigguf.probe.calls import Arm, Call, Reply, Spent
from kimigguf.probe.references import Prices

_SECONDS_PER_MONTH: Final = 30 * 86_400
_HINT: Final = "kimigguf quality-probe --help shows an example"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCosts:
    """What one side costs, in US dollars; None: not given.

    ``usd_per_hour`` is paid while it answers, such as a machine rented by the second; what is paid anyway (a machine
    rented by the month, the write-off of an own one, an administrator's time) goes into ``operations_usd_per_month``.
    """

    usd_per_hour: float | None = None
    watts: float | None = None
    usd_per_kwh: float | None = None
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None
    storage_usd_per_month: float | None = None
    operations_usd_per_month: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The user's own prices. ``correction_usd`` is what it costs to put one unsolved task right by hand."""

    candidate: SideCosts = SideCosts()
    reference: SideCosts = SideCosts()
    tasks_per_month: float | None = None
    correction_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCost:
    """What one side's answers cost. ``not_counted`` names what nobody gave a price for.

    ``usd_per_task`` is what a task costs as it is done (tries and correction), ``monthly_usd`` what is paid anyway;
    ``usd_per_solved_task`` holds both, at the volume that was given. None: unknown.
    """

    tasks: int
    solved: int
    tries: int
    machine_seconds: float
    usd_per_task: float | None
    monthly_usd: float
    usd_per_solved_task: float | None
    not_counted: tuple[str, ...]

    @property
    def share_solved(self) -> float:
        return self.solved / self.tasks if self.tasks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Economics:
    """Both sides. ``break_even_tasks_per_month`` is None where there is none or it cannot be told: see ``meaning``.

    ``capacity_tasks_per_month`` is what the candidate's machine could do in 30 days at the speed of this run.
    """

    candidate: SideCost
    reference: SideCost
    tasks_per_month: float | None
    break_even_tasks_per_month: float | None
    capacity_tasks_per_month: float | None
    meaning: str


def load_costs(path: Path) -> Costs:
    """Read the user's prices from a TOML file.

    Raises:
        UsageError: ``bad-profile`` with the key, or ``bad-costs`` with what does not go together.
    """
    costs = profile_files.load(path, Costs)
    sides = {"candidate": costs.candidate, "reference": costs.reference}
    negative = [value for side in sides.values() for value in _numbers(side) if value < 0]
    if (
        negative
        or (costs.correction_usd or 0) < 0
        or (costs.tasks_per_month is not None and costs.tasks_per_month <= 0)
    ):
        raise UsageError(f"{path}: a price below zero, or a volume of nothing", code="bad-costs", hint=_HINT)
    for name, side in sides.items():
        if (side.watts is None) != (side.usd_per_kwh is None):
            raise UsageError(f"{path}: {name}: watts and usd_per_kwh need each other", code="bad-costs", hint=_HINT)
        if (side.usd_per_million_input is None) != (side.usd_per_million_output is None):
            missing = "usd_per_million_input and usd_per_million_output need each other"
            raise UsageError(f"{path}: {name}: {missing}", code="bad-costs", hint=_HINT)
        if _monthly(side) and costs.tasks_per_month is None:
            raise UsageError(
                f"{path}: what is paid by the month needs tasks_per_month to be shared between",
                code="bad-costs",
                hint="write tasks_per_month = 10000 at the top",
            )
    return costs


def _numbers(side: SideCosts) -> list[float]:
    return [value for value in asdict(side).values() if value is not None]


def _monthly(side: SideCosts) -> float:
    return (side.storage_usd_per_month or 0.0) + (side.operations_usd_per_month or 0.0)


def economics(
    calls: Iterable[Call], right: Mapping[tuple[Arm, str], bool], costs: Costs, prices: Prices | None, *, parallel: int
) -> Economics:
    """What a solved task costs on either side.

    Args:
        calls: All that was answered. The reference's second answers are the price of the noise floor, not of a task.
        right: Whether an arm solved an item in one of its tries, for every task (an item that can be checked).
        costs: The user's prices.
        prices: What the reference is known to charge, where the user has not said.
        parallel: How many questions each side answered at once: a machine's time is shared between them.
    """
    reference_costs = costs.reference
    if prices is not None and reference_costs.usd_per_million_input is None:
        reference_costs = replace(
            reference_costs, usd_per_million_input=prices.input_usd, usd_per_million_output=prices.output_usd
        )
    replies: dict[Arm, list[Reply]] = defaultdict(list)
    for call in calls:
        if isinstance(call.outcome, Reply) and (call.arm, call.item) in right:
            replies[call.arm].append(call.outcome)

    def side(arm: Arm, own: SideCosts) -> SideCost:
        found = [solved for (asked, _), solved in right.items() if asked is arm]
        return _side(replies[arm], found, own, costs, parallel)

    candidate, reference = side(Arm.CANDIDATE, costs.candidate), side(Arm.REFERENCE, reference_costs)
    capacity = None
    if candidate.tasks and candidate.machine_seconds > 0:
        capacity = _SECONDS_PER_MONTH / (candidate.machine_seconds / candidate.tasks)
    volume, meaning = _break_even(candidate, reference, capacity)
    return Economics(
        candidate=candidate,
        reference=reference,
        tasks_per_month=costs.tasks_per_month,
        break_even_tasks_per_month=volume,
        capacity_tasks_per_month=capacity,
        meaning=meaning,
    )


def _side(replies: Sequence[Reply], solved: Sequence[bool], side: SideCosts, costs: Costs, parallel: int) -> SideCost:
    spent = [one for reply in replies for one in reply.spent]
    seconds = sum(one.seconds for one in spent) / parallel
    tasks, right = len(solved), sum(solved)
    parts: dict[str, float | None] = {
        "machine time": None if side.usd_per_hour is None else seconds / 3600 * side.usd_per_hour,
        "electricity": (
            None
            if side.watts is None or side.usd_per_kwh is None
            else seconds / 3600 * side.watts / 1000 * side.usd_per_kwh
        ),
        "tokens": _tokens(spent, side),
    }
    tries_usd = (
        None if all(value is None for value in parts.values()) else sum(value or 0.0 for value in parts.values())
    )
    per_task = None
    if tries_usd is not None and tasks:
        per_task = (tries_usd + (costs.correction_usd or 0.0) * (tasks - right)) / tasks
    monthly = _monthly(side)
    share = monthly / costs.tasks_per_month if costs.tasks_per_month else 0.0
    not_counted = [] if tries_usd is not None else ["machine time, electricity or tokens"]
    not_counted += [] if side.storage_usd_per_month is not None else ["storage"]
    not_counted += [] if side.operations_usd_per_month is not None else ["operations"]
    not_counted += [] if costs.correction_usd is not None else ["correction"]
    return SideCost(
        tasks=tasks,
        solved=right,
        tries=len(spent),
        machine_seconds=seconds,
        usd_per_task=per_task,
        monthly_usd=monthly,
        usd_per_solved_task=None if per_task is None or right == 0 else (per_task + share) * tasks / right,
        not_counted=tuple(not_counted),
    )


def _tokens(spent: Sequence[Spent], side: SideCosts) -> float | None:
    if side.usd_per_million_input is None or side.usd_per_million_output is None:
        return None
    prices = Prices(input_usd=side.usd_per_million_input, output_usd=side.usd_per_million_output)
    total = 0.0
    for one in spent:
        if one.prompt_tokens is None or one.completion_tokens is None:
            return None
        total += prices.cost(one.prompt_tokens, one.completion_tokens)
    return total


def _break_even(  # noqa: PLR0911 -- a table of cases
    candidate: SideCost, reference: SideCost, capacity: float | None
) -> tuple[float | None, str]:
    """The tasks a month at which a solved task costs the same on both sides, and what that means."""
    if candidate.usd_per_task is None:
        return None, "unknown: nobody has said what the candidate's machine costs"
    if reference.usd_per_task is None:
        return None, "unknown: nobody has said what the reference costs"
    if not candidate.solved or not reference.solved:
        return None, "none: a side that solves nothing has no price for a solved task"
    fixed = candidate.monthly_usd / candidate.share_solved - reference.monthly_usd / reference.share_solved
    saved = reference.usd_per_task / reference.share_solved - candidate.usd_per_task / candidate.share_solved
    if fixed <= 0 and saved >= 0:
        return 0.0, "the candidate is the cheaper one at any volume"
    if fixed >= 0 and saved <= 0:
        return None, "none: the candidate is the dearer one at any volume"
    volume = fixed / saved
    if fixed < 0:
        return volume, f"the candidate is the cheaper one below {volume:,.0f} tasks a month"
    if capacity is not None and volume > capacity:
        most = f"this machine can do {capacity:,.0f}"
        return volume, f"the candidate would be the cheaper one above {volume:,.0f} tasks a month, but {most}"
    return volume, f"the candidate is the cheaper one above {volume:,.0f} tasks a month"


def usd(value: float | None) -> str:
    """A price such as ``$0.0123``; ``unknown`` for None."""
    if value is None:
        return "unknown"
    if value == 0 or value >= 1:
        return f"${value:,.2f}"
    for least, digits in ((0.1, 3), (0.01, 4), (0.001, 5)):
        if value >= least:
            return f"${value:.{digits}f}"
    return f"${value:.6f}"


def nothing_priced(found: Economics) -> bool:
    """Whether nobody has given a price for anything, so that there is nothing to tell."""
    return not any(side.usd_per_task is not None or side.monthly_usd for side in (found.candidate, found.reference))


def cost_rows(found: Economics) -> tuple[tuple[str, str, str], ...]:
    """Both sides for a reader: what, candidate, reference."""
    sides = (found.candidate, found.reference)

    def row(name: str, cells: Sequence[str]) -> tuple[str, str, str]:
        return name, cells[0], cells[1]

    return (
        row("tasks solved", [f"{side.solved} of {side.tasks}" for side in sides]),
        row("tries paid for", [f"{side.tries:,}" for side in sides]),
        row("cost of a task", [usd(side.usd_per_task) for side in sides]),
        row("paid by the month", [usd(side.monthly_usd) for side in sides]),
        row("cost of a solved task", [usd(side.usd_per_solved_task) for side in sides]),
        row("not counted", [", ".join(side.not_counted) or "nothing left out" for side in sides]),
    )
