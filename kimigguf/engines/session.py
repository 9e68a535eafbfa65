"""One serving session: everything between a request and a server that answers, in the order that fails cheapest first.

What the user asked for is checked before the engine, the engine before a byte is fetched, the files before the engine
starts.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kimigguf.engines import registry
from kimigguf.engines.command import Command, command, device_names, require_key
from kimigguf.engines.diagnose import EngineDiedError, naming
from kimigguf.engines.discover import known_flags
from kimigguf.engines.engine import FoundEngine
from kimigguf.engines.evidence import Check, State
from kimigguf.engines.keys import new_key, read_keys
from kimigguf.engines.llama_server import Address, Server, require_free
from kimigguf.engines.loaded import compare_loaded
from kimigguf.engines.observe import baseline
from kimigguf.engines.planned import planned, replayed
from kimigguf.engines.prefault import prefault
from kimigguf.engines.preflight import preflight, read_surroundings
from kimigguf.engines.report import Comparison
from kimigguf.engines.request import Request
from kimigguf.engines.selftest import Result, poster, selftest
from kimigguf.engines.serving import DEFAULT, ServingProfile, chat_template_arguments, load_serving
from kimigguf.engines.supervise import fresh_log
from kimigguf.engines.tls import served_certificate
from kimigguf.errors import MachineError, ServerError, UsageError
from kimigguf.events import Listener, Notice
from kimigguf.placement.placed import Shortfall
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import changes, write_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything a start needs, checked; nothing has been started."""

    request: Request
    name: str
    plan: Plan
    engine: FoundEngine
    command: Command
    profile: ServingProfile
    address: Address
    alias: str
    key: str | None
    plan_file: Path
    log_folder: Path
    checks: tuple[Check, ...]

    @property
    def blocked(self) -> tuple[Check, ...]:
        """The checks that stand against a start."""
        return tuple(check for check in self.checks if check.blocks and check.state is State.FAILED)

    def require(self) -> None:
        """Refuse a start that a check stands against.

        Raises:
            MachineError: ``preflight-failed`` with the evidence.
        """
        for check in self.blocked:
            raise MachineError(
                f"the {check.what} is not as it must be for a start",
                code="preflight-failed",
                cause=check.evidence,
                hint=check.hint,
            )


class Session:
    """A started engine with the plan it runs. Leaving the ``with`` block ends it."""

    def __init__(self, server: Server, prepared: Prepared) -> None:
        self.server = server
        self.prepared = prepared
        self.load_seconds = 0.0
        self.memory = Comparison(reason="not loaded yet")
        self.selftest: Result | None = None
        self.registration: registry.Registration | None = None

    def wait_ready(self, listen: Listener) -> None:
        """Wait until it answers, then hold it to its plan and, unless asked not to, to what a server must do.

        Raises:
            ServerError: It died, or failed its self-test; with the reason.
        """
        self.load_seconds = self.server.wait_ready(listen, stall_seconds=self.prepared.request.stall_timeout)
        plan, engine = self.prepared.plan, self.prepared.engine
        self.memory = compare_loaded(plan, self.server.log_text(), device_names(plan, engine))
        if not self.prepared.request.no_selftest:
            self._test(plan, listen)
        if self.registration is not None:
            server = self.server
            stands = baseline(server.address, self.prepared.key, pid=server.pid, log=server.log)
            self.registration.write(replace(self.registration.entry, ready=stands))

    def _test(self, plan: Plan, listen: Listener) -> None:
        settings = plan.settings
        self.selftest = selftest(
            poster(self.server.address.url, self.prepared.key, self.server.address.trust),
            ubatch_tokens=settings.effective_ubatch_tokens,
            slot_tokens=settings.stream_tokens,
            listen=listen,
        )
        if self.selftest.failed:
            self.server.raise_if_dying("testing itself")
            first = self.selftest.failed[0]
            raise ServerError(
                f"the server failed its self-test: {first.what}",
                code="selftest-failed",
                cause=first.evidence,
                hint=f"{first.hint or 'serve it as it is with --no-selftest'}; the log: {self.server.log}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.server.stop()


def prepare_session(
    request: Request, environ: Mapping[str, str], listen: Listener, *, name: str
) -> Prepared | Shortfall:
    """Get everything ready that ``request`` names, down to the command; a Shortfall does not fit.

    ``name`` is the server's, held by ``named`` until it has ended.

    Raises:
        KimiggufError: Of every kind; see the rooms that are called.
    """
    address = Address(host=request.host, port=request.port, certificate=served_certificate(request.extra, listen))
    _require_port(address, servers_folder(environ))
    request = with_key(request, state_folder(environ) / "keys" / name, listen)
    key = read_keys(request.api_key_file)[0] if request.api_key_file else None
    made = replayed(request, environ, listen) if request.plan_path else planned(request, environ, listen)
    if isinstance(made, Shortfall):
        return made
    plan, engine = made.plan, made.engine
    profile = load_serving(plan.model.architecture, environ)
    chat_template_arguments(
        profile, request.effort
    )  # an effort that the model does not know is refused before the load
    folder = state_folder(environ)
    plan_file = folder / f"{name}.plan.json"  # by what is nobody else's: another may try the same port
    _write_plan(plan, plan_file)
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
        extra=request.extra,
        environ=environ,
    )
    for sentence in _remarks(plan, run):
        listen(Notice(text=sentence))
    checks = preflight(
        stored=made.stored,
        engine=engine,
        machine=made.machine,
        plan=plan,
        argv=run.argv,
        address=address,
        changed=changes(plan, made.machine),
        log_folder=folder / "logs",
        around=read_surroundings(environ),
    )
    return Prepared(
        request=request,
        name=name,
        plan=plan,
        engine=engine,
        command=run,
        profile=profile,
        address=address,
        alias=request.alias or profile.alias,
        key=key,
        plan_file=plan_file,
        log_folder=folder / "logs",
        checks=checks,
    )


@contextmanager
def named(request: Request, environ: Mapping[str, str], *, to_start: bool = False) -> Iterator[str]:
    """How the server is called, as asked, else by its model and port: nobody else's while the block runs.

    ``to_start``: not to serve under it, but to start the process that will.

    Raises:
        UsageError: ``bad-name``, ``name-in-use``.
        MachineError: ``state-unwritable``.
    """
    name = registry.check_name(request.name or f"{request.alias or DEFAULT}-{request.port}")
    with registry.reserved(servers_folder(environ), name, to_start=to_start):
        yield name


def servers_folder(environ: Mapping[str, str]) -> Path:
    """Where the running servers are registered."""
    return state_folder(environ) / "servers"


@contextmanager
def registered(session: Session, environ: Mapping[str, str]) -> Iterator[None]:
    """Have a started server in the registry while the block runs, so that ``status`` and ``stop`` find it.

    An engine that dies and is not started again is remembered.
    """
    prepared, server = session.prepared, session.server
    supervisor, engine = registry.ProcessId.of(os.getpid()), registry.ProcessId.of(server.pid)
    if supervisor is None or engine is None:  # the engine has died already; whoever waits for it will say so
        yield
        return
    request = prepared.request
    entry = registry.Entry(
        name=prepared.name,
        supervisor=supervisor,
        engine=engine,
        host=request.host,
        port=request.port,
        alias=prepared.alias,
        quant=prepared.plan.model.quant,
        log=str(server.log),
        plan_file=str(prepared.plan_file),
        arguments=request.arguments(prepared.name),
        folder=str(Path.cwd()),
        started_at=registry.now(),
        planned_bytes=sum(row.size_bytes or 0 for row in prepared.plan.ledger.rows),
        api_key_file=str(request.api_key_file.absolute()) if request.api_key_file else None,
    )
    folder = servers_folder(environ)
    with registry.entered(folder, entry) as session.registration:
        try:
            yield
        except EngineDiedError as error:
            registry.remember_death(folder, entry, error.how)
            error.hint = naming(error.hint or "", entry.name) or None
            raise


def read_ahead(prepared: Prepared, listen: Listener) -> None:
    """Read the shards into the page cache, where that was asked for and the plan's memory can keep them.

    Raises:
        IntegrityError: ``unreadable``.
    """
    model = prepared.plan.model
    if prepared.request.prefault and model.folder is not None:
        files = [Path(model.folder) / file.name for file in model.files]
        prefault(files, room_bytes=prepared.plan.machine.ram_budget_bytes, listen=listen)


def start(prepared: Prepared) -> Session:
    """Start the engine; ``wait_ready`` comes next.

    Raises:
        MachineError: ``preflight-failed``, ``port-in-use``, ``engine-unusable``, ``log-unwritable``.
    """
    prepared.require()
    server = Server.start(
        prepared.command,
        prepared.address,
        alias=prepared.alias,
        log=fresh_log(prepared.log_folder, f"serve-{prepared.address.port}"),
        total_bytes=sum(file.size_bytes for file in prepared.plan.model.files),
        key=prepared.key,
        streamed_bytes=prepared.plan.streamed_bytes,
    )
    return Session(server, prepared)


def _require_port(address: Address, folder: Path) -> None:
    """As ``require_free``, where one of the user's own servers listens by its name.

    Raises:
        UsageError, MachineError: As ``require_free``.
    """
    try:
        require_free(address)
    except MachineError as error:
        own = next((one for one in registry.entries(folder) if one.port == address.port and one.engine.process()), None)
        if error.code != "port-in-use" or own is None:
            raise
        raise MachineError(
            f"port {address.port} on {address.host} cannot be had: your server {own.name} listens there",
            code=error.code,
            hint=f"kimigguf stop --name {own.name}, or choose another with --port",
        ) from error


def _write_plan(plan: Plan, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan(plan, path)
    except OSError as error:
        raise MachineError(f"cannot write {path}", code="state-unwritable", cause=error.strerror) from error


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


def with_key(request: Request, kept: Path, listen: Listener) -> Request:
    """The request with the file of its API key, which is made if that was asked for, and shown this once.

    Raises:
        UsageError: ``key-needed`` for an open server without one, ``key-and-new-key``.
        MachineError: ``state-unwritable``.
    """
    if request.new_api_key:
        if request.api_key_file is not None:
            raise UsageError("give either --api-key-file or --new-api-key", code="key-and-new-key")
        key = new_key(kept)
        listen(Notice(text=f"API key, shown this once and kept in {kept}: {key}"))
        # What starts it again takes the same key.
        return replace(request, api_key_file=kept, new_api_key=False)
    require_key(request.host, str(request.api_key_file) if request.api_key_file else None)
    return request


def state_folder(environ: Mapping[str, str]) -> Path:
    """Where logs and the plans of running servers lie."""
    from platformdirs import user_state_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "kimigguf"
    return user_state_path("kimigguf")
