"""Reads what a person types: lines with editing, history and pasting on a terminal, plain lines elsewhere."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

Reader: TypeAlias = Callable[[str], str]
"""Shows a prompt and returns what was typed; raises EOFError at the end, ``Pressed`` for Ctrl-C."""


class Pressed(Exception):  # noqa: N818 -- a key, no error
    """Ctrl-C was pressed at an empty prompt."""


def plain_reader(_prompt: str) -> str:
    """A line of stdin."""
    return input()


def forgiving_streams() -> None:
    """Let stdin pass over bytes that are no UTF-8 (somebody pipes a diff), and stdout over what a locale lacks."""
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a test's stream has none
            reconfigure(errors="replace")


def terminal_reader(history_file: Path, words: tuple[str, ...]) -> Reader:
    """Lines from a terminal, with what was typed in earlier talks kept in ``history_file``, for its owner alone."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    session: PromptSession[str] = PromptSession(
        history=_history(history_file),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_history_search=Condition(lambda: False),
        enable_suspend=True,
        reserve_space_for_menu=0,
        # The answer may go to a file while its reader sits at a terminal.
        output=create_output(always_prefer_tty=True),
    )
    return session.prompt


def _history(file: Path) -> "History":
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a disk that fills up, or a folder that goes, ends no talk
                super().store_string(string)

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
    except OSError:  # a full or read-only home is no reason not to talk
        return InMemoryHistory()
    return Kept(file)


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: Any) -> None:  # noqa: ANN401 -- prompt_toolkit's event, imported only at a terminal
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _line(event: Any) -> None:  # noqa: ANN401 -- as above
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")  # the same, on a terminal that is not quite ready
    def _stop(event: Any) -> None:  # noqa: ANN401 -- as above
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=Pressed())

    return keys


class Stops:
    """Whether Ctrl-C was pressed while an answer came; at other times there is nothing to stop.

    Other signals end the whole program, as everywhere.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._answers = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self._answers and not self.pressed:  # once is enough: a second one would break the stopping off
            self.pressed = True
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """An answer comes, and can be stopped."""
        self.pressed = False
        self._answers = True
        try:
            yield
        finally:
            self._answers = False


@contextlib.contextmanager
def at_the_keyboard() -> Iterator[Stops]:
    """While a talk lasts: Ctrl-C stops answers only, and what is typed ahead waits for the prompt without being shown.

    Without it a key that comes between an answer and the prompt would end the program, be lost, or stand in the text.
    """
    import termios

    stops = Stops()
    before = signal.signal(signal.SIGINT, stops)
    terminal = sys.stdin.fileno()
    modes = termios.tcgetattr(terminal)
    silent = [*modes]
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield stops
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
        signal.signal(signal.SIGINT, before)
