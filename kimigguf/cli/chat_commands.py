"""The commands of ``kimigguf chat``, and what a line that was typed means; pure."""

from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Final, TypeAlias


class Name(StrEnum):
    """The commands, as they are typed after the slash."""

    RETRY = "retry"
    NEW = "new"
    EFFORT = "effort"
    THINK = "think"
    SAVE = "save"
    DECLINE = "decline"
    HELP = "help"
    QUIT = "quit"


_ABOUT: Final = {
    Name.RETRY: ("", "drop the last answer and ask again"),
    Name.NEW: ("", "forget everything and begin anew"),
    Name.EFFORT: ("LEVEL", "how much to think: low, high or max; alone, what it is"),
    Name.THINK: ("", "show the last thinking in full"),
    Name.SAVE: ("FILE", "save the talk; kimigguf chat --resume FILE goes on with it"),
    Name.DECLINE: ("", "decline a tool call instead of typing its result"),
    Name.HELP: ("", "show this"),
    Name.QUIT: ("", "end, as Ctrl-D does"),
}
_ALSO: Final = {"clear": Name.NEW, "exit": Name.QUIT, "bye": Name.QUIT, "q": Name.QUIT, "?": Name.HELP}
_KEYS: Final = (
    "A backslash at the end of a line, or Alt-Enter, goes on in the next one; what is pasted stays together. "
    "Ctrl-C stops an answer and keeps what came; twice, it ends."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with what stands behind it."""

    name: Name
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Something for the assistant."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """What looks like a command and is none; ``nearest`` is what may have been meant."""

    word: str
    nearest: str | None


Meaning: TypeAlias = Command | Say | Unknown | None


def meaning(line: str) -> Meaning:
    """What a line means; None for an empty one. A text that begins with a path or has several lines is no command."""
    text = line.strip()
    if not text:
        return None
    word, _, rest = text.partition(" ")
    bare = word[1:]
    if not word.startswith("/") or "/" in bare or "\n" in text or not bare:
        return Say(text=line.strip("\n").rstrip())  # the indent of pasted code stays
    name = _ALSO.get(bare) or next((name for name in Name if name == bare), None)
    if name is not None:
        return Command(name=name, rest=rest.strip())
    nearest = get_close_matches(bare, [*Name], n=1, cutoff=0.5)
    return Unknown(word=word, nearest=f"/{nearest[0]}" if nearest else None)


def words() -> tuple[str, ...]:
    """Every command with its slash, for completion."""
    return tuple(f"/{name}" for name in Name)


def help_lines() -> tuple[str, ...]:
    """What ``/help`` prints."""
    heads = {name: f"/{name} {argument}".rstrip() for name, (argument, _about) in _ABOUT.items()}
    width = max(map(len, heads.values())) + 2
    return (*(f"  {heads[name]:{width}}{about}" for name, (_argument, about) in _ABOUT.items()), _KEYS)
