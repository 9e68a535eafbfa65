"""``kimigguf serve``: from a quant's name to an endpoint that answers, and back to nothing on Ctrl-C."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from kimigguf.cli.app import App
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kimigguf.engines.diagnose import EngineDiedError
    from kimigguf.engines.request import Request
    from kimigguf.engines.session import Prepared
    from kimigguf.engines.watchdog import Restarts

_PLAN_OWNS: Final[Mapping[str, str]] = {
    "context_tokens": "--context",
    "slots": "--slots",
    "models_dir": "--models-dir",
    "no_download": "--no-download",
}
"""Options that decide what a plan has decided: with how much context, for how many, from which files."""


@click.command("serve", short_help="Serve a quant on an OpenAI-compatible endpoint.")
@click.argument("target", metavar="QUANT|PATH", required=False)
@click.argument("extra", metavar="[-- ENGINE ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
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
@click.option("--slots", default=1, show_default=True, type=click.IntRange(1, 256), help="Requests at the same time.")
@click.option("--effort", metavar="LEVEL", help="Default thinking effort: low, high or max.")
@click.option("--agent", is_flag=True, help="Sampling for agents (top_p 1.0).")
@click.option("--alias", help="The model's name for clients.  [default: kimi-k3, or as its file calls it]")
@models_option
@click.option("--no-download", is_flag=True, help="Use only what is on this machine.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file of API keys, one a line.")
@click.option("--new-api-key", is_flag=True, help="Make a key, show it once, keep it in a file of your own.")
@click.option(
    "--ollama-api",
    is_flag=True,
    help="Answer Ollama's clients too, on loopback, at Ollama's own port; needs the extra ollama-bridge.",
)
@click.option(
    "--ollama-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The same at another port; says --ollama-api by itself.  [default: 11434]",
)
@click.option("--prefault", is_flag=True, help="Read the files ahead in order; faster where they are not cached.")
@click.option("--no-selftest", is_flag=True, help="Say ready as soon as the model is loaded.")
@click.option(
    "--stall-timeout",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Say so when a load has not advanced for this long. It is never stopped for that.",
)
@click.option(
    "--restart",
    type=click.Choice(["never", "on-failure"]),
    default="never",
    show_default=True,
    help="Start a dead engine again where its cause can pass; what must fail again is never retried.",
)
@click.option("--name", help="How status, logs and stop call it.  [default: the alias and the port]")
@click.option("--detach", is_flag=True, help="Come back when it is ready; it serves on without this terminal.")
@click.option("--explain", is_flag=True, help="Show every setting an engine is given, with its reason, and stop.")
@click.option(
    "--dry-run", is_flag=True, help="Stop before the start; show the checks and the command. Fetches headers at most."
)
@output_options
@click.pass_obj
def command(app: App, /, **options: Any) -> int:  # noqa: ANN401 -- click's parsed options, typed again in Request
    """Serve QUANT (by name) or the GGUF files at PATH: planned, fetched, verified, started, watched, stopped.

    Prints how to reach it once it is ready, then runs until Ctrl-C (exit code 130) or until the engine dies (6).
    A set that was verified before and has not been touched since is not hashed again.

    \b
    Example:
      kimigguf serve UD-IQ1_M
      kimigguf serve /models/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf --port 9000
      kimigguf download UD-IQ1_M
      kimigguf plan UD-IQ1_M --json > plan.json && kimigguf serve --plan plan.json
      kimigguf serve UD-IQ1_M --ollama-api
      kimigguf serve UD-IQ1_M --detach -- --threads 64 --numa distribute
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli.serve_settings import show_settings
    from kimigguf.cli.serve_show import serve_detached
    from kimigguf.engines.naming import with_alias
    from kimigguf.engines.session import named

    if options.pop("explain"):
        return show_settings(app.show, app.environ)
    detach = options.pop("detach")
    request = with_alias(_request(options), app.environ)
    if detach:
        return serve_detached(app, request)
    with named(request, app.environ) as name:
        return _serve(app, request, name)


def _serve(app: App, request: "Request", name: str) -> int:
    """Prepare the server, and start its engine again as often as was asked for; returns where none is started."""
    from kimigguf.cli.serve_show import preflight_record, show_misfit, show_preflight
    from kimigguf.engines.session import prepare_session
    from kimigguf.engines.watchdog import Restarts
    from kimigguf.placement.placed import Shortfall

    if request.ollama_port is not None:
        _check_bridge(request.ollama_port, request.port)
    with app.show.progress() as listen:
        prepared = prepare_session(request, app.environ, listen, name=name)
    if isinstance(prepared, Shortfall):
        return show_misfit(app.show, prepared)
    if request.dry_run:
        app.show.answer(preflight_record(prepared), lambda console: show_preflight(console, prepared))
        return ExitCode.ANSWERED_NO if prepared.blocked else ExitCode.DONE
    restarts = Restarts() if request.restart == "on-failure" else None
    while True:
        _serve_once(app, prepared, restarts)


def _serve_once(app: App, prepared: "Prepared", restarts: "Restarts | None") -> None:
    """Start the engine, say how to reach it, and stay until it ends; returns where it is to be started again."""
    from kimigguf.cli.serve_show import ready_record, show_ready
    from kimigguf.engines.diagnose import EngineDiedError
    from kimigguf.engines.session import read_ahead, registered, start
    from kimigguf.events import Notice
    from kimigguf.ollama.beside import held, running

    with app.show.progress() as listen:
        read_ahead(prepared, listen)
    with ExitStack() as ends:
        taken = ends.enter_context(held(port)) if (port := prepared.request.ollama_port) is not None else None
        session = ends.enter_context(start(prepared))
        ends.enter_context(registered(session, app.environ))
        try:
            with app.show.progress() as listen:
                session.wait_ready(listen)
            if taken is not None:
                address = session.server.address
                ends.enter_context(running(taken, address.url, prepared.key, address.trust, app.show.note))
            app.show.answer(ready_record(session), lambda console: show_ready(console, session))
            session.server.wait(lambda event: app.show.note(event.text) if isinstance(event, Notice) else None)
        except EngineDiedError as error:
            # Within the registration: whoever stops the server meanwhile finds it.
            _wait_for_next(app, error, restarts)


def _wait_for_next(app: App, error: "EngineDiedError", restarts: "Restarts | None") -> None:
    """Wait as long as a server that died so is to be left alone. Raises ``error`` where it is not to be started."""
    seconds = None
    if restarts is not None:
        seconds = restarts.seconds_before_next(ready_seconds=error.ready_seconds, may_pass=error.may_pass)
    if seconds is None:
        raise error
    app.show.error(error)
    app.show.note(f"starting it again in {seconds:.0f} s")
    time.sleep(seconds)


def _check_bridge(port: int, engine_port: int) -> None:
    from kimigguf.ollama.beside import another_port, check_bridge

    if port == engine_port:
        raise UsageError(
            f"the ports for the engine and for Ollama's clients are both {port}",
            code="same-port",
            hint=f"choose another: --ollama-port {another_port(port)}",
        )
    check_bridge(port)


def _request(options: dict[str, Any]) -> "Request":
    from kimigguf.engines.request import Request
    from kimigguf.ollama.beside import DEFAULT_PORT

    if options.pop("ollama_api") and options["ollama_port"] is None:
        options["ollama_port"] = DEFAULT_PORT
    plan_path, target, extra = options["plan_path"], options["target"], options["extra"]
    if plan_path is not None and target is not None and target.startswith("-"):
        # With --plan there is no target, so what stands after -- begins one place earlier.
        target, extra = None, (target, *extra)
    if (plan_path is None) == (target is None):
        raise UsageError(
            "name what to serve: a quant, a path, or a plan with --plan"
            if target is None
            else f"a plan says what to serve: name {target} or --plan, not both",
            code="nothing-to-serve" if target is None else "plan-and-target",
            hint="kimigguf serve UD-IQ1_M; kimigguf recommend says which quant fits this machine",
        )
    if plan_path is not None and (given := _given(_PLAN_OWNS)):
        raise UsageError(
            f"a plan is replayed as it is; {', '.join(given)} would make it another",
            code="plan-and-settings",
            hint="leave it out, or make the plan that you want: kimigguf plan QUANT --json > plan.json",
        )
    return Request(**options | {"target": target, "extra": tuple(extra)})


def _given(names: Mapping[str, str]) -> list[str]:
    """Those options of ``names`` (by parameter) that stand on the command line, in its words."""
    context = click.get_current_context()
    return [
        option
        for parameter, option in names.items()
        if context.get_parameter_source(parameter) is ParameterSource.COMMANDLINE
    ]
