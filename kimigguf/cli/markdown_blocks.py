"""Parts streamed Markdown into blocks that are finished, and the one that is still open; pure.

A finished block never changes by what comes after it, so it can be printed once and scroll away. Nothing is lost or
added: the texts of all blocks, one after the other, are the text that came.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

_FENCE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)\n?")
_HEADING: Final = re.compile(r" {0,3}#{1,6}(?:[ \t]|$)")
_RULE: Final = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}\n?")
_ITEM: Final = re.compile(r"([ \t]*)([-*+]|(\d{1,9})[.)])([ \t]+|(?=\n))")
_TAB: Final = 4
_INDENTED_CODE: Final = 4
_ABOVE_LINES: Final = 60
"""So much of a code block is looked at again for the colours of its next line."""


class BlockKind(StrEnum):
    """What a block is drawn as."""

    TEXT = "text"
    ITEM = "item"
    BLANK = "blank"
    FENCE = "fence"
    CODE = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of Markdown that is drawn by itself.

    ``text`` is as it came, ``body`` what is drawn: without the indent and, of an item, without its ``marker``.
    ``indent`` is in columns. A code block comes line by line, with its ``language`` and what stands ``above`` in it.
    """

    kind: BlockKind
    text: str
    indent: int = 0
    marker: str = ""
    language: str = ""
    above: str = ""

    @property
    def body(self) -> str:
        if self.kind is BlockKind.ITEM and (found := _ITEM.match(self.text)):
            first, *more = self.text[found.end() :].split("\n")
            inner = self.indent + len(self.marker) + 1
            return "\n".join((first, *(_dedented(line, inner) for line in more)))
        return "".join(_dedented(line, self.indent) for line in self.text.splitlines(keepends=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fence:
    mark: str
    indent: int
    language: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where a stream of Markdown is: whole ``lines`` of the open block, the ``rest`` that has no line end yet."""

    lines: tuple[str, ...] = ()
    rest: str = ""
    fence: _Fence | None = None
    in_list: bool = False


def feed(blocks: Blocks, text: str) -> tuple[Blocks, tuple[Block, ...]]:
    """The state after more text, and the blocks that it finished."""
    *lines, rest = (blocks.rest + text).split("\n")
    blocks = replace(blocks, rest=rest)
    done: list[Block] = []
    for line in lines:
        blocks, finished = _line(blocks, line + "\n")
        done += finished
    return blocks, tuple(done)


def finish(blocks: Blocks) -> tuple[Block, ...]:
    """What is still open, as blocks; also what to draw of it while more may come."""
    done: tuple[Block, ...] = ()
    if blocks.rest:
        blocks, done = _line(blocks, blocks.rest)
    return (*done, *_open(blocks))


def _line(blocks: Blocks, line: str) -> tuple[Blocks, tuple[Block, ...]]:  # noqa: PLR0911 -- one for each kind of line
    if blocks.fence is not None:
        return _in_fence(blocks, blocks.fence, line)
    if not line.strip():
        return replace(blocks, lines=()), (*_open(blocks), Block(kind=BlockKind.BLANK, text=line))
    indent = _columns(line)
    if (fence := _FENCE.fullmatch(line)) and not (fence[2][0] == "`" and "`" in fence[3]):
        return _begin_fence(blocks, line, fence[2], fence[3])
    if _HEADING.match(line) or _is_rule(blocks, line):
        return replace(blocks, lines=(), in_list=False), (*_open(blocks), Block(kind=BlockKind.TEXT, text=line))
    if (item := _ITEM.match(line)) and _begins_item(blocks, indent, item[3]):
        return _begin_item(blocks, line, item)
    quoted = line.lstrip().startswith(">")
    if blocks.lines and not (quoted and not blocks.lines[0].lstrip().startswith(">") and indent < _INDENTED_CODE):
        return replace(blocks, lines=(*blocks.lines, line)), ()
    in_list = blocks.in_list and indent > 1
    if not in_list and indent >= _INDENTED_CODE and not blocks.lines:
        return replace(blocks, in_list=False), (Block(kind=BlockKind.CODE, text=line),)
    return replace(blocks, lines=(line,), in_list=in_list), _open(blocks)


def _is_rule(blocks: Blocks, line: str) -> bool:
    """Whether a line is a rule; dashes below a paragraph make it a heading instead."""
    below_text = bool(blocks.lines) and not _ITEM.match(blocks.lines[0])
    return bool(_RULE.fullmatch(line)) and not (below_text and set(line.strip()) == {"-"})


def _begins_item(blocks: Blocks, indent: int, number: str | None) -> bool:
    if indent >= _INDENTED_CODE and not blocks.in_list:
        return False
    # A line of a paragraph may begin with a year and a full stop.
    return number in {None, "1"} or not blocks.lines or blocks.in_list


def _begin_item(blocks: Blocks, line: str, item: re.Match[str]) -> tuple[Blocks, tuple[Block, ...]]:
    before = _open(blocks)
    content = line[item.end() :]
    if (fence := _FENCE.fullmatch(content)) and "`" not in fence[3]:  # the item begins with a code block
        alone = replace(blocks, lines=(line[: item.end()],), in_list=True)
        blocks, opened = _begin_fence(alone, content, fence[2], fence[3], indent=_columns(line) + len(item[2]) + 1)
        return blocks, (*before, *opened)
    return replace(blocks, lines=(line,), in_list=True), before


def _begin_fence(
    blocks: Blocks, line: str, mark: str, info: str, *, indent: int | None = None
) -> tuple[Blocks, tuple[Block, ...]]:
    indent = _columns(line) if indent is None else indent
    language = (info.split() or [""])[0].strip("{}.")
    opening = Block(kind=BlockKind.FENCE, text=line, indent=indent)
    fence = _Fence(mark=mark, indent=indent, language=language)
    return replace(blocks, lines=(), fence=fence), (*_open(blocks), opening)


def _in_fence(blocks: Blocks, fence: _Fence, line: str) -> tuple[Blocks, tuple[Block, ...]]:
    bare = line.strip()
    if len(bare) >= len(fence.mark) and set(bare) == {fence.mark[0]}:
        return replace(blocks, fence=None), (Block(kind=BlockKind.FENCE, text=line, indent=fence.indent),)
    above = "".join(fence.code.splitlines(keepends=True)[-_ABOVE_LINES:])
    block = Block(kind=BlockKind.CODE, text=line, indent=fence.indent, language=fence.language, above=above)
    return replace(blocks, fence=replace(fence, code=above + block.body)), (block,)


def _open(blocks: Blocks) -> tuple[Block, ...]:
    """The open block as it stands."""
    if not blocks.lines:
        return ()
    text, indent = "".join(blocks.lines), _columns(blocks.lines[0])
    if (item := _ITEM.match(text)) and _begins_item(replace(blocks, lines=()), indent, item[3]):
        return (Block(kind=BlockKind.ITEM, text=text, indent=indent, marker=item[2]),)
    return (Block(kind=BlockKind.TEXT, text=text, indent=indent if blocks.in_list else 0),)


def _columns(line: str) -> int:
    """The width of the white space that a line begins with."""
    lead = line[: len(line) - len(line.lstrip(" \t"))]
    return len(lead.expandtabs(_TAB))


def _dedented(line: str, columns: int) -> str:
    """The line without its first ``columns`` columns, as far as they are white."""
    have = _columns(line)
    bare = line.lstrip(" \t")
    return " " * max(0, have - columns) + bare if columns else line
