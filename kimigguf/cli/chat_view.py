"""Shows an answer while it comes: thinking folded into one line, finished Markdown printed once, the rest live.

What is no terminal gets the plain text as it comes. Nothing of what a model says reaches a terminal as a command.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, Self

from kimigguf.cli.show import Mode, Show
from kimigguf.engines.printable import printable
from kimigguf.engines.turn import Kind, Piece, Turn
from kimigguf.units import duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

    from kimigguf.cli.markdown_blocks import Block

_PER_SECOND: Final = 10.0
_SPARE_LINES: Final = 2
"""The live part of an answer leaves so many lines of the screen alone, or it could not be taken back."""


class Part(Protocol):
    """A place where one kind of text is shown as it comes."""

    def write(self, text: str) -> None:
        """Show some more."""

    def rest(self) -> None:
        """Show what is still open; something else is shown next."""


class Silent:
    """Shows nothing."""

    def write(self, text: str) -> None:
        pass

    def rest(self) -> None:
        pass


class PlainAnswer:
    """The text on stdout as it comes."""

    def __init__(self) -> None:
        self._open = False

    def write(self, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        self._open = True

    def rest(self) -> None:
        if self._open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open = False


class PlainThinking:
    """The thinking on stderr as it comes, dimmed."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._open = False

    def write(self, text: str) -> None:
        self._console.print(printable(text), style="dim", end="", markup=False, soft_wrap=True)
        self._open = True

    def rest(self) -> None:
        if self._open:
            self._console.print()
            self._open = False


class Rendered:
    """Markdown on a terminal: each block is printed once when it is finished, only the open one is live."""

    def __init__(self, console: "Console") -> None:
        from kimigguf.cli.markdown_blocks import Blocks
        from kimigguf.cli.markdown_drawing import THEME

        console.push_theme(THEME)
        self._console = console
        self._blocks = Blocks()
        self._live: Live | None = None
        self._lock = threading.Lock()
        """Held while something is written: what is printed above the live part must not meet its refresh."""
        self._done = threading.Event()
        self._blank = True
        """Whether the last line is empty, or there is none yet: empty lines are not piled up."""

    def write(self, text: str) -> None:
        from kimigguf.cli.markdown_blocks import feed

        with self._lock:
            self._blocks, done = feed(self._blocks, printable(text))
            for block in done:
                self._print(block)
        if self._live is None:
            self._begin()

    def rest(self) -> None:
        from kimigguf.cli.markdown_blocks import Blocks

        self._done.set()
        with self._lock:
            still = self._open()
            self._blocks = Blocks()
            if self._live is not None:
                self._live.stop()
                self._live = None
            for block in still:
                self._print(block)

    def _begin(self) -> None:
        """Keep the open block on the screen, whatever the pace at which text comes."""
        from rich.live import Live

        self._live = live = Live(
            get_renderable=lambda: _Tail(self._open()),
            console=self._console,
            transient=True,
            auto_refresh=False,  # rich's own thread does not wait for what is printed above
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._done = done = threading.Event()
        live.start()

        def refresh() -> None:
            shown = None
            while not done.wait(1 / _PER_SECOND):
                with self._lock:
                    if not done.is_set() and shown is not self._blocks:
                        shown = self._blocks
                        live.refresh()

        threading.Thread(target=refresh, daemon=True).start()

    def _open(self) -> "tuple[Block, ...]":
        from kimigguf.cli.markdown_blocks import finish

        return finish(self._blocks)

    def _print(self, block: "Block") -> None:
        from kimigguf.cli.markdown_blocks import BlockKind
        from kimigguf.cli.markdown_drawing import draw

        blank = block.kind is BlockKind.BLANK
        if blank and self._blank:
            return
        self._blank = blank
        # The terminal wraps code by itself, so that a copy of it has no line ends of ours.
        self._console.print(draw(block), soft_wrap=block.kind in {BlockKind.CODE, BlockKind.FENCE})


class _Tail:
    """The end of what is open, as much as the screen holds."""

    def __init__(self, blocks: "tuple[Block, ...]") -> None:
        self._blocks = blocks

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        from kimigguf.cli.markdown_drawing import draw

        room = max(1, console.size.height - _SPARE_LINES)
        # Printing a line of code above turns wrapping off for everything that is drawn with it.
        whole = options.update(height=None, no_wrap=False, overflow="fold")
        lines = [line for block in self._blocks for line in console.render_lines(draw(block), whole, pad=False)]
        for number, line in enumerate(lines[-room:]):
            if number:
                yield Segment.line()
            yield from line


class Status:
    """One live line on stderr for what has nothing to show yet: the prompt being read, thinking, a tool call."""

    def __init__(self, console: "Console", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._live: Live | None = None
        self.turn = Turn()

    def begin(self) -> None:
        if self._live is None:
            from rich.live import Live
            from rich.text import Text

            def line() -> Text:
                text = status_line(self.turn, self._clock() - self._began)
                return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

            self._live = Live(
                get_renderable=line,
                console=self._console,
                transient=True,
                refresh_per_second=_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class Folded:
    """Thinking as one live line, which ends as a summary."""

    def __init__(self, console: "Console", status: Status, *, hint: str) -> None:
        self._console = console
        self._status = status
        self._hint = hint
        self._open = False

    def write(self, text: str) -> None:
        self._open = self._open or bool(text)
        self._status.begin()

    def rest(self) -> None:
        self._status.end()
        if self._open:
            self._open = False
            text = thought_line(self._status.turn, self._hint)
            self._console.print(text, style="dim", markup=False, highlight=False)


def status_line(turn: Turn, seconds: float) -> str:
    """What is going on, in words, ``seconds`` after the question."""
    now = duration(max(1.0, seconds))
    if turn.calls:
        return f"calling {printable(turn.calls[-1].name)}… {_tokens(turn, turn.pieces)}, {now}"
    if turn.thinking:
        return f"thinking… {_tokens(turn, turn.thinking_pieces)}, {now}"
    if turn.progress is not None and turn.progress[0] < turn.progress[1]:
        return f"reading the prompt… {turn.progress[0]:,} of {turn.progress[1]:,} tokens, {now}"
    return f"waiting… {now}"


def thought_line(turn: Turn, hint: str) -> str:
    """The thinking of a turn, folded."""
    first, last = turn.first_seconds, turn.answer_seconds or turn.last_seconds
    took = f", {duration(max(0.1, last - first))}" if first is not None and last is not None else ""
    count = turn.thinking_pieces
    return f"thought: about {count:,} token{'' if count == 1 else 's'}{took}{hint}"


def _tokens(turn: Turn, pieces: int) -> str:
    """The server's own count where it sends one with each piece, else that of the pieces."""
    counted = (turn.timings or {}).get("predicted_n")
    count = counted if isinstance(counted, int) else pieces
    return f"{count:,} token{'' if count == 1 else 's'}"


class View:
    """One answer on its way to the reader. A context, so that no live line outlives it."""

    def __init__(self, *, answer: Part, thinking: Part, status: Status | None) -> None:
        self._parts = {Kind.ANSWER: answer, Kind.THINKING: thinking}
        self._current: Part | None = None
        self._status = status

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self._turn_to(None)
        if self._status is not None:
            self._status.end()

    def watch(self, turn: Turn, pieces: tuple[Piece, ...]) -> None:
        """Show what came."""
        if self._status is not None:
            self._status.turn = turn
        for piece in pieces:
            part = self._parts[piece.kind]
            self._turn_to(part)
            part.write(piece.text)
        if turn.calls and not pieces and self._status is not None:
            self._turn_to(None)
            self._status.begin()

    def _turn_to(self, part: Part | None) -> None:
        if part is self._current:
            return
        if self._current is not None:
            self._current.rest()
        elif self._status is not None and part is self._parts[Kind.ANSWER]:
            self._status.end()
        self._current = part


def view(show: Show, *, plain: bool, hint: str = "") -> View:
    """The view that suits where the output goes. ``hint`` says how the folded thinking can be seen."""
    out, err = show.out, show.err
    human = show.mode is Mode.HUMAN
    folds = human and not plain and err.is_terminal and not err.is_dumb_terminal
    renders = human and not plain and out.is_terminal and not out.is_dumb_terminal
    status = Status(err) if folds else None
    thinking: Part = Silent()
    if human:
        thinking = Folded(err, status, hint=hint) if status is not None else PlainThinking(err)
    answer: Part = Silent() if show.mode is Mode.JSON else Rendered(out) if renders else PlainAnswer()
    return View(answer=answer, thinking=thinking, status=status)
