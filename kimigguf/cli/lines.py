"""How a line fits the console: broken between words under a hanging indent, what is to be pasted left whole."""

import os
import re
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_WORD: Final = re.compile(r"""(?:(?<![\w])'[^']*'|(?<![\w])"[^"]*"|\S)+""")
"""Quotes hold a word together; an apostrophe, which follows a letter, does not."""
_MARK: Final = re.compile(r"\s*(?:[-*•] |[a-z]{1,9}(?: [a-z]{1,4})?: |\[\d+\] )")
_DEEP: Final = 4
"""Below this many columns an indented line is one of a list, whose items must be told from their further lines."""
_GAP: Final = re.compile(r"(?<=\S) {2,}(?=\S)")
_PROGRAMS: Final = frozenset(
    {"cat", "chmod", "cmake", "curl", "docker", "echo", "export", "ip", "journalctl", "kimigguf", "llama-server"}
    | {"loginctl", "nvidia-smi", "ollama", "pip", "python", "ssh", "sudo", "sysctl", "systemctl", "ulimit", "uv"}
)
_ARGUMENT: Final = re.compile(r"""-|['"]|.*[A-Z0-9_/=]|\w+[.-]\w|[|&\\<>]""")
"""How an argument differs from a word of the sentence around a command."""
_END: Final = re.compile(r"""[,;:.)…]+['"]?$""")


class LineConsole(Console):
    """A console that breaks lines of text between words and keeps their indent; tables and panels are rich's.

    A caller that gives ``soft_wrap`` lays out by itself; True is for what is code or a command as a whole, which is
    written as it is. So is everything where nothing says how wide the reader's window is: a log or a pipe.
    """

    def print(self, *objects: Any, **how: Any) -> None:  # noqa: ANN401 -- rich's own signature, of which this adds nothing
        """Print like rich, one text laid out by ``laid_out``."""
        if len(objects) == 1 and isinstance(objects[0], str | Text) and "soft_wrap" not in how:
            line = objects[0]
            if isinstance(line, str):
                line = self.render_str(line, markup=how.pop("markup", None), highlight=how.pop("highlight", None))
            known = self.is_terminal or "COLUMNS" in os.environ
            super().print(laid_out(line, self.width) if known else line, soft_wrap=True, **how)
            return
        super().print(*objects, **how)


def laid_out(text: Text, columns: int) -> Text:
    """``text`` with each of its lines broken between words to at most ``columns``, as far as whole words allow it."""
    return Text("\n").join(Text("\n").join(_broken(line, columns)) for line in text.split("\n", allow_blank=True))


def hanging(line: str, columns: int) -> int:
    """The column at which the further lines of ``line`` begin: below its words, behind a label, bullet or gap."""
    indent = len(line) - len(line.lstrip())
    gaps = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= columns // 2]
    if gaps:
        return gaps[-1]
    mark = _MARK.match(line)
    if mark:
        return mark.end()
    return indent + 2 if 0 < indent < _DEEP else indent


def _broken(line: Text, columns: int) -> list[Text]:
    plain = line.plain
    if cell_len(plain) <= columns or plain.endswith("\\"):
        return [line]
    pieces = unbroken(plain)
    if len(pieces) < 2:  # noqa: PLR2004 -- one piece: nothing between which to break
        return [line]
    hang = hanging(plain, columns)
    margin, start, lines = 0, 0, list[Text]()
    last = pieces[0][1]
    for begin, end in pieces[1:]:
        if margin + cell_len(plain[start:end]) > columns and last > start:
            lines.append(Text(" " * margin) + line[start:last])
            start, margin = begin, hang
        last = end
    lines.append(Text(" " * margin) + line[start:])
    return lines


def unbroken(line: str) -> list[tuple[int, int]]:
    """Where each piece of ``line`` that is never broken begins and ends: a word, or a command with its arguments."""
    words = [(found.start(), found.end()) for found in _WORD.finditer(line)]
    texts = [line[begin:end] for begin, end in words]
    pieces, at = list[tuple[int, int]](), 0
    while at < len(words):
        after = _command_end(texts, at)
        pieces.append((words[at][0], words[after - 1][1]))
        at = after
    return pieces


def _command_end(words: list[str], at: int) -> int:
    """The index behind the command that begins at ``at``, or behind that one word."""
    end = at
    while end < len(words) - 1 and re.match(r"[A-Z_]+=\S", words[end]):
        end += 1  # variables before a command
    if words[end].lstrip("('\"`") not in _PROGRAMS or end + 1 == len(words):
        return at + 1
    end += 1  # a subcommand, or the first argument
    while end + 1 < len(words) and not _END.search(words[end]):
        following = words[end + 2] if end + 2 < len(words) else ""
        if not (words[end].startswith("-") or _ARGUMENT.match(words[end + 1]) or following.startswith("--")):
            break
        end += 1
    return end + 1
