"""Markdown as it streams: no character lost, no finished block that changes later, and all of it to be seen."""

import io
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kimigguf.cli.markdown_blocks import Block, BlockKind, Blocks, feed, finish
from kimigguf.cli.markdown_drawing import THEME, draw

MARKS = ["\n", "\n\n", "  ", "    ", "\t", "```", "```py", "~~~", "- ", "1. ", "12) ", "# ", "---", "===", "> ", "$$"]
INLINE = [
    "a",
    "b c",
    "*",
    "**",
    "`",
    "\\(",
    "<b>",
    "[x](y)",
    "[r]: z",
    "数量",
    "\U0001f600",
    "\x0b",
    "\u2028",
    "| a |",
    "|---|",
]
PARTS = st.sampled_from(MARKS + INLINE)
MARKDOWN = st.lists(PARTS, max_size=40).map("".join)


def blocks_of(*pieces: str) -> tuple[Block, ...]:
    state = Blocks()
    done: list[Block] = []
    for piece in pieces:
        state, finished = feed(state, piece)
        done += finished
    return (*done, *finish(state))


def shape(text: str) -> list[tuple[str, str]]:
    return [(block.kind.value, block.body.rstrip("\n")) for block in blocks_of(text)]


@settings(deadline=None)  # a busy machine is no failure
@given(MARKDOWN)
def test_no_character_is_lost_or_added(text: str) -> None:
    assert "".join(block.text for block in blocks_of(text)) == text


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(max_size=60))
def test_no_character_of_any_text_is_lost_or_added(text: str) -> None:
    assert "".join(block.text for block in blocks_of(text)) == text


@settings(deadline=None)  # a busy machine is no failure
@given(MARKDOWN, st.lists(st.integers(0, 120), max_size=6))
def test_where_the_stream_was_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    """A block that is printed cannot be taken back: it must be what it would be with all of the text at hand."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert blocks_of(*pieces) == blocks_of(text)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("one\ntwo\n\nthree", [("text", "one\ntwo"), ("blank", ""), ("text", "three")]),
        ("# Head\ntext", [("text", "# Head"), ("text", "text")]),
        ("text\n---\nmore", [("text", "text\n---\nmore")]),
        ("***\ntext", [("text", "***"), ("text", "text")]),
        ("- a\n- b", [("item", "a"), ("item", "b")]),
        ("1. a\n   b\n2. c", [("item", "a\nb"), ("item", "c")]),
        ("- a\n  - b\n    c", [("item", "a"), ("item", "b\nc")]),
        ("In\n1986. A year", [("text", "In\n1986. A year")]),
        ("> a\n> b\n\nc", [("text", "> a\n> b"), ("blank", ""), ("text", "c")]),
        ("| a |\n|---|\n| - b |", [("text", "| a |\n|---|\n| - b |")]),
        ("    code\ntext", [("code", "    code"), ("text", "text")]),
        ("```py\nx\n\n# y\n```\nz", [("fence", "```py"), ("code", "x"), ("code", ""), ("code", "# y"), ("fence", "```"),
                                    ("text", "z")]),
        ("````\n```\n````", [("fence", "````"), ("code", "```"), ("fence", "````")]),
        ("1. a\n   ```\n   x\n     y\n   ```\n   b", [("item", "a"), ("fence", "```"), ("code", "x"), ("code", "  y"),
                                                     ("fence", "```"), ("text", "b")]),
        ("- ```sh\n  ls\n  ```", [("item", ""), ("fence", "```sh"), ("code", "ls"), ("fence", "```")]),
        ("``` a`b\n", [("text", "``` a`b")]),
    ],
)  # fmt: skip
def test_a_text_is_parted_as_people_read_it(text: str, shapes: list[tuple[str, str]]) -> None:
    assert shape(text) == shapes


def test_a_line_of_code_knows_its_language_and_what_stands_above_it() -> None:
    code = blocks_of('- x\n  ```python title="a"\n  """a\n  b"""\n  ```\n')[3]
    assert (code.language, code.above, code.indent) == ("python", '"""a\n', 2)


def drawn(text: str, columns: int = 80) -> str:
    console = Console(file=io.StringIO(), width=columns, theme=THEME, highlight=False)
    for block in blocks_of(text):
        console.print(draw(block), soft_wrap=block.kind in {BlockKind.CODE, BlockKind.FENCE})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "a List<String> and <div>html</div>",
        "[reference]: http://lost.example",
        "![an image](http://image.example/x.png)",
        "a [link](http://link.example/x)",
        "\\( x_1 \\) and \\[ y \\\\ z \\]",
        "a_snake_case_name and 2 * 3 * 4",
        "<http://auto.example>",
    ],
)
def test_what_rich_would_hide_is_seen(text: str) -> None:
    seen = drawn(text)
    assert re.sub(r"[\[\]()<>! ]", "", text) == re.sub(r"[\[\]()<>! \n]", "", seen)


def test_a_word_wider_than_its_table_column_is_whole() -> None:
    word = "x" * 50 + "y" * 50
    seen = drawn(f"| a | 数量 |\n|---|---|\n| {word} | {'长' * 60} |", columns=60)
    assert (seen.count("x"), seen.count("y"), seen.count("长")) == (50, 50, 60)
    assert "…" not in seen


@pytest.mark.parametrize("head", ["| a | b |\n|---|:-:|", "a | b\n--- | ---"])
def test_a_row_with_more_cells_than_its_head_is_whole(head: str) -> None:
    seen = drawn(f"{head}\n| one | two | three | four |\n| five \\| six | seven |")
    assert seen.split() == [
        "a",
        "b",
        "─" * len(max(seen.split(), key=len)),
        *["one", "two", "three", "four", "five", "|", "six", "seven"],
    ]


def test_line_ends_and_numbers_of_a_list_stay_and_nothing_fills_the_line() -> None:
    assert drawn("3. one\n   two\n4) three\n") == "3. one\n   two\n4) three\n"
    assert drawn("one\ntwo") == "one\ntwo\n"


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(
        st.sampled_from(["word", "**bold**", "`code`", "\n", "\n\n", "- ", "> ", "1. ", "| ", "```\n"]), max_size=30
    )
)
def test_every_word_is_drawn(parts: list[str]) -> None:
    text = " ".join(parts)
    seen = re.sub(r"\s", "", drawn(text))
    for word in ("word", "bold", "code"):
        assert seen.count(word) == text.count(word)
