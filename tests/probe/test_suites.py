import json
import re
from pathlib import Path

import pytest

from kimigguf import profile_files
from kimigguf.errors import UsageError
from kimigguf.probe.checkers import right
from kimigguf.probe.sandbox import closed, run_test
from kimigguf.probe.suites import Exact, Item, JsonSchema, Number, PythonTest, load_suite


def test_the_quick_suite_has_more_than_thirty_checked_items_and_ids_of_their_own() -> None:
    suite = load_suite("quick", {})
    assert len(suite.items) == 32
    assert all(item.check is not None for item in suite.items)
    assert re.fullmatch(r"[0-9a-f]{64}", suite.sha256)


_RIGHT = {
    "sort-words": "apple, apricot, peach, pear, plum",
    "limit-three-words": "Vast restless blue",
    "limit-no-letter-e": "A brown dog runs around a pond.",
    "limit-numbered-list": "1. Red\n2. Green\n3. Violet",
    "limit-uppercase": "AIR SCATTERS BLUE LIGHT MOST.",
}
_WRONG = {
    "sort-words": "apricot, apple, peach, pear, plum",
    "limit-three-words": "Vast, restless and blue.",
    "limit-no-letter-e": "The dog sleeps.",
    "limit-numbered-list": "Here you are:\n1. Red\n2. Green\n3. Violet",
    "limit-uppercase": "Air scatters blue light most.",
}


_PROGRAMS = {
    "code-expression": (
        "f = lambda n: sum(i * i for i in range(2, n + 1, 2))",
        "f = lambda n: sum(i * i for i in range(1, n))",
    ),
    "code-longest-run": (
        "import itertools as i\ndef longest_run(text): return max((len([*g]) for _, g in i.groupby(text)), default=0)",
        "def longest_run(text): return len(text)",
    ),
    "code-merge-spans": (
        """def merge(spans):
    out = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]: out[-1] = (out[-1][0], max(b, out[-1][1]))
        else: out.append((a, b))
    return out""",
        "def merge(spans): return sorted(spans)",
    ),
}


@pytest.mark.skipif(closed() is not None, reason=str(closed()))
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_quick_program_is_right_or_wrong_by_what_it_does(name: str) -> None:
    check = next(item.check for item in load_suite("quick", {}).items if item.id == name)
    assert isinstance(check, PythonTest)
    assert [run_test(code, check.code).passed for code in _PROGRAMS[name]] == [True, False]


_BY_TEXT = [item for item in load_suite("quick", {}).items if not isinstance(item.check, PythonTest)]


@pytest.mark.parametrize("item", _BY_TEXT, ids=lambda item: item.id)
def test_every_quick_item_passes_a_right_answer_and_fails_a_wrong_one(item: Item) -> None:
    match item.check:
        case Exact(value=value, values=values):
            good, bad = value or values[0], "something else"
        case Number(value=number):
            good, bad = f"The answer is {number:g}.", f"The answer is {number + 7:g}."
        case JsonSchema(value=value):
            good, bad = f"```json\n{json.dumps(value)}\n```", "{}"
        case _:
            good, bad = _RIGHT[item.id], _WRONG[item.id]
    assert right(item, good) is True
    assert right(item, bad) is False
    assert right(item, "") is False


_ITEM = 'name = "x"\n[[items]]\nid = "a"\nprompt = "b"\n'


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_suite_of_ones_own_is_a_few_lines_of_toml_or_jsonl(tmp_path: Path) -> None:
    toml = 'name = "mine"\n[[items]]\nid = "a"\nprompt = "2+2?"\ncheck = { kind = "number", value = 4 }\n'
    assert load_suite(write(tmp_path / "mine.toml", toml), {}).items[0].check == Number(value=4)
    line = json.dumps({"id": "a", "messages": [{"role": "user", "content": "2+2?"}]})
    suite = load_suite(write(tmp_path / "mine.jsonl", f"{line}\n\n"), {})
    assert (suite.name, suite.items[0].conversation[0].content, suite.items[0].check) == ("mine", "2+2?", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\nitems = []\n', "no items"),
        ('name = "x"\n[[items]]\nid = "a"\n', "needs a prompt"),
        ('name = "x"\n[[items]]\nid = "a"\nprompt = "b"\n[[items]]\nid = "a"\nprompt = "c"\n', "given to 2 items"),
        ('name = "x"\n[[items]]\nid = "a"\nprompt = "b"\ncheck = { kind = "regex", pattern = "(" }\n', "regular"),
        ('name = "x"\n[[items]]\nid = "a"\nprompt = "b"\ncheck = { kind = "exact" }\n', "value or values"),
        ('name = "x"\n[[items]]\nid = "a"\nprompt = "b"\ncheck = { kind = "guess" }\n', "guess"),
        (
            'name = "x"\n[[items]]\nid = "a"\nprompt = "b"\ncheck = { kind = "number", value = 1, tolerance = -1 }\n',
            "neg",
        ),
        (f'{_ITEM}check = {{ kind = "json-schema", schema = {{ type = "objekt" }} }}\n', "schema"),
        (f'{_ITEM}check = {{ kind = "json-schema", schema = {{ "$ref" = "file:///etc/passwd" }} }}\n', "refers to"),
        (f'{_ITEM}check = {{ kind = "json-schema", schema = {{ items = {{ "$ref" = "#/a" }} }} }}\n', "refers to"),
        ('name = "x"\n[[items]]\nid = "a"\nprompt = "b"\npromt = "c"\n', "promt"),
        (f'{_ITEM}check = {{ kind = "python-test", code = "assert (" }}\n', "no Python"),
        (f'{_ITEM}check = {{ kind = "python-test", code = " " }}\n', "no code"),
        (f'{_ITEM}check = {{ kind = "rubric", rubric = "" }}\n', "rubric is empty"),
        ('name = "x"\n[[items]]\nid = "a"\nmessages = [{ role = "assistant", content = "b" }]\n', "needs a prompt"),
    ],
)
def test_a_bad_suite_is_refused_and_says_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_suite(write(tmp_path / "bad.toml", text), {})
    assert error.value.code in {"bad-suite", "bad-profile"}
    assert said in f"{error.value.message} {error.value.cause}"


def test_a_bad_line_of_jsonl_is_named_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 2"):
        load_suite(write(tmp_path / "bad.jsonl", '{"id": "a", "prompt": "b"}\n{"id": 3}\n'), {})


def test_an_unknown_suite_names_those_there_are() -> None:
    with pytest.raises(UsageError) as error:
        load_suite("quikc", {})
    assert "quick" in (error.value.hint or "")


def test_every_shipped_suite_loads() -> None:
    assert [load_suite(name, {}).name for name in profile_files.names("suites", {})] == [
        "basics",
        "long",
        "quick",
        "standard",
        "tools",
    ]
