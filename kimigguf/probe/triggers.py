"""Does the candidate call tools when the reference does? Pure.

Counted per question, whatever the calls are. The reference's second answers are counted against its first ones the same
way: the original model itself does not decide alike each time, so a candidate is held to that and not to 100 %.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kimigguf.probe.calls import Arm, Call, Reply, Shape
from kimigguf.probe.suites import Suite

_DECIDED = {Shape.ANSWERED, Shape.CALLED_TOOL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Triggers:
    """Questions on which both call a tool, only one does, or neither. Shares are None where nothing was counted."""

    both: int
    only_here: int
    only_reference: int
    neither: int

    @property
    def precision(self) -> float | None:
        """Of the questions where this side calls, the share where the reference does."""
        made = self.both + self.only_here
        return self.both / made if made else None

    @property
    def recall(self) -> float | None:
        """Of the questions where the reference calls, the share where this side does."""
        wanted = self.both + self.only_reference
        return self.both / wanted if wanted else None

    @property
    def f1(self) -> float | None:
        """The harmonic mean of both, as the vendor verifiers of K2 and K3 report it."""
        counted = 2 * self.both + self.only_here + self.only_reference
        return 2 * self.both / counted if counted else None


def triggers(suite: Suite, calls: Iterable[Call], arm: Arm) -> Triggers:
    """Hold an arm's decisions to call a tool against the reference's."""
    with_tools = {item.id for item in suite.items if item.tools}
    decided: Mapping[tuple[str, int, Arm], bool] = {
        (call.item, call.repeat, call.arm): bool(call.outcome.calls)
        for call in calls
        if call.item in with_tools and isinstance(call.outcome, Reply) and call.outcome.shape in _DECIDED
    }
    pairs = [
        (decided[item, repeat, arm], reference)
        for (item, repeat, asked), reference in decided.items()
        if asked is Arm.REFERENCE and (item, repeat, arm) in decided
    ]
    return Triggers(
        both=pairs.count((True, True)),
        only_here=pairs.count((True, False)),
        only_reference=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )
