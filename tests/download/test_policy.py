import threading
import time

import pytest

from kimigguf.download.policy import MIB, Pace, Policy


@pytest.mark.parametrize("connections", [1, 2, 8, 9, 31, 64])
def test_a_kill_can_never_cost_more_than_32_mib_of_a_shard(connections: int) -> None:
    policy = Policy(connections=connections)
    assert 0 < policy.mark * connections <= 32 * MIB


def running() -> bool:
    return False


def test_a_complaint_halves_what_is_in_flight_and_success_brings_it_back() -> None:
    pace = Pace(Policy(connections=4), running)
    assert all(pace.enter() for _ in range(4))
    pace.complain(0.0)
    for _ in range(4):
        pace.leave(well=False)
    assert pace.enter()
    assert pace.enter()
    third = threading.Thread(target=pace.enter)
    third.start()
    third.join(0.1)
    assert third.is_alive()
    pace.leave(well=True)
    third.join(5)
    assert not third.is_alive()


def test_nobody_asks_before_the_hub_has_had_its_pause() -> None:
    pace = Pace(Policy(), running)
    pace.complain(0.3)
    started = time.monotonic()
    assert pace.enter()
    assert time.monotonic() - started >= 0.29


def test_a_stop_ends_every_wait() -> None:
    stop = threading.Event()
    pace = Pace(Policy(bytes_per_second=1), stop.is_set)
    pace.complain(600)
    waits = [threading.Thread(target=pace.enter), threading.Thread(target=pace.spend, args=(10**6,))]
    for wait in waits:
        wait.start()
    stop.set()
    for wait in waits:
        wait.join(5)
        assert not wait.is_alive()


def test_the_rate_is_shared_by_all() -> None:
    pace = Pace(Policy(bytes_per_second=100_000), running)
    started = time.monotonic()
    threads = [threading.Thread(target=pace.spend, args=(10_000,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.35 <= time.monotonic() - started < 3
