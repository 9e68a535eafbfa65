import pytest

from kimigguf.probe.calls import Arm, Call, Fault, FaultKind, Reply
from kimigguf.probe.parity import prompt_parity


def call(arm: Arm, item: int, tokens: int | None) -> Call:
    reply = Reply(
        content="x", thinking="", finish_reason="stop", tool_calls=0, prompt_tokens=tokens, completion_tokens=1,
        first_token_seconds=None, seconds=1.0, max_tokens=None,
    )  # fmt: skip
    return Call(arm=arm, item=f"i{item}", repeat=0, outcome=reply)


def calls(candidate: list[int | None], reference: list[int | None]) -> list[Call]:
    made = [call(Arm.CANDIDATE, n, tokens) for n, tokens in enumerate(candidate)]
    return made + [call(Arm.REFERENCE, n, tokens) for n, tokens in enumerate(reference)]


@pytest.mark.parametrize(
    ("candidate", "reference", "said"),
    [
        ([10, 20], [10, 20], "equal"),
        ([13, 23], [10, 20], "a constant +3 tokens"),
        ([7, 17], [10, 20], "a constant -3 tokens"),
        ([10, 25], [10, 20], "differs by +0 to +5 tokens"),
        ([None, None], [10, 20], "unknown"),
        ([], [], "unknown"),
    ],
)
def test_a_constant_skew_is_told_from_a_varying_one(
    candidate: list[int | None], reference: list[int | None], said: str
) -> None:
    assert said in prompt_parity(calls(candidate, reference)).sentence


def test_items_that_one_side_did_not_answer_are_left_out() -> None:
    fault = Fault(kind=FaultKind.SERVER, status=500, text="no", tries=3)
    made = [*calls([10], [10, 99]), Call(arm=Arm.CANDIDATE, item="i1", repeat=0, outcome=fault)]
    assert (prompt_parity(made).items, prompt_parity(made).sentence) == (1, "equal")
