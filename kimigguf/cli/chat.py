"""``kimigguf chat``: one question or a conversation with any OpenAI-compatible server."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import Mode, output_options
from kimigguf.errors import KimiggufError, UsageError

if TYPE_CHECKING:
    from openai import OpenAI

    from kimigguf.engines.conversation import Conversation, Piece, Reply

_NAMED: Final = 4
"""So many models are listed in a warning before the rest is counted."""
_HELP: Final = "/retry  ask again   /new  forget everything   /effort low|high|max   /save FILE   /quit"


@click.command("chat", short_help="Talk to a running server.")
@click.argument("prompt", required=False)
@click.option(
    "--url", help="The server's address, :8081 on this machine.  [default: the server that runs here, else port 8080]"
)
@click.option("--model", help="Which of the server's models; its first one by default.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--effort", metavar="LEVEL", help="How much to think: low, high or max; the server's own by default.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="At most this many tokens, thinking included.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="A file that holds the API key; KIMIGGUF_API_KEY holds the key itself.",
)
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    prompt: str | None,
    url: str | None,
    model: str | None,
    system: str | None,
    effort: str | None,
    max_tokens: int | None,
    api_key_file: Path | None,
) -> int | None:
    """Ask PROMPT (``-``: all of stdin) and print the answer; without PROMPT, talk: each line is a turn.

    The thinking is shown dimmed on stderr, the answer goes to stdout. The whole assistant message, with its thinking
    and tool calls, goes back to the server in later turns, as Kimi K3 expects.

    \b
    Example:
      kimigguf chat "Why is the sky blue?"
      git diff | kimigguf chat - --effort low --url http://127.0.0.1:8080
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.conversation import Conversation, connect, first_model

    if url is None:
        url, own_key_file = _running(app)
        api_key_file = api_key_file or own_key_file
    with connect(url, api_key=_key(app, api_key_file)) as client:
        conversation = Conversation(
            client,
            first_model(client) if model is None else _known(app, client, model),
            system=system,
            extra_body=_effort_body(effort),
            max_tokens=max_tokens,
        )
        if prompt is None:
            _talk(app, conversation)
        else:
            _ask_once(app, conversation, sys.stdin.read() if prompt == "-" else prompt)
    return None


def _known(app: App, client: "OpenAI", model: str) -> str:
    """The model as it was named, with a warning if the server lists others: llama-server answers to any name.

    Raises:
        NetworkError, ServerError: As ``model_names`` has it, but for a server that lists nothing.
    """
    from kimigguf.engines.conversation import model_names

    try:
        names = model_names(client)
    except KimiggufError as error:
        if error.code != "http-error":
            raise
        return model
    if names and model not in names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        app.show.note(
            f"warning: {client.base_url} lists no model {model!r}, only {', '.join(names[:_NAMED])}{more}; "
            "whatever answers may be another"
        )
    return model


def _running(app: App) -> tuple[str, Path | None]:
    """Address and key file of the one server that this user runs; the default address where there is none.

    Raises:
        UsageError: ``which-server`` where there are several.
    """
    from kimigguf.engines.registry import entries, find
    from kimigguf.engines.session import servers_folder

    folder = servers_folder(app.environ)
    if not entries(folder):
        return "http://127.0.0.1:8080", None
    entry = find(folder, None)
    return entry.address.url, Path(entry.api_key_file) if entry.api_key_file else None


def _key(app: App, file: Path | None) -> str | None:
    from kimigguf.engines.keys import read_keys

    return app.environ.get("KIMIGGUF_API_KEY") if file is None else read_keys(file)[0]


def _effort_body(effort: str | None) -> dict[str, Any]:
    """The effort in every spelling that a template may read."""
    from kimigguf.engines.serving import DEFAULT, chat_template_arguments, load_serving

    if effort is None:
        return {}
    return {"chat_template_kwargs": chat_template_arguments(load_serving(DEFAULT), effort)}


def _ask_once(app: App, conversation: "Conversation", text: str) -> None:
    if not text.strip():
        raise UsageError("there is nothing to ask", code="no-prompt", hint='kimigguf chat "Hello"')
    writer = _Writer(app, streaming=app.show.mode is not Mode.JSON)
    reply = conversation.ask(text, writer.write)
    writer.finish()
    if app.show.mode is Mode.JSON:
        data = {
            "schema": "kimigguf.chat/1",
            "message": dict(reply.message),
            "finish_reason": reply.finish_reason,
            "usage": reply.usage,
            "timings": reply.timings,
        }
        app.show.answer(data, lambda _console: None)
    _remark(app, reply)


def _talk(app: App, conversation: "Conversation") -> None:
    """Read a line, answer it, until the end of input. Ctrl-C stops an answer; at the prompt it ends the talk."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        app.show.note(f"talking to {conversation.url}; /help lists the commands, Ctrl-D ends")
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            return
        if line in {"/quit", "/exit"}:
            return
        question: str | None = line
        if line.startswith("/"):
            question = _obey(app, conversation, line)
        if not question:
            continue
        writer = _Writer(app, streaming=True)
        try:
            reply = conversation.ask(question, writer.write)
        except KeyboardInterrupt:
            writer.finish()
            app.show.note("(stopped; this turn is forgotten)")
            continue
        except KimiggufError as error:
            writer.finish()
            if not at_terminal:
                raise
            app.show.error(error)
            continue
        writer.finish()
        _remark(app, reply)


def _obey(app: App, conversation: "Conversation", line: str) -> str | None:
    """Carry out a command; returns a question to ask, if it leads to one."""
    name, _, rest = line.partition(" ")
    match name, rest.strip():
        case "/retry", _:
            return conversation.undo()
        case "/new", _:
            conversation.clear()
        case "/effort", level:
            try:
                conversation.extra_body.update(_effort_body(level))
            except UsageError as error:
                app.show.error(error)
        case "/save", name if name:
            try:
                Path(name).write_text(json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n")
            except OSError as error:
                app.show.note(f"cannot write {name}: {error.strerror}")
        case _:
            app.show.note(_HELP)
    return None


def _remark(app: App, reply: "Reply") -> None:
    """What a reader should know beside the text: tool calls, an answer cut short, the speed."""
    for call in reply.message.get("tool_calls", ()):
        app.show.note(f"calls {call['function']['name']}({call['function']['arguments']})")
    if reply.used_up_by_thinking:
        app.show.note("thinking used up all tokens before an answer began: allow more, or think less (--effort low)")
    elif reply.finish_reason == "length":
        app.show.note("the answer stops at the token limit")
    if reply.timings and (speed := reply.timings.get("predicted_per_second")):
        app.show.note(f"({reply.timings.get('predicted_n')} tokens, {speed:.1f} tokens/s)")


class _Writer:
    """Writes an answer as it arrives: thinking dimmed on stderr, the answer on stdout."""

    def __init__(self, app: App, *, streaming: bool) -> None:
        self._streaming = streaming
        self._thinking = app.show.err if app.show.mode is Mode.HUMAN else None
        self._last = ""

    def write(self, piece: "Piece") -> None:
        from kimigguf.engines.conversation import Kind

        if not self._streaming:
            return
        text = printable(piece.text)
        if piece.kind is Kind.THINKING:
            if self._thinking is not None:
                self._thinking.print(text, style="dim", end="", markup=False, soft_wrap=True)
                self._last = "thinking"
            return
        if self._last == "thinking" and self._thinking is not None:
            self._thinking.print()
        self._last = "answer"
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        if self._last == "answer":
            sys.stdout.write("\n")
            sys.stdout.flush()
        elif self._last == "thinking" and self._thinking is not None:
            self._thinking.print()


def printable(text: str) -> str:
    """The text without characters by which it could command a terminal; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
