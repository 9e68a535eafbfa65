"""``kimigguf chat``: one question or a conversation with any OpenAI-compatible server."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import Mode, output_options
from kimigguf.errors import KimiggufError, UsageError

if TYPE_CHECKING:
    from openai import OpenAI

    from kimigguf.cli.chat_talk import Chat
    from kimigguf.engines.talk import SavedTalk

_NAMED: Final = 4
"""So many models are listed in a warning before the rest is counted."""


@click.command("chat", short_help="Talk to a running server.")
@click.argument("prompt", required=False)
@click.option(
    "--url", help="The server's address, :8081 on this machine.  [default: the server that runs here, else port 8080]"
)
@click.option("--name", help="Which of the servers that run here; not needed where one does.")
@click.option("--model", help="Which of the server's models; its first one by default.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--effort", metavar="LEVEL", help="How much to think: low, high or max; the server's own by default.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="At most this many tokens, thinking included.")
@click.option(
    "--tools",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A JSON list of tools that may be called; you type what they return.",
)
@click.option("--resume", type=click.Path(path_type=Path), metavar="FILE", help="Go on with a talk that /save saved.")
@click.option("--plain", is_flag=True, help="Print text and thinking as they come, also on a terminal.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="A file that holds the API key; KIMIGGUF_API_KEY holds the key itself.",
)
@output_options
@click.pass_obj
def command(app: App, /, *, prompt: str | None, **options: Any) -> int | None:  # noqa: ANN401 -- click's values, see above
    """Ask PROMPT (- is all of stdin) and print the answer; without PROMPT, talk.

    On a terminal the answer is drawn as Markdown while it comes, and the thinking is folded into one line. Elsewhere
    the text goes to stdout as it comes and the thinking to stderr. The whole assistant message, with its thinking and
    tool calls, goes back to the server in later turns, as Kimi K3 expects.

    \b
    Example:
      kimigguf chat
      kimigguf chat "Why is the sky blue?"
      kimigguf chat --name kimi-k3-8081
      git diff | kimigguf chat - --effort low --url http://127.0.0.1:8080
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli.chat_prompt import forgiving_streams
    from kimigguf.engines.endpoint import base_url, connect, sent_in_the_clear
    from kimigguf.engines.registry import certificate_at
    from kimigguf.engines.session import servers_folder
    from kimigguf.engines.talk import load_talk

    forgiving_streams()
    url, key_file = options["url"], options["api_key_file"]
    if url is None:
        url, own_key_file = _running(app, options["name"])
        key_file = key_file or own_key_file
    elif options["name"] is not None:
        raise UsageError("give either --name or --url", code="name-and-url")
    resumed = None if options["resume"] is None else load_talk(options["resume"])
    certificate = certificate_at(servers_folder(app.environ), base_url(url))
    key = _key(app, key_file)
    if warning := sent_in_the_clear(url, key):
        app.show.note(warning)
    with connect(url, api_key=key, certificate=certificate) as client:
        chat = _chat(app, client, options, resumed, talks=prompt is None)
        if prompt is None:
            _talk(app, chat)
        else:
            chat.once(sys.stdin.read() if prompt == "-" else prompt)
    return None


def _chat(
    app: App, client: "OpenAI", options: Mapping[str, Any], resumed: "SavedTalk | None", *, talks: bool
) -> "Chat":
    """The conversation as the options have it, its server asked for its models and limits."""
    from kimigguf.cli.chat_talk import Chat, at_terminal, begin
    from kimigguf.engines.conversation import Conversation
    from kimigguf.engines.endpoint import Limits, limits
    from kimigguf.engines.talk import load_tools, new_talk

    if resumed and options["system"]:
        hint = f"kimigguf chat --resume {shlex.quote(str(options['resume']))}"
        raise UsageError("a talk that is resumed has begun with its own --system", code="usage", hint=hint)
    effort = options["effort"] or (resumed.effort if resumed else None)
    sent = _template_arguments(effort)
    tools = resumed.tools if resumed else ()
    if options["tools"] is not None:
        tools = tuple(map(dict, load_tools(options["tools"])))
    entry = _model(app, client, options["model"])
    known = limits(client, entry) if app.show.mode is Mode.HUMAN else Limits()
    conversation = Conversation(
        client,
        entry["id"],
        talk=resumed.talk if resumed else new_talk(options["system"]),
        tools=tools,
        template_arguments=sent,
        max_tokens=options["max_tokens"],
        live_figures=known.is_llama_server,
    )
    if talks and at_terminal():
        app.show.note(begin(conversation.url, conversation.talk, known))
    return Chat(
        app,
        conversation,
        limits=known,
        plain=options["plain"],
        template_arguments=_template_arguments,
        effort=effort,
        resumed=options["resume"],
    )


def _talk(app: App, chat: "Chat") -> None:
    """Read lines from a terminal, with editing and history, or from whatever stdin is."""
    from kimigguf.cli.chat_commands import words
    from kimigguf.cli.chat_prompt import at_the_keyboard, plain_reader, terminal_reader
    from kimigguf.cli.chat_talk import at_terminal
    from kimigguf.engines.session import state_folder

    if at_terminal():
        with at_the_keyboard() as stops:
            chat.loop(terminal_reader(state_folder(app.environ) / "chat-history", words()), stops)
    else:
        chat.loop(plain_reader, None)


def _model(app: App, client: "OpenAI", model: str | None) -> Mapping[str, Any]:
    """The model's entry in the server's list, the first one if none is named.

    One that was named and is not there is warned of, since llama-server answers to any name.

    Raises:
        NetworkError, ServerError: As ``listed_models`` has it, but a named model needs no list.
    """
    from kimigguf.engines.endpoint import first_model, listed_models

    if model is None:
        return first_model(client)
    try:
        listed = listed_models(client)
    except KimiggufError as error:
        if error.code != "http-error":
            raise
        return {"id": model}
    names = [entry["id"] for entry in listed]
    if names and model not in names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        app.show.note(
            f"warning: {client.base_url} lists no model {model!r}, only {', '.join(names[:_NAMED])}{more}; "
            "whatever answers may be another"
        )
    return next((entry for entry in listed if entry["id"] == model), {"id": model})


def _running(app: App, name: str | None) -> tuple[str, Path | None]:
    """Address and key file of the server of that name, or of the only one; the default address where none runs.

    Raises:
        UsageError: ``which-server`` where there are several, ``no-server`` where none has the name.
    """
    from kimigguf.engines.registry import entries, find
    from kimigguf.engines.session import servers_folder

    folder = servers_folder(app.environ)
    if name is None and not entries(folder):
        return "http://127.0.0.1:8080", None
    entry = find(folder, name)
    return entry.address.url, Path(entry.api_key_file) if entry.api_key_file else None


def _key(app: App, file: Path | None) -> str | None:
    from kimigguf.engines.keys import read_keys

    return app.environ.get("KIMIGGUF_API_KEY") if file is None else read_keys(file)[0]


def _template_arguments(effort: str | None) -> dict[str, str]:
    """The effort in every spelling that a template may read.

    Raises:
        UsageError: ``unknown-effort``.
    """
    from kimigguf.engines.serving import DEFAULT, chat_template_arguments, load_serving

    return {} if effort is None else chat_template_arguments(load_serving(DEFAULT), effort)
