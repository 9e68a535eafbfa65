"""``kimigguf serve``: from a quant's name to an endpoint that answers, and back to nothing on Ctrl-C."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.session import Request, Session


@click.command("serve", short_help="Serve a quant on an OpenAI-compatible endpoint.")
@click.argument("target", metavar="QUANT|PATH", required=False)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Replay a plan written by `kimigguf plan --json`, exactly.",
)
@click.option("--engine", default="auto", show_default=True, help="auto, llama-server, embedded or llama-cpp-python.")
@click.option("--engine-path", type=click.Path(path_type=Path), help="A llama-server or llama, or their folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; any but loopback needs a key.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(1, 65535), help="Port.")
@click.option("--context", "context_tokens", type=int, help="Tokens of context, over all slots.  [default: 32768]")
@click.option("--slots", default=1, show_default=True, type=click.IntRange(1, 64), help="Requests at the same time.")
@click.option("--effort", metavar="LEVEL", help="Default thinking effort: low, high or max.")
@click.option("--agent", is_flag=True, help="Sampling for agents (top_p 1.0).")
@click.option("--alias", help="The model's name for clients.  [default: kimi-k3]")
@click.option("--models-dir", type=click.Path(path_type=Path), help="Where quants lie.")
@click.option("--no-download", is_flag=True, help="Use only what is on this machine.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file of API keys, one a line.")
@output_options
@click.pass_obj
def command(app: App, /, **options: Any) -> int:  # noqa: ANN401 -- click's parsed options, typed again in Request
    """Serve QUANT (by name) or the GGUF files at PATH: fetched, verified, planned, started, watched, stopped.

    Prints how to reach it once it is ready, then runs until Ctrl-C (exit code 130) or until the engine dies (6).
    A set that was verified before and has not been touched since is not hashed again.

    \b
    Example:
      kimigguf serve UD-IQ1_M
      kimigguf serve /models/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf --port 9000
      kimigguf plan UD-IQ1_M --json > plan.json; kimigguf serve --plan plan.json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.session import open_session
    from kimigguf.placement.place import Shortfall

    request = _request(options)
    if hasattr(signal, "SIGHUP"):
        # A closed terminal is a Ctrl-C: the same clean-up runs.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
    with app.show.progress() as listen:
        opened = open_session(request, app.environ, listen)
        if isinstance(opened, Shortfall):
            return _does_not_fit(app, opened)
        with opened as session:
            session.wait_ready(listen)
            app.show.answer(_record(session), lambda console: _show_ready(console, session))
            session.server.wait()
    return ExitCode.DONE


def _request(options: dict[str, Any]) -> "Request":
    from kimigguf.engines.session import Request

    plan_path, target = options["plan_path"], options["target"]
    if (plan_path is None) == (target is None):
        raise UsageError(
            "name what to serve: a quant, a path, or a plan with --plan",
            code="nothing-to-serve" if target is None else "plan-and-target",
            hint="kimigguf serve UD-IQ1_M; kimigguf recommend says which quant fits this machine",
        )
    if plan_path is not None and options["context_tokens"] is not None:
        raise UsageError(
            "a plan is replayed as it is; --context would make it another",
            code="plan-and-settings",
            hint="make the plan with the context you want: kimigguf plan QUANT --context N --json > plan.json",
        )
    return Request(**options)


def _record(session: "Session") -> dict[str, Any]:
    server, plan, engine = session.server, session.plan, session.engine
    return {
        "schema": "kimigguf.serve/1",
        "state": str(server.state),
        "url": server.address.url,
        "base_url": f"{server.address.url}/v1",
        "model": server.alias,
        "pid": server.pid,
        "engine": {"kind": str(engine.kind), "path": engine.path, "version": engine.version, "build": engine.build},
        "quant": plan.model.quant,
        "folder": plan.model.folder,
        "context_tokens": plan.settings.context_tokens,
        "slots": plan.settings.slots,
        "load_seconds": round(session.load_seconds, 3),
        "log": str(server.log),
        "plan_file": str(session.plan_file),
        "command": list(session.command.argv),
        "gave_way": list(plan.gave_way),
    }


def _show_ready(console: "Console", session: "Session") -> None:
    from kimigguf.units import duration

    server, settings = session.server, session.plan.settings
    url, key = server.address.url, session.needs_key
    header = ' -H "Authorization: Bearer $KEY"' if key else ""
    context = settings.context_tokens if settings.unified_cache else settings.context_tokens // settings.slots
    lines = (
        f"ready after {duration(session.load_seconds)}: {server.alias} on {session.engine.version}",
        "",
        f"  base URL   {url}/v1",
        f"  context    {context:,} tokens in each of {settings.slots} slot(s)",
        f"  log        {server.log}",
        "",
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\",
        f"""    -d '{{"model":"{server.alias}","messages":[{{"role":"user","content":"Hello"}}]}}'""",
        "",
        *(f"  {line}" for line in _snippet(f"{url}/v1", server.alias, needs_key=key)),
        "",
        f"  from a laptop: ssh -N -L {server.address.port}:127.0.0.1:{server.address.port} THIS-MACHINE",
        f"  in a terminal: kimigguf chat --url {url}",
        "",
        "Ctrl-C stops it.",
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _snippet(base_url: str, model: str, *, needs_key: bool) -> tuple[str, ...]:
    """A client that keeps the whole assistant message: K3 expects its reasoning and tool calls back."""
    key = 'os.environ["KEY"]' if needs_key else '"none"'
    return (
        *(("import os",) if needs_key else ()),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{base_url}", api_key={key})',
        'messages = [{"role": "user", "content": "Hello"}]',
        f'reply = client.chat.completions.create(model="{model}", messages=messages).choices[0].message',
        "messages.append(reply.model_dump(exclude_none=True))  # with reasoning_content and tool_calls",
        'messages.append({"role": "user", "content": "And now?"})',
    )


def _does_not_fit(app: App, shortfall: Any) -> int:  # noqa: ANN401 -- placement's Shortfall, imported only when met
    from kimigguf.units import memory

    data = {
        "schema": "kimigguf.serve/1",
        "state": "does-not-fit",
        "need_bytes": shortfall.need_bytes,
        "have_bytes": shortfall.have_bytes,
        "missing_bytes": shortfall.missing_bytes,
        "reason": shortfall.reason,
        "gave_way": list(shortfall.gave_way),
    }

    def human(console: "Console") -> None:
        console.print(f"it does not fit: {shortfall.reason}", markup=False)
        console.print(f"{memory(shortfall.missing_bytes)} of RAM are missing", markup=False)
        console.print("kimigguf recommend says which quant fits this machine", markup=False)

    app.show.answer(data, human)
    return ExitCode.ANSWERED_NO
