"""Runs probes side by side, each under a time limit: one that hangs, fails or prints garbage costs only its facts."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """What a probe said: a value, or why there is none."""

    value: T | None = None
    reason: str | None = None


@dataclass(slots=True)
class _Running(Generic[T]):
    thread: threading.Thread
    box: list[Answer[T]] = field(default_factory=list)


def ask_all(probes: Mapping[str, Callable[[], T]], *, limit_seconds: float) -> dict[str, Answer[T]]:
    """Run all probes at once and collect what they say within the limit.

    A probe that is still running then is left behind in a daemon thread: a thread cannot be ended from outside, and
    one stuck in the kernel (a dead NFS mount) must not keep the command.
    """
    deadline = time.monotonic() + limit_seconds
    running = {name: _start(name, probe) for name, probe in probes.items()}
    for one in running.values():
        one.thread.join(max(0.0, deadline - time.monotonic()))
    silent: Answer[T] = Answer(reason=f"no answer within {limit_seconds:g} s")
    return {name: one.box[0] if one.box else silent for name, one in running.items()}


def _start(name: str, probe: Callable[[], T]) -> _Running[T]:
    box: list[Answer[T]] = []

    def work() -> None:
        try:
            box.append(Answer(value=probe()))
        except Exception as error:  # noqa: BLE001 -- drivers and odd files raise anything; the reason names it
            box.append(Answer(reason=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))

    thread = threading.Thread(target=work, name=f"probe {name}", daemon=True)
    thread.start()
    return _Running(thread=thread, box=box)
