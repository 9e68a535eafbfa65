import json
import random
import re
from pathlib import Path

import pytest

from kimigguf.errors import UsageError
from kimigguf.probe.checkers import right
from kimigguf.probe.code_items import CODE
from kimigguf.probe.generators import DEPTHS, NEEDLES, TEMPLATES, make
from kimigguf.probe.limits import LIMITS
from kimigguf.probe.sandbox import closed, run_test
from kimigguf.probe.suites import Exact, Item, JsonSchema, Number, PythonTest, Regex, load_suite


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


_FREE = {*CODE, *LIMITS} - {"language-where"}
"""Templates whose right answers are many."""


@pytest.mark.parametrize("template", sorted({*TEMPLATES, "needle-1k"} - _FREE))
def test_every_template_accepts_its_answer_and_no_other(template: str) -> None:
    for item in make(template, 25, seed=1):
        answer = good_answer(item)
        assert right(item, answer) is True, item
        assert right(item, f"{answer}9") is False, item
        assert right(item, "") is False, item


def test_the_same_seed_makes_the_same_questions_and_another_makes_others() -> None:
    assert load_suite("standard", {}) == load_suite("standard", {})
    one, other = load_suite("standard", {}), load_suite("standard", {}, seed=1)
    assert len(one.items) == len(other.items) == 228
    assert one.sha256 != other.sha256
    same = sum(a.prompt == b.prompt for a, b in zip(one.items, other.items, strict=True))
    assert same < 5


def test_more_items_leave_the_first_ones_as_they_are() -> None:
    assert make("product", 20, seed=3)[:5] == make("product", 5, seed=3)


def test_the_questions_of_a_template_differ() -> None:
    for template in TEMPLATES:
        count = 12 if template in _FREE else 20
        prompts = {item.prompt for item in make(template, count, seed=2)}
        assert len(prompts) == count, template


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


def _solution(template: str, prompt: str) -> str:
    """A right program for a question, from what the question says."""
    if template == "code-sum":
        yes, no = re.findall(r"\d+", prompt)
        return f"def pick(numbers): return sum(n for n in numbers if n % {yes} == 0 and n % {no} != 0)"
    if template == "code-duration":
        told = re.match(r"One (\w) is (\d+) (\w)\.", prompt)
        assert told is not None
        return (
            "import re\ndef total(text):\n"
            f"    a, b = (re.search(r'(\\d+)' + unit, text) for unit in '{told[1]}{told[3]}')\n"
            f"    return (int(a[1]) * {told[2]} if a else 0) + (int(b[1]) if b else 0)"
        )
    if template == "code-turn":
        told = re.search(r"turned (\w+) by (\d+) degrees(?: and then mirrored (\w+))?", prompt)
        assert told is not None
        turns = int(told[2]) // 90 if told[1] == "clockwise" else 4 - int(told[2]) // 90
        mirror = {"left": "[r[::-1] for r in grid]", "top": "grid[::-1]", None: "grid"}[told[3]]
        return (
            f"def turn(grid):\n    for _ in range({turns}): grid = [list(r) for r in zip(*grid[::-1])]\n"
            f"    return {mirror}"
        )
    told = re.search(r"the letter (\w),.* at most (\d)", prompt)
    assert told is not None
    key = f"lambda w: (-w.count('{told[1]}'), len(w), w)"
    return f"def ranked(text): return sorted({{w for w in text.split() if '{told[1]}' in w}}, key={key})[:{told[2]}]"


@pytest.mark.skipif(closed() is not None, reason=str(closed()))
@pytest.mark.parametrize("template", CODE)
def test_a_right_program_passes_and_a_wrong_one_does_not(template: str) -> None:
    for item in make(template, 4, seed=9):
        assert isinstance(item.check, PythonTest)
        named = re.search(r"function (\w+)\((\w+)\)", item.prompt or "")
        assert named is not None
        found = run_test(_solution(template, item.prompt or ""), item.check.code)
        assert found.passed is True, (item, found)
        assert run_test(f"def {named[1]}({named[2]}): return {named[2]}", item.check.code).passed is False, item


def _six_words(prompt: str) -> str:
    letter = re.findall(r"the letter (\w)", prompt)[0]
    words = ("but", "the", "big", "dog", "can", "run", "me", "up", "why", "ply", "cry", "key")
    return " ".join([word for word in words if letter not in word][:6])


def _lines(prompt: str) -> str:
    count = int(re.findall(r"List (\d)", prompt)[0])
    start, end = re.findall(r"'([^']+)'", prompt)
    return "\n".join([f"{start}thing{end}"] * count)


def _kept(template: str, prompt: str) -> tuple[str, str]:
    """An answer that keeps to its form, and one that does not by a little."""
    if template == "limit-words":
        answer = " ".join(["wet"] * int(re.findall(r"\d+", prompt)[0]))
        return answer, f"{answer} wet"
    if template == "limit-letter":
        answer = _six_words(prompt)
        return answer, f"{answer} aiosn"
    if template == "limit-lines":
        answer = _lines(prompt)
        return answer, answer.rpartition("\n")[0]
    answer = "\n".join(f"{letter} line" for letter in re.findall(r"'(\w+)'", prompt)[0])
    return answer, answer.partition("\n")[2]


@pytest.mark.parametrize("template", sorted({*LIMITS} - {"language-where"}))
def test_an_answer_that_keeps_to_its_form_passes_and_one_that_does_not_fails(template: str) -> None:
    for item in make(template, 12, seed=9):
        answer, broken = _kept(template, item.prompt or "")
        assert right(item, answer) is True, (item.prompt, answer)
        assert right(item, broken) is False, (item.prompt, broken)
        assert right(item, f"Here 1 is:\n{answer}") is False, item


def test_a_long_answer_is_read_in_no_time() -> None:
    """A pattern with many ways to read a word would take for ever on this."""
    for template in LIMITS:
        for item in make(template, 4, seed=9):
            assert right(item, "it's-a-well-worn-what's-it " * 400 + "7") is False


def test_needles_stand_at_all_depths_and_have_their_size() -> None:
    items = make("needle-8k", 5, seed=3)
    places = []
    for item in items:
        lines = (item.prompt or "").split("\n")
        places.append(next(n for n, line in enumerate(lines) if "vault is" in line) / len(lines))
        assert 4 * 6000 < len(item.prompt or "") < 4 * 9000
    assert places == pytest.approx(DEPTHS, abs=0.03)
    assert {"needle-4k", "needle-500k"} <= set(NEEDLES)


def test_the_standard_suite_asks_what_it_says_it_asks() -> None:
    suite = load_suite("standard", {})
    found = {item.category for item in suite.items}
    assert found >= {"arithmetic", "code", "json", "extraction", "languages", "long context", "instructions"}
    assert sum(isinstance(item.check, PythonTest) for item in suite.items) == 24
    assert all(item.check is not None for item in suite.items)


def test_guessing_is_hardly_ever_right() -> None:
    chance = random.Random(1)
    items = load_suite("standard", {}).items
    guesses = sum(bool(right(item, str(chance.randint(1, 999)))) for item in items)
    assert guesses <= 6
