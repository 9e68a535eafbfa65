"""Asks both sides for the beginnings of their answers with log-probabilities, and keeps what they said."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from kimigguf.errors import MachineError, UsageError
from kimigguf.events import Listener, Notice, Step
from kimigguf.probe.calls import Arm, Fault
from kimigguf.probe.logprobs import Continuation, TokenLevel, token_level
from kimigguf.probe.pace import Pace
from kimigguf.probe.references import Prices
from kimigguf.probe.run import Side
from kimigguf.probe.suites import Item, Suite

TOKENS: Final = 48
"""Of each answer: most texts part before."""
TOP: Final = 10
"""Likeliest tokens asked for; OpenAI's API gives at most 20."""
_FILE: Final = "tokens.jsonl"
_LONGEST_QUESTION: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    arm: Arm
    item: str
    text: Continuation


def chosen(suite: Suite, questions: int) -> tuple[Item, ...]:
    """So many short questions without tools, spread over the suite."""
    fit = [
        item
        for item in suite.items
        if not item.tools and sum(len(message.content) for message in item.conversation) <= _LONGEST_QUESTION
    ]
    step = max(1, len(fit) // questions) if questions else 1
    return tuple(fit[::step][:questions])


def most_usd(prices: Prices, suite: Suite, questions: int, *, kept_in: Iterable[Path | None] = ()) -> float:
    """The most that asking the reference twice can cost, for what is not kept in one of the folders."""
    kept = {key for folder in kept_in for key in _read(folder)}
    arms = (Arm.REFERENCE, Arm.REFERENCE_AGAIN)
    items = chosen(suite, questions)
    return sum(prices.most(item, TOKENS) for arm in arms for item in items if (arm, item.id) not in kept)


def compare_tokens(
    suite: Suite,
    questions: int,
    candidate: Side,
    reference: Side,
    *,
    pinned: bool,
    folder: Path | None,
    reference_run: Path | None,
    listen: Listener,
) -> TokenLevel:
    """Ask what is not kept yet, and compare.

    Args:
        suite: Where the questions come from.
        questions: How many of them.
        candidate: The side to judge.
        reference: The side to judge by; it is asked twice.
        pinned: The reference takes no temperature of ours, so its texts are not greedy.
        folder: Where the texts are kept, if anywhere.
        reference_run: Another run's folder, whose texts of the reference are taken over.
        listen: Told what goes on.

    Raises:
        UsageError: ``bad-run``.
        MachineError: ``cannot-write``.
    """
    kept = {key: text for key, text in _read(reference_run).items() if key[0] is not Arm.CANDIDATE}
    kept |= _read(folder)
    items = chosen(suite, questions)
    texts: dict[Arm, dict[str, Continuation]] = {arm: {} for arm in Arm}
    for arm in Arm:
        side = candidate if arm is Arm.CANDIDATE else reference
        listen(Step(text=f"{arm}: the beginnings of {len(items)} answers, token by token"))
        pace = Pace(sum((arm, item.id) not in kept for item in items), listen, what="beginnings")
        for item in items:
            text = kept.get((arm, item.id))
            if text is None:
                greedy = arm is Arm.CANDIDATE or not pinned
                text = _asked(side, item, greedy=greedy, listen=listen, arm=arm)
                _keep(folder, _Kept(arm=arm, item=item.id, text=text))
                pace.done()
            texts[arm][item.id] = text
            if text.positions is None:
                break  # an endpoint that gives none for one question gives none for the next
    return token_level(texts[Arm.CANDIDATE], texts[Arm.REFERENCE], texts[Arm.REFERENCE_AGAIN])


def _asked(side: Side, item: Item, *, greedy: bool, arm: Arm, listen: Listener) -> Continuation:
    found = side.asker.beginning(side.endpoint, item, TOKENS, top=TOP, greedy=greedy)
    if not isinstance(found, Fault):
        return found
    listen(Notice(text=f"{arm}: {item.id}: {found.kind}: {found.text[:120]}"))
    return Continuation(positions=None, why=f"{found.kind}: {found.text[:200]}")


def _read(folder: Path | None) -> Mapping[tuple[Arm, str], Continuation]:
    """What was kept; a last line that a kill cut off is dropped, and so is what was no answer: it is asked again."""
    path = None if folder is None else folder / _FILE
    if path is None or not path.exists():
        return {}
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    if rest:
        os.truncate(path, len(data) - len(rest))
    adapter = TypeAdapter(_Kept)
    try:
        lines = [adapter.validate_json(line) for line in whole.splitlines() if line.strip()]
    except ValidationError as error:
        raise UsageError(
            f"{path} is no record of this program", code="bad-run", hint="choose another --out DIR"
        ) from error
    return {(one.arm, one.item): one.text for one in lines if one.text.positions is not None}


def _keep(folder: Path | None, one: _Kept) -> None:
    if folder is None:
        return
    try:
        with (folder / _FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise MachineError(
            "the call cannot be written down", code="cannot-write", cause=error.strerror, hint="df -h ."
        ) from error
