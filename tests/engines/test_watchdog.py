"""Restarts: only where the cause can pass, ever slower, and not for ever."""

from kimigguf.engines.watchdog import Restarts


def test_a_deterministic_failure_is_never_retried() -> None:
    assert Restarts().seconds_before_next(0.0, may_pass=False) is None


def test_each_wait_is_twice_the_one_before_until_it_gives_up() -> None:
    restarts = Restarts(at_most=4, within_seconds=600)
    waits = [restarts.seconds_before_next(float(moment), may_pass=True) for moment in range(5)]
    assert waits == [1.0, 2.0, 4.0, 8.0, None]


def test_a_server_that_ran_long_starts_counting_anew() -> None:
    restarts = Restarts(at_most=1, within_seconds=600)
    assert restarts.seconds_before_next(0.0, may_pass=True) == 1.0
    assert restarts.seconds_before_next(599.0, may_pass=True) is None
    assert restarts.seconds_before_next(1300.0, may_pass=True) == 1.0


def test_no_wait_grows_beyond_a_minute() -> None:
    restarts = Restarts(at_most=20, within_seconds=1e9)
    waits = [restarts.seconds_before_next(0.0, may_pass=True) for _ in range(20)]
    assert max(wait for wait in waits if wait is not None) == 60.0
