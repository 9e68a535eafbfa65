"""One serving session: everything between a request and a server that answers, in the order that fails cheapest first.

What the user asked for is checked before the engine, the engine before a byte is fetched, the files before the engine
starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kimigguf.download.store import models_dir, stored_at
from kimigguf.engines import prepare
from kimigguf.engines.command import Command, command, require_key
from kimigguf.engines.discover import choose, known_flags
from kimigguf.engines.engine import FoundEngine
from kimigguf.engines.keys import read_keys
from kimigguf.engines.llama_server import Address, Server, require_free
from kimigguf.engines.serving import chat_template_arguments, load_serving
from kimigguf.engines.supervise import fresh_log
from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice, Step
from kimigguf.hardware.detect import detect
from kimigguf.memory.settings import Settings
from kimigguf.placement.place import Shortfall
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import changes, load_plan, write_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. Exactly one of ``target`` and ``plan_path`` is given. ``context_tokens`` None: default."""

    target: str | None = None
    plan_path: Path | None = None
    engine: str = "auto"
    engine_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    context_tokens: int | None = None
    slots: int = 1
    effort: str | None = None
    agent: bool = False
    alias: str | None = None
    models_dir: Path | None = None
    no_download: bool = False
    api_key_file: Path | None = None


class Session:
    """A started engine with the plan it runs. Leaving the ``with`` block ends it."""

    def __init__(self, server: Server, plan: Plan, engine: FoundEngine, made: Command, plan_file: Path) -> None:
        self.server = server
        self.plan = plan
        self.engine = engine
        self.command = made
        self.plan_file = plan_file
        self.load_seconds = 0.0

    @property
    def needs_key(self) -> bool:
        return "--api-key-file" in self.command.argv

    def wait_ready(self, listen: Listener) -> None:
        """Wait until it answers.

        Raises:
            ServerError: It died, with the reason.
        """
        self.load_seconds = self.server.wait_ready(listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.server.stop()


def open_session(request: Request, environ: Mapping[str, str], listen: Listener) -> Session | Shortfall:
    """Prepare what ``request`` names and start its engine; ``wait_ready`` comes next. A Shortfall does not fit.

    Raises:
        KimiggufError: Of every kind; see the rooms that are called.
    """
    address = Address(host=request.host, port=request.port)
    key = _key(request)
    require_free(address)
    made = _replayed(request, environ, listen) if request.plan_path else _planned(request, environ, listen)
    if isinstance(made, Shortfall):
        return made
    plan, engine = made
    profile = load_serving(plan.model.architecture, environ)
    folder = state_folder(environ)
    plan_file = folder / f"serve-{request.port}.plan.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(plan, plan_file)
    run = command(
        plan,
        engine,
        profile=profile,
        host=request.host,
        port=request.port,
        api_key_file=str(request.api_key_file.absolute()) if request.api_key_file else None,
        alias=request.alias,
        effort=request.effort,
        agent=request.agent,
        plan_file=str(plan_file),
        known_flags=known_flags(engine, environ),
        environ=environ,
    )
    for sentence in _remarks(plan, run):
        listen(Notice(text=sentence))
    log = fresh_log(folder / "logs", f"serve-{request.port}")
    size = sum(file.size_bytes for file in plan.model.files)
    alias = request.alias or profile.alias
    server = Server.start(run, address, alias=alias, log=log, total_bytes=size, key=key)
    return Session(server, plan, engine, run, plan_file)


def _planned(request: Request, environ: Mapping[str, str], listen: Listener) -> tuple[Plan, FoundEngine] | Shortfall:
    target = prepare.target_of(request.target or "", environ)
    prepare.check_wish(target, request.context_tokens)
    _check_effort(target, request, environ)
    engine = choose(environ, kind=request.engine, engine_path=request.engine_path, need=target.need)
    listen(Step(text=f"engine: {engine.path} ({engine.version})"))
    models = models_dir(environ, request.models_dir)
    stored = prepare.obtain(target, models, environ=environ, may_download=not request.no_download, listen=listen)
    stored = prepare.verified(stored, listen)
    plan = prepare.plan_on(
        stored,
        detect(environ=environ),
        engine,
        Settings(slots=request.slots),
        context_tokens=request.context_tokens,
        listen=listen,
    )
    return plan if isinstance(plan, Shortfall) else (plan, engine)


def _check_effort(target: prepare.Target, request: Request, environ: Mapping[str, str]) -> None:
    if isinstance(target, prepare.CatalogueTarget):
        chat_template_arguments(load_serving(target.profile.architecture, environ), request.effort)


def _replayed(request: Request, environ: Mapping[str, str], listen: Listener) -> tuple[Plan, FoundEngine]:
    """The plan of a file, on files that are as it says. What changed on the machine is told, not corrected.

    Raises:
        UsageError: ``bad-plan``, ``plan-stale`` if the files are others.
    """
    plan = load_plan(request.plan_path or Path())
    engine = choose(environ, kind=request.engine, engine_path=request.engine_path)
    listen(Step(text=f"engine: {engine.path} ({engine.version})"))
    if plan.model.folder is None or not plan.model.files:
        raise UsageError(
            "the plan was made before its files were on this machine",
            code="plan-without-files",
            hint=f"kimigguf serve {plan.model.quant or 'QUANT'}",
        )
    stored = prepare.verified(prepare.complete(stored_at(Path(plan.model.folder) / plan.model.files[0].name)), listen)
    found = prepare.planned_files(stored)
    if different := [line for line in changes(plan, detect(environ=environ), files=found) if ".gguf" in line]:
        raise UsageError(
            "the files are not those that the plan was made for",
            code="plan-stale",
            cause="; ".join(different[:4]),
            hint=f"make it again: kimigguf plan '{plan.model.folder}' --json > plan.json",
        )
    for line in changes(plan, detect(environ=environ)):
        listen(Notice(text=f"not as in the plan: {line}"))
    return plan, engine


def _remarks(plan: Plan, run: Command) -> tuple[str, ...]:
    """What a reader should know about a command that differs from what was asked, or from what the shell says."""
    left_out = f"the engine does not know, so it goes without: {', '.join(run.left_out)}"
    dropped = f"not passed on to the engine: {', '.join(run.dropped)}"
    return (
        *plan.gave_way,
        *plan.notices,
        *((left_out,) if run.left_out else ()),
        *((dropped,) if run.dropped else ()),
    )


def _key(request: Request) -> str | None:
    """A key that the server will accept, None if it will ask for none."""
    require_key(request.host, str(request.api_key_file) if request.api_key_file else None)
    return read_keys(request.api_key_file)[0] if request.api_key_file else None


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where logs and the plans of running servers lie."""
    from platformdirs import user_state_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "kimigguf"
    return user_state_path("kimigguf")
