"""When a server's user is told that memory runs short: before the kernel acts, and not for nothing."""

import pytest

from kimigguf.engines.evidence import State
from kimigguf.engines.pressure import PressureWatch, check_pressure
from kimigguf.hardware.pressure import MemoryPressure, Room, Stall
from kimigguf.units import GIB


def stall(ten: float, sixty: float) -> Stall:
    return Stall(of_10_seconds=ten, of_60_seconds=sixty, of_300_seconds=0.0)


def room(left: float, total: float = 700.0, name: str = "the cgroup") -> Room:
    return Room(name=name, total_bytes=int(total * GIB), left_bytes=int(left * GIB))


def reading(ten: float = 0.0, sixty: float = 0.0, *rooms: Room, throttled: int | None = None) -> MemoryPressure:
    return MemoryPressure(stall=stall(ten, sixty), rooms=rooms or (room(50.0),), throttled=throttled)


CALM = reading()
STALLED = reading(12.0, 12.0, room(3.1))


def test_the_sentence_names_the_time_lost_and_the_room_left() -> None:
    check = check_pressure(STALLED)
    assert check.state is State.FAILED
    assert check.evidence == "12 % of the last 60 s stalled, the cgroup has 3.1 GiB left"
    assert "--context" in (check.hint or "")


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (CALM, State.PASSED, "0 % of the last 60 s stalled, the cgroup has 50.0 GiB left"),
        (reading(0.0, 9.0), State.PASSED, "9 %"),
        (reading(35.0, 6.0), State.FAILED, "35 % of the last 10 s stalled"),  # a sudden fall
        (reading(0.0, 0.0, room(1.5)), State.FAILED, "1.5 GiB left"),
        (reading(0.0, 0.0, room(50.0), room(1.0, name="the machine")), State.FAILED, "the machine has 1.0 GiB left"),
        (reading(0.0, 0.0, room(1.5, total=8.0)), State.PASSED, "1.5 GiB"),  # of a small pool that is much
        (reading(0.0, 0.0, room(0.5, total=8.0)), State.FAILED, "512.0 MiB"),
        (MemoryPressure(rooms=(room(50.0),)), State.PASSED, "stalls unknown"),
        (MemoryPressure(rooms=(room(1.0),)), State.FAILED, "stalls unknown"),
        (MemoryPressure(stall=stall(0.0, 0.0)), State.PASSED, "0 %"),
        (MemoryPressure(), State.UNKNOWN, "tells neither"),
    ],
)
def test_short_of_memory_is_told_from_enough_and_from_unknown(seen: MemoryPressure, state: State, words: str) -> None:
    check = check_pressure(seen)
    assert check.state is state
    assert words in check.evidence


def test_stalls_are_the_price_of_weights_that_were_planned_to_stream() -> None:
    check = check_pressure(STALLED, streamed_bytes=90 * GIB)
    assert check.state is State.FAILED
    assert "90.0 GiB of the weights stream from disk, as planned" in (check.hint or "")
    assert "as planned" not in (check_pressure(reading(0, 0, room(0.5)), streamed_bytes=90 * GIB).hint or "")


def test_only_what_was_held_back_since_counts() -> None:
    """The group may have been over its memory.high while the files were fetched."""
    assert check_pressure(reading(throttled=31)).state is State.PASSED
    assert check_pressure(reading(throttled=31), throttled_before=31).state is State.PASSED
    check = check_pressure(reading(throttled=40), throttled_before=31)
    assert check.state is State.FAILED
    assert "held it back 9 times at its memory.high" in check.evidence


def test_a_shortage_is_told_once_again_while_it_lasts_and_when_it_is_over() -> None:
    watch = PressureWatch()
    assert watch.look(CALM, 0.0) is None
    said = watch.look(STALLED, 10.0)
    assert said is not None
    assert said.startswith("memory pressure: 12 %")
    assert watch.look(STALLED, 20.0) is None
    assert watch.look(CALM, 30.0) is None  # it comes and goes
    assert watch.look(STALLED, 40.0) is None
    assert watch.look(STALLED, 611.0) == said
    over = watch.look(CALM, 680.0)
    assert over is not None
    assert over.startswith("memory pressure is over: 0 %")
    assert watch.look(CALM, 690.0) is None
    assert watch.look(STALLED, 700.0) == said


def test_a_watch_that_learns_nothing_says_nothing() -> None:
    watch = PressureWatch()
    assert [watch.look(MemoryPressure(), second) for second in (0.0, 700.0, 1400.0)] == [None] * 3
