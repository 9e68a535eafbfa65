import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.probe.checkers import json_in, last_number, meaning, normalised, right
from kimigguf.probe.suites import Exact, Item, JsonSchema, Number, Regex


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("391", 391),
        ("17 * 23 = 391.", 391),
        ("**391**", 391),
        ("\\boxed{391}", 391),
        ("1,234,567 in all", 1234567),
        ("1\u202f234", 1234),
        ("-3.5 degrees", -3.5),
        ("\u22127", -7),
        ("6.02e23", 6.02e23),
        ("none", None),
        ("", None),
        ("1e999", None),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize("text", ["Paris", " paris. ", "**Paris**", '"Paris".', "`PARIS`", "\u201cParis\u201d"])
def test_an_exact_answer_may_be_wrapped(text: str) -> None:
    assert right(Item(id="x", prompt="?", check=Exact(value="Paris")), text) is True


def test_case_counts_where_the_suite_says_so() -> None:
    item = Item(id="x", prompt="?", check=Exact(value="Paris", ignore_case=False))
    assert (right(item, "*Paris*."), right(item, "paris")) == (True, False)


def test_a_longer_answer_is_not_exact() -> None:
    assert right(Item(id="x", prompt="?", check=Exact(value="Paris")), "It is Paris") is False


def test_a_number_within_its_tolerance_is_right() -> None:
    item = Item(id="x", prompt="?", check=Number(value=224.4, tolerance=0.01))
    assert [right(item, text) for text in ("224.4", "224.405", "224.5", "none")] == [True, True, False, False]


def test_json_is_held_to_schema_and_value() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    item = Item(id="x", prompt="?", check=JsonSchema(schema=schema, value={"a": 1}))
    answers = {'{"a": 1}': True, '```json\n{"a": 1}\n```': True, '{"a": 2}': False, '{"a": "1"}': False, "a": False}
    assert {text: right(item, text) for text in answers} == answers


def test_two_fenced_blocks_are_no_answer() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        json_in("```json\n1\n```\n```json\n2\n```")


def test_without_a_check_nothing_is_right_or_wrong() -> None:
    assert right(Item(id="x", prompt="?"), "anything") is None


@pytest.mark.parametrize(
    ("check", "one", "other", "same"),
    [
        (Number(value=3), "It is 3.", "three... no, 3.0", True),
        (Number(value=3), "It is 3.", "It is 4.", False),
        (Number(value=3), "no idea", "No idea.", True),
        (JsonSchema(schema={}), '{"a": 1, "b": 2}', '```json\n{"b":2,"a":1}\n```', True),
        (JsonSchema(schema={}), "{", "{ ", True),
        (Regex(pattern="answer: (\\w+)"), "answer: Yes", "My answer: yes!", True),
        (Regex(pattern="answer: (\\w+)"), "answer: yes", "answer: no", False),
        (Exact(value="a"), "Mirel", "**mirel**", True),
        (None, "The sky  is blue.", "the sky is blue", True),
        (None, "The sky is blue.", "The sea is blue.", False),
    ],
)
def test_agreement_is_about_what_is_said(check: object, one: str, other: str, same: bool) -> None:
    assert (meaning(check, one) == meaning(check, other)) is same  # type: ignore[arg-type]  # a table of checkers


@given(st.text(max_size=60))
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(st.text(max_size=60))
def test_no_answer_makes_a_traceback(text: str) -> None:
    for check in (Number(value=1), Regex(pattern="a(b)?"), JsonSchema(schema={}), Exact(value="x"), None):
        right(Item(id="x", prompt="?", check=check), text)
        assert isinstance(meaning(check, text), str)
