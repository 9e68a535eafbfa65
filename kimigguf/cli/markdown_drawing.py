"""Draws blocks of Markdown for a terminal with rich, so that every character of them is seen.

What rich would hide or cut is kept: HTML, addresses of links and images, references, LaTeX's backslashes, line ends,
and words that are wider than their table column.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Final

from markdown_it import MarkdownIt
from markdown_it.rules_inline import escape as markdowns_escape
from rich import box, markdown
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from kimigguf.cli.markdown_blocks import Block, BlockKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_LATEX: Final = frozenset("()[]{},;!|%\\")
"""Escaped, these are LaTeX far more often than Markdown: \\(x\\), \\[x\\], \\\\."""
_DELIMITER: Final = re.compile(r"[ \t|:-]*-[ \t|:-]*")
_BAR: Final = re.compile(r"(?<!\\)\|")
_CODE_COLOURS: Final = "ansi_dark"
"""The terminal's own colours, which can be read on light and dark ones."""
THEME: Final = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold",
        "markdown.h5": "bold",
        "markdown.h6": "bold",
        "markdown.link_url": "underline",
    }
)


def draw(block: Block) -> "RenderableType":
    """One block as rich draws it."""
    match block.kind:
        case BlockKind.BLANK:
            return Text("")
        case BlockKind.FENCE:
            return Text(" " * block.indent + block.body.strip(), style="dim")
        case BlockKind.CODE:
            return _code_line(block)
        case BlockKind.ITEM:
            marker = "\N{BULLET}" if block.marker in "-*+" else block.marker
            return _Item(" " * block.indent + marker + " ", _Markdown(block.body))
        case BlockKind.TEXT:
            drawn = _Markdown(block.body)
            return Padding(drawn, (0, 0, 0, block.indent)) if block.indent else drawn


def _code_line(block: Block) -> Text:
    """A line of code in the colours that it has below the lines above it."""
    line = block.body.removesuffix("\n")
    if not block.language:
        return Text(" " * block.indent + line)
    whole = Syntax("", block.language, theme=_CODE_COLOURS, background_color="default").highlight(block.above + line)
    place = block.above.count("\n")
    coloured = whole.split("\n", allow_blank=True)[place : place + 1]
    drawn = coloured[0] if coloured and coloured[0].plain == line else Text(line)
    return Text(" " * block.indent).append_text(drawn)


class _Item:
    """An item of a list: its marker, and everything else to the right of it."""

    def __init__(self, marker: str, content: "RenderableType") -> None:
        self._marker = marker
        self._content = content

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        width = len(self._marker)
        inner = options.update(width=max(1, options.max_width - width), height=None)
        lines = console.render_lines(self._content, inner, pad=False) or [[]]
        for number, line in enumerate(lines):
            yield Segment(self._marker if number == 0 else " " * width)
            yield from line
            yield Segment.line()


class _Paragraph(markdown.Paragraph):
    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        self.text.justify = "default"  # not filled up with blanks to the right, which a copy would hold
        yield self.text


class _Heading(markdown.Heading):
    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield self.text


class _Rule(markdown.HorizontalRule):
    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield Rule(style="dim")


class _Table(markdown.TableElement):
    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, border_style="dim")
        for cell in self.header.row.cells if self.header is not None and self.header.row is not None else ():
            heading = cell.content.copy()
            heading.stylize("bold")
            table.add_column(heading, justify=cell.justify, overflow="fold")
        for row in self.body.rows if self.body is not None else ():
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class _Markdown(markdown.Markdown):
    elements: ClassVar[dict[str, type[markdown.MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "paragraph_open": _Paragraph,
        "heading_open": _Heading,
        "hr": _Rule,
        "table_open": _Table,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)  # an address is shown, not hidden behind its text
        self.parsed = _parser().parse(with_all_cells(text))
        for token in self.parsed:
            if token.children:
                token.children = [*_seen(token.children)]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        begun = False
        for part in super().__rich_console__(console, options):
            # A quote, list or table would begin with an empty line of its own.
            begun = begun or part != Segment.line()
            if begun:
                yield part


def with_all_cells(text: str) -> str:
    """The text with its table's head as wide as its widest row: Markdown leaves out the cells that have no head."""
    lines = text.rstrip("\n").split("\n")
    head = next((place for place, line in enumerate(lines) if "|" in line and _is_delimiter(lines[place + 1 :])), None)
    if head is None:
        return text
    missing = max(map(_cells, lines[head + 2 :]), default=0) - _cells(lines[head])
    if missing <= 0:
        return text
    lines[head] = lines[head].rstrip().removesuffix("|") + "| " * missing + "|"
    lines[head + 1] = lines[head + 1].rstrip().removesuffix("|") + "|---" * missing + "|"
    return "\n".join(lines)


def _is_delimiter(lines: list[str]) -> bool:
    return bool(lines) and "|" in lines[0] and bool(_DELIMITER.fullmatch(lines[0]))


def _cells(row: str) -> int:
    bare = row.strip().removeprefix("|")
    bare = bare if bare.endswith("\\|") else bare.removesuffix("|")
    return len(_BAR.findall(bare)) + 1


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    parser.disable(["reference", "code", "html_block", "html_inline"])

    def escape(state: "StateInline", silent: bool) -> bool:  # noqa: FBT001 -- the parser calls it by position
        following = state.src[state.pos + 1 : state.pos + 2]
        if state.src[state.pos] != "\\" or following not in _LATEX or not following:
            return markdowns_escape(state, silent)
        if not silent:
            state.pending += "\\" + following
        state.pos += 2
        return True

    parser.inline.ruler.at("escape", escape)
    return parser


def _seen(tokens: "list[Token]") -> "Iterable[Token]":
    """The tokens of a line so that rich shows all of them."""
    for place, token in enumerate(tokens):
        match token.type:
            case "softbreak":
                token.type = "hardbreak"
            case "image":
                token.type, token.tag, token.children = "text", "", None
                token.content = f"![{token.content}]({token.attrs.get('src', '')})"
            case "link_open" | "link_close" if _says_its_address(tokens, place):
                continue
        yield token


def _says_its_address(tokens: "list[Token]", place: int) -> bool:
    """Whether the link that begins or ends here has its address as its text."""
    step = 1 if tokens[place].type == "link_open" else -1
    inner = tokens[place + step] if 0 <= place + step < len(tokens) else None
    other = tokens[place + 2 * step] if 0 <= place + 2 * step < len(tokens) else None
    if inner is None or other is None or not other.type.startswith("link_"):
        return False
    opening = tokens[place] if step == 1 else other
    return inner.type == "text" and inner.content == opening.attrs.get("href")
