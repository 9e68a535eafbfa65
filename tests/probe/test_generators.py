import json
import random
import re
from pathlib import Path

import pytest

from kimigguf.errors import UsageError
from kimigguf.probe.checkers import right
from kimigguf.probe.generators import TEMPLATES, make
from kimigguf.probe.suites import Exact, Item, JsonSchema, Number, Regex, load_suite


def good_answer(item: Item) -> str:
    match item.check:
        case Exact(value=value, values=values):
            return value or values[0]
        case Number(value=value):
            return f"{value:g}" if value % 1 else f"{value:.0f}"
        case JsonSchema(value=value):
            return json.dumps(value)
        case Regex(pattern=pattern) if found := re.search(r"\\b\(([\w ]+)", pattern):
            return found[1]
        case _:
            asked = (item.prompt or "").rpartition(": ")[2]
            return ", ".join(sorted(asked.split(", ")))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_accepts_its_answer_and_no_other(template: str) -> None:
    for item in make(template, 25, seed=1):
        answer = good_answer(item)
        assert right(item, answer) is True, item
        assert right(item, f"{answer}9") is False, item
        assert right(item, "") is False, item


def test_the_same_seed_makes_the_same_questions_and_another_makes_others() -> None:
    assert load_suite("standard", {}) == load_suite("standard", {})
    one, other = load_suite("standard", {}), load_suite("standard", {}, seed=1)
    assert len(one.items) == len(other.items) == 180
    assert one.sha256 != other.sha256
    same = sum(a.prompt == b.prompt for a, b in zip(one.items, other.items, strict=True))
    assert same < 5


def test_more_items_leave_the_first_ones_as_they_are() -> None:
    assert make("product", 20, seed=3)[:5] == make("product", 5, seed=3)


def test_the_questions_of_a_template_differ() -> None:
    for template in TEMPLATES:
        prompts = {item.prompt for item in make(template, 20, seed=2)}
        assert len(prompts) == 20, template


def test_more_questions_than_a_template_has_are_refused() -> None:
    with pytest.raises(UsageError, match="no 100 different"):
        make("backwards", 100, seed=1)


@pytest.mark.parametrize("template", ["order", "table", "ages"])
def test_the_answers_of_a_template_are_spread(template: str) -> None:
    assert len({good_answer(item) for item in make(template, 60, seed=4)}) >= 5


def test_an_order_has_one_solution() -> None:
    """Found by trying all orders, not by the way the question was made."""
    from itertools import permutations

    for item in make("order", 12, seed=5):
        text = item.prompt or ""
        facts = [tuple(part.split(" is directly before ")) for part in text.split(". ") if "directly before" in part]
        names = sorted({name.removesuffix(".") for fact in facts for name in fact})
        pairs = [(a, b.removesuffix(".")) for a, b in facts]
        fits = [line for line in permutations(names) if all(line.index(b) - line.index(a) == 1 for a, b in pairs)]
        place = ("first", "second", "third", "fourth", "fifth", "sixth").index(
            text.partition("Who is ")[2].split("?")[0]
        )
        assert [line[place] for line in fits] == [good_answer(item)]


@pytest.mark.parametrize("template", ["where", "notice"])
def test_what_stands_in_the_text_is_what_is_wanted(template: str) -> None:
    for item in make(template, 12, seed=6):
        text = item.prompt or ""
        name = re.search(r"(?:does|letter for) (\w+) (?:live|go)\?", text)
        assert name is not None
        told = re.findall(rf"{name[1]} (?:lives in|goes to) (\w+)\.", text)
        assert told == [good_answer(item)]


def test_an_answer_that_names_all_there_is_to_choose_from_is_wrong() -> None:
    for item in make("where", 12, seed=6):
        assert right(item, (item.prompt or "").partition(" In which")[0]) is False


def test_a_question_that_has_lost_its_front_cannot_be_answered() -> None:
    for item in make("notice", 12, seed=6):
        assert good_answer(item) not in (item.prompt or "")[-500:]


def test_an_unknown_template_names_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[generate]\nriddle = 3\n')
    with pytest.raises(UsageError) as error:
        load_suite(str(path), {})
    assert "product" in (error.value.hint or "")


def test_guessing_is_hardly_ever_right() -> None:
    chance = random.Random(1)
    items = load_suite("standard", {}).items
    guesses = sum(bool(right(item, str(chance.randint(1, 999)))) for item in items)
    assert guesses <= 6
