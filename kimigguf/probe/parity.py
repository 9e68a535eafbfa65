"""Do both sides count the same question as the same number of tokens? Pure.

A constant skew is another wrapping of the conversation (a system line, a generation prompt); a varying one is another
tokenizer or template, and then the two are not asked the same thing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kimigguf.probe.calls import Arm, Call, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Candidate's prompt tokens less the reference's, over ``items`` questions; None for all where nobody counted."""

    items: int
    least: int | None
    most: int | None

    @property
    def sentence(self) -> str:
        """What the difference means, in words."""
        if self.least is None or self.most is None:
            return "unknown: a side gives no token counts"
        if self.least != self.most:
            return f"differs by {self.least:+} to {self.most:+} tokens: another tokenizer or chat template"
        return (
            "equal" if self.least == 0 else f"a constant {self.least:+} tokens: another wrapping of the same question"
        )


def prompt_parity(calls: Iterable[Call]) -> Parity:
    """Compare the prompt tokens of both sides, item by item."""
    counts: dict[str, dict[Arm, int]] = {}
    for call in calls:
        if isinstance(call.outcome, Reply) and call.outcome.prompt_tokens is not None and call.outcome.turns == 1:
            counts.setdefault(call.item, {})[call.arm] = call.outcome.prompt_tokens
    skews = [
        found[Arm.CANDIDATE] - found[Arm.REFERENCE]
        for found in counts.values()
        if Arm.CANDIDATE in found and Arm.REFERENCE in found
    ]
    return Parity(items=len(skews), least=min(skews, default=None), most=max(skews, default=None))
