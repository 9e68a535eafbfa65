"""A terminal of its own for a program: a real pty below, an emulator above, so that tests see what a person sees."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

import pyte

_HISTORY = 5000


class _Screen(pyte.HistoryScreen):
    """Answers the program's questions, as terminals do; otherwise prompt_toolkit waits for them."""

    terminal: "Terminal"

    def write_process_input(self, data: str) -> None:
        self.terminal.send(data)


class Terminal:
    """``kimigguf`` on a terminal of ``columns`` x ``lines``; ``raw`` is all that it wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int, columns: int, lines: int) -> None:
        self.process = process
        self.raw = b""
        self._master = master
        self._screen = _Screen(columns, lines, history=_HISTORY, ratio=0.5)
        self._screen.terminal = self
        self._stream = pyte.ByteStream(self._screen)

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, text: str) -> None:
        self.send(text + "\r")

    @property
    def lines(self) -> list[str]:
        """Everything that was ever shown, what scrolled away first; without blanks at the end of a line."""
        above = ["".join(row[x].data for x in range(self._screen.columns)) for row in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def pump(self, seconds: float = 0.05) -> bool:
        """Take what the program writes within so many seconds; False when it is gone."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, wanted: str, *, times: int = 1, seconds: float = 60.0) -> str:
        """Wait until the text is on the screen, or was; returns all that was shown."""
        end, seen, alive = time.monotonic() + seconds, -1, True
        while time.monotonic() < end and alive:
            if len(self.raw) != seen and self.text.count(wanted) >= times:
                return self.text
            seen = len(self.raw)
            alive = self.pump()
        raise AssertionError(f"{wanted!r} did not show up {times} times within {seconds} s in:\n{self.text}")

    def prompt(self, times: int) -> str:
        """Wait for the prompt to be there so often."""
        return self.until("\n>", times=times)

    def gone(self, unwanted: str, *, seconds: float = 60.0) -> None:
        """Wait until the text is no longer there."""
        end = time.monotonic() + seconds
        while unwanted in self.text and time.monotonic() < end:
            self.pump()
        assert unwanted not in self.text

    def ended(self, seconds: float = 60.0) -> int:
        """Wait for the program's end; returns its exit code."""
        end = time.monotonic() + seconds
        while self.pump() and time.monotonic() < end:
            pass
        return self.process.wait(max(0.1, end - time.monotonic()))

    @property
    def echoes(self) -> bool:
        """Whether typed keys are shown by the terminal itself."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)


@contextlib.contextmanager
def terminal(
    argv: Sequence[str], environ: Mapping[str, str], *, columns: int = 80, lines: int = 24, stdout: int | None = None
) -> Iterator[Terminal]:
    """Run ``kimigguf`` with these arguments at a terminal; it is ended with the block. ``stdout`` may go elsewhere."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-c", "from kimigguf.cli.app import main; main()", *argv],
        stdin=slave,
        stdout=slave if stdout is None else stdout,
        stderr=slave,
        env=environment | {"TERM": "xterm-256color"} | dict(environ),
        preexec_fn=own_terminal,  # noqa: PLW1509 -- no threads hold locks at this point
    )
    os.close(slave)
    try:
        yield Terminal(process, master, columns, lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(master)
