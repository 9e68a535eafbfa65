"""Restarts: only where the cause can pass, ever slower, and not for ever."""

from kimigguf.engines.watchdog import STEADY_SECONDS, Restarts


def test_a_deterministic_failure_is_never_retried() -> None:
    assert Restarts().seconds_before_next(ready_seconds=0.0, may_pass=False) is None
    assert Restarts().seconds_before_next(ready_seconds=2 * STEADY_SECONDS, may_pass=False) is None


def test_each_wait_is_twice_the_one_before_until_it_gives_up() -> None:
    """Only readiness counts: a load of 18 minutes that ends in the same crash each time is no recovery."""
    restarts = Restarts(at_most=4)
    waits = [restarts.seconds_before_next(ready_seconds=0.0, may_pass=True) for _ in range(6)]
    assert waits == [1.0, 2.0, 4.0, 8.0, None, None]


def test_a_server_that_dies_soon_after_each_load_is_given_up() -> None:
    restarts = Restarts(at_most=1)
    assert restarts.seconds_before_next(ready_seconds=STEADY_SECONDS - 1, may_pass=True) == 1.0
    assert restarts.seconds_before_next(ready_seconds=STEADY_SECONDS - 1, may_pass=True) is None


def test_a_server_that_was_ready_for_long_starts_counting_anew() -> None:
    restarts = Restarts(at_most=1)
    for _ in range(3):
        assert restarts.seconds_before_next(ready_seconds=STEADY_SECONDS, may_pass=True) == 1.0
    assert restarts.seconds_before_next(ready_seconds=0.0, may_pass=True) is None


def test_no_wait_grows_beyond_a_minute() -> None:
    restarts = Restarts(at_most=20)
    waits = [restarts.seconds_before_next(ready_seconds=0.0, may_pass=True) for _ in range(20)]
    assert max(wait for wait in waits if wait is not None) == 60.0
