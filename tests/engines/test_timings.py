"""What a log's times show: a first request that waited for the disk, and answers that a limit cut short."""

import pytest

from kimigguf.engines.doctor import examine_log
from kimigguf.engines.timings import Generation, cut_off, generations, slow_start

# As build 11434 prints them; the older form of b10434 has no slot before it.
LINES = (
    "0.07.8 I slot print_timing: id  7 | task 1 | prompt eval time =    4934.71 ms /   128 tokens (   38.55 ms per "
    "token,    25.94 tokens per second)\n"
    "0.07.8 I slot print_timing: id  7 | task 1 |        eval time =     636.76 ms /    10 tokens (   63.67 ms per "
    "token,    15.70 tokens per second)\n"
    "       eval time =    1000.00 ms /    20 runs   (   50.00 ms per token,    20.00 tokens per second)\n"
)


def log(*pairs: tuple[float, int]) -> str:
    return "".join(f"0.1 I slot print_timing: |  eval time = {s * 1000:.2f} ms / {n:5} tokens (x)\n" for s, n in pairs)


def test_generated_tokens_are_told_from_the_prompts() -> None:
    assert generations(LINES) == (Generation(tokens=10, seconds=0.63676), Generation(tokens=20, seconds=1.0))
    assert generations("no times") == ()


@pytest.mark.parametrize(
    ("pairs", "slow"),
    [
        ([(60.0, 20), (4.0, 20), (4.0, 20), (5.0, 20)], True),
        ([(5.1, 20), (4.0, 20), (4.0, 20), (5.0, 20)], False),
        ([(60.0, 20), (4.0, 20)], False),  # too few to say what is usual
        ([(60.0, 1), (0.2, 20), (0.2, 20), (0.2, 20)], False),  # one token: that is the prompt's time
        ([(60.0, 1), (0.2, 20), (0.2, 20), (0.2, 20), (0.2, 20)], False),
        ([(9.0, 1), (60.0, 20), (4.0, 20), (4.0, 20), (5.0, 20)], True),  # kimigguf's self-test begins with one token
        ([(0.5, 20), (0.05, 20), (0.05, 20), (0.05, 20)], False),  # nobody has waited for that
        ([(4.0, 20), (4.0, 20), (4.0, 20), (60.0, 20)], False),  # the last one, not the first
        ([], False),
    ],
)
def test_a_first_request_that_waited_for_the_disk_is_told(pairs: list[tuple[float, int]], slow: bool) -> None:
    text = log(*pairs)
    assert (slow_start(generations(text)) is not None) == slow
    assert ("slow-start" in [finding.code for finding in examine_log(text)]) == slow


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [
        ([256, 256, 40, 256], True),
        ([256, 256], False),  # chance, twice
        ([256, 256, 256, 300], False),  # one is longer, so no limit ends them
        ([256, 256, 256, 9, 8, 7, 6], False),  # most end by themselves
        ([8, 8, 8], False),  # short answers may well be alike
        ([], False),
    ],
)
def test_answers_that_a_limit_ends_are_told_from_those_that_end_by_themselves(tokens: list[int], cut: bool) -> None:
    text = log(*((1.0, count) for count in tokens))
    words = cut_off(generations(text))
    assert (words is not None) == cut
    (*findings,) = [finding for finding in examine_log(text) if finding.code == "cut-off"]
    assert len(findings) == cut
    if cut:
        assert "256" in (words or "")
        assert "not broken" in findings[0].message
        assert "max_tokens" in findings[0].hint


FIRST = "eval time = 5440.00 ms / 16 tokens\n"
LATER = "eval time = 320.00 ms / 16 tokens\n" * 3


@pytest.mark.parametrize(
    ("size", "disk"),
    [
        ("print_info: file size   = 93.83 MiB (5.86 BPW) ", False),
        ("print_info: file size   = 543.21 GiB (1.68 BPW) ", True),
        ("", True),
    ],
)
def test_the_disk_is_not_blamed_for_what_it_cannot_have_done(size: str, *, disk: bool) -> None:
    """A model of 98 MB on a busy machine: nothing reads so little for five seconds."""
    (finding,) = [one for one in examine_log(f"{size}\n{FIRST}{LATER}") if one.code == "slow-start"]
    assert ("disk," in finding.message) == disk
    assert ("--prefault" in finding.hint) == disk
    assert "something else was at work" in finding.message  # which nothing in a log rules out
    assert ("93.8 MiB" in finding.evidence) == (not disk)
