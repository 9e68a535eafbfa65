"""The conversation loop of ``kimigguf chat``: reads a line, does what it means, shows the answer."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimigguf.cli import chat_commands
from kimigguf.cli.app import App
from kimigguf.cli.chat_commands import Command, Name, Say, Unknown
from kimigguf.cli.chat_prompt import Pressed, Reader, Stops
from kimigguf.cli.chat_remarks import call_lines, figures, warnings
from kimigguf.cli.chat_view import view
from kimigguf.cli.show import Mode
from kimigguf.engines.endpoint import Limits
from kimigguf.engines.printable import printable
from kimigguf.engines.talk import Talk, beginning, open_calls, save_talk, saved, with_result, without_last_answer
from kimigguf.engines.turn import Turn
from kimigguf.errors import KimiggufError, UsageError
from kimigguf.home import from_home

if TYPE_CHECKING:
    from kimigguf.engines.conversation import Conversation, Watch


class Chat:
    """A conversation and how it is shown; ``template_arguments`` turns a thinking effort into what is sent."""

    def __init__(
        self,
        app: App,
        conversation: "Conversation",
        *,
        limits: Limits,
        plain: bool,
        template_arguments: Callable[[str | None], Mapping[str, str]],
        effort: str | None = None,
        resumed: Path | None = None,
    ) -> None:
        self._app = app
        self._conversation = conversation
        self._limits = limits
        self._plain = plain
        self._template_arguments = template_arguments
        self._effort = effort
        self._begin = beginning(conversation.talk)
        self._file = resumed
        self._thinking = ""
        self._stops: Stops | None = None
        self._talks = False
        """Whether there is a next turn."""
        self._stopped = False
        """Whether Ctrl-C was the last key: another one ends."""

    def once(self, text: str) -> None:
        """Ask one question; Ctrl-C ends the program."""
        if not text.strip():
            raise UsageError("there is nothing to ask", code="no-prompt", hint='kimigguf chat "Hello"')
        turn = self._shown(lambda watch: self._conversation.say(text, watch))
        if turn.cut:
            raise KeyboardInterrupt

    def loop(self, read: Reader, stops: Stops | None) -> None:
        """Talk until the end of input, ``/quit``, or Ctrl-C twice. ``stops`` is there if somebody sits at the keyboard.

        Raises:
            NetworkError, ServerError, UsageError: An answer failed, and nobody sits there who could go on.
        """
        self._stops, self._talks = stops, True
        while True:
            try:
                line = read(self._prompt())
            except EOFError:
                return
            except Pressed:
                if self._stopped:
                    return
                self._stopped = True
                self._note("Ctrl-C again, Ctrl-D or /quit ends")
                continue
            self._stopped = False
            match chat_commands.meaning(line):
                case Command(name=Name.QUIT):
                    return
                case Command() as command:
                    self._guarded(lambda command=command: self._obey(command))  # type: ignore[misc]  # bound now, on purpose
                case Unknown() as unknown:
                    meant = f"did you mean {unknown.nearest}?" if unknown.nearest else "/help lists them"
                    self._note(f"there is no command {unknown.word}; {meant}")
                case Say(text=text):
                    self._guarded(lambda text=text: self._said(text))  # type: ignore[misc]  # bound now, on purpose
                case None:
                    pass

    def _prompt(self) -> str:
        calls = open_calls(self._conversation.talk)
        return f"result of {printable(calls[0]['function']['name'])}> " if calls else "> "

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do it; at a terminal a failure is told, and the talk goes on."""
        try:
            act()
        except KimiggufError as error:
            if self._stops is None:
                raise
            self._app.show.error(error)
            if self._conversation.failed is not None or self._conversation.talk.waits_for_an_answer:
                self._note("(the talk is as it was before; /retry asks again)")

    def _said(self, text: str) -> None:
        if open_calls(self._conversation.talk):
            self._result(text)
        else:
            self._turn(lambda watch: self._conversation.say(text, watch))

    def _result(self, text: str | None) -> None:
        """Give a tool call its result; after the last one the assistant goes on."""
        conversation = self._conversation
        conversation.talk = with_result(conversation.talk, text)
        if conversation.talk.waits_for_an_answer:
            self._turn(conversation.go_on)
        else:
            self._tell_open_call()

    def _obey(self, command: Command) -> None:
        match command.name:
            case Name.RETRY:
                self._retry()
            case Name.NEW:
                self._conversation.talk, self._conversation.failed = self._begin, None
                self._file = None
                self._note("everything is forgotten")
            case Name.EFFORT:
                self._set_effort(command.rest)
            case Name.THINK:
                self._think()
            case Name.SAVE:
                self._save(command.rest)
            case Name.DECLINE if open_calls(self._conversation.talk):
                self._result(None)
            case Name.DECLINE:
                self._note("there is no tool call to decline")
            case _:
                for line in chat_commands.help_lines():
                    self._note(line)

    def _retry(self) -> None:
        conversation = self._conversation
        if (question := conversation.failed) is not None:
            self._turn(lambda watch: conversation.say(question, watch))
        elif conversation.talk.waits_for_an_answer:
            self._turn(conversation.go_on)
        elif (shorter := without_last_answer(conversation.talk)) is None:
            self._note("nothing was asked yet")
        else:
            before, conversation.talk = conversation.talk, shorter
            try:
                turn = self._turn(conversation.go_on)
            except BaseException:
                conversation.talk = before
                raise
            if turn.is_empty:
                conversation.talk = before

    def _set_effort(self, level: str) -> None:
        if level:
            self._conversation.template_arguments = dict(self._template_arguments(level))
            self._effort = level
        self._note(f"effort: {self._effort or 'as the server has it'}")

    def _think(self) -> None:
        if self._thinking:
            self._app.show.err.print(printable(self._thinking).strip(), style="dim", markup=False)
        else:
            self._note("there was no thinking yet")

    def _save(self, name: str) -> None:
        path = from_home(name) if name else self._file
        if path is None:
            raise UsageError("/save needs the name of a file", code="no-file", hint="/save talk.json")
        conversation = self._conversation
        talk = saved(conversation.talk, model=conversation.model, effort=self._effort, tools=conversation.tools)
        # What this talk was read from or saved to is its own.
        save_talk(talk, path, overwrite=self._file is not None and path.absolute() == self._file.absolute())
        self._file = path
        self._app.show.note(f"saved to {path}; it goes on with: kimigguf chat --resume {shlex.quote(str(path))}")

    def _turn(self, answer: "Callable[[Watch], Turn]") -> Turn:
        """One answer within the loop."""
        with contextlib.nullcontext() if self._stops is None else self._stops.answering():
            turn = self._shown(answer)
        if turn.cut and not (self._stops is not None and self._stops.pressed):
            raise KeyboardInterrupt  # nobody sits there, or another signal: whoever sent it wants an end
        if turn.cut:
            self._stopped = True
            kept = "this turn is forgotten" if turn.is_empty else "what came is kept"
            self._note(f"(stopped; {kept}; /retry asks again, Ctrl-C ends)")
        return turn

    def _shown(self, answer: "Callable[[Watch], Turn]") -> Turn:
        """Show an answer as it comes, then what is to be said about it."""
        show = self._app.show
        with view(show, plain=self._plain, hint=" (/think shows it)" if self._stops is not None else "") as shown:
            turn = answer(shown.watch)
        self._thinking = turn.thinking or self._thinking
        if show.mode is Mode.JSON:
            if not turn.cut:
                show.answer(_record(turn), lambda _console: None)
            return turn
        for call in turn.message.get("tool_calls", ()):
            for line in call_lines(call):
                show.note(line)
        most = self._conversation.max_tokens
        for warning in warnings(turn, self._limits, max_tokens=most, effort=self._effort, talks=self._talks):
            self._note(f"warning: {warning}", style="none")
        if (said := figures(turn, self._limits)) is not None:
            self._note(said)
        self._tell_open_call()
        return turn

    def _tell_open_call(self) -> None:
        calls = open_calls(self._conversation.talk)
        if calls and self._stops is not None:
            more = f" ({len(calls)} calls are open)" if len(calls) > 1 else ""
            self._note(f"type what {printable(calls[0]['function']['name'])} returns, or /decline{more}")

    def _note(self, text: str, *, style: str = "dim") -> None:
        """One line on stderr, unless quiet."""
        if self._app.show.mode is not Mode.QUIET:
            self._app.show.err.print(text, style=style, markup=False)


def _record(turn: Turn) -> dict[str, Any]:
    return {
        "schema": "kimigguf.chat/1",
        "message": turn.message,
        "finish_reason": turn.finish_reason,
        "usage": turn.usage or None,
        "timings": turn.timings or None,
    }


def begin(url: str, talk: Talk, limits: Limits) -> str:
    """The line that a talk begins with."""
    room = f", context {limits.context_tokens:,} tokens" if limits.context_tokens else ""
    took = f", {talk.questions} question{'' if talk.questions == 1 else 's'} taken up" if talk.questions else ""
    return f"talking to {url.rstrip('/')}{room}{took}; try /help"


def at_terminal() -> bool:
    """Whether a person types."""
    return sys.stdin.isatty()
