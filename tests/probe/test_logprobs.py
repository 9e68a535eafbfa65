import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.probe.logprobs import Continuation, Position, bounded_divergence, read, token_level


def given_by(token: str, *top: tuple[str, float], logprob: float | None = None) -> Any:
    def one(text: str, value: float) -> SimpleNamespace:
        return SimpleNamespace(token=text, bytes=list(text.encode()), logprob=value)

    found = one(token, top[0][1] if logprob is None and top else logprob or 0.0)
    found.top_logprobs = [one(*pair) for pair in top]
    return found


def content(*positions: Any) -> Any:
    return SimpleNamespace(content=list(positions))


def text(*tokens: str, other: float = 0.1) -> Continuation:
    """Each token with probability 0.8, and ``z`` with ``other``."""
    top = tuple((math.log(0.8), math.log(other)) for _ in tokens)
    return Continuation(
        positions=tuple(
            Position(token=token, logprob=first, top=((token, first), ("z", second)))
            for token, (first, second) in zip(tokens, top, strict=True)
        )
    )


def test_positions_are_read_with_their_bytes() -> None:
    half = SimpleNamespace(token="\ufffd", bytes=[0xC3], logprob=-0.1, top_logprobs=[])
    half.top_logprobs = [SimpleNamespace(token="\ufffd", bytes=[0xC3], logprob=-0.1)]
    positions, why = read(content(given_by("a", ("a", -0.1), ("b", -3.0)), half))
    assert why is None
    assert positions is not None
    assert [position.token for position in positions] == ["a", "\xc3"]
    assert positions[0].likeliest == "a"


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [
        (None, "gave no log-probabilities"),
        (content(), "gave no log-probabilities"),
        (content(given_by("a", logprob=-0.1)), "no likeliest tokens"),
        (content(given_by("a", ("a", 0.7))), "0.7 for a token"),
        (content(given_by("a", ("a", math.nan))), "nan for a token"),
        (content(given_by("a", ("a", -0.1), ("b", -0.1))), "add up to 1.81"),
        (content(given_by("a", ("a", 0.0), ("b", -math.inf))), "after sampling"),
    ],
)
def test_numbers_that_are_missing_or_none_are_never_taken_for_some(logprobs: Any, why: str) -> None:
    positions, told = read(logprobs)
    assert positions is None
    assert told is not None
    assert why in told


def test_texts_are_compared_until_the_first_token_that_differs() -> None:
    left = {"q": text("a", "b", "c", "d"), "r": text("a")}
    right = {"q": text("a", "b", "x", "d"), "r": text("a"), "s": text("a")}
    found = token_level(left, right, right)
    assert found.pair is not None
    assert found.noise is not None
    assert (found.pair.texts, found.pair.tokens) == (2, 4)  # a, b, and c against x; then one
    assert found.pair.agreement == pytest.approx(3 / 4)
    assert found.pair.divergence > found.noise.divergence == 0
    assert (found.noise.agreement, found.noise.tokens) == (1.0, 6)
    assert found.candidate is not None
    assert found.candidate.tokens == 5
    assert found.candidate.mean_logprob == pytest.approx(math.log(0.8))
    assert found.candidate.likeliest == 1.0
    assert found.unknown == ()


def test_an_agreement_has_an_interval_over_texts_and_not_over_tokens() -> None:
    chance = random.Random(1)

    def pair(*, count: int) -> Any:
        right = {f"q{n}": text(*"abcdefghij") for n in range(count)}
        cut = {name: chance.randrange(2, 9) for name in right}
        left = {name: text(*"abcdefghij"[: cut[name]], "x", "y", "y") for name in right}
        return token_level(left, right, right).pair

    few, many = pair(count=6), pair(count=60)
    assert few.low < few.agreement < few.high < 1
    assert many.high - many.low < few.high - few.low
    assert token_level({"q": text("a")}, {"q": text("a")}, {}).pair.low is None  # type: ignore[union-attr]  # it is there: that is the test


def test_what_an_endpoint_does_not_give_is_unknown_and_the_rest_is_told() -> None:
    silent = {"q": Continuation(positions=None, why="the endpoint gave no log-probabilities")}
    found = token_level({"q": text("a", "b")}, silent, {})
    assert found.pair is None
    assert found.noise is None
    assert found.reference is None
    assert found.candidate is not None
    assert found.unknown == (
        "reference: the endpoint gave no log-probabilities",
        "reference-again: it gave no answer",
    )


DISTRIBUTION = st.lists(st.floats(0.01, 1), min_size=6, max_size=6).map(lambda w: [v / sum(w) for v in w])


@given(DISTRIBUTION, DISTRIBUTION, st.integers(1, 6))
def test_the_divergence_of_the_likeliest_is_never_more_than_the_whole_one(
    reference: list[float], candidate: list[float], top: int
) -> None:
    def likeliest(values: list[float]) -> dict[str, float]:
        ranked = sorted(range(6), key=lambda index: -values[index])[:top]
        return {f"t{index}": math.log(values[index]) for index in ranked}

    whole = sum(p * math.log(p / q) for p, q in zip(reference, candidate, strict=True))
    bound = bounded_divergence(likeliest(reference), likeliest(candidate))
    assert 0 <= bound <= whole + 1e-6
    if top == 6:
        assert bound == pytest.approx(whole, abs=1e-6)
