"""The command line of a plan: for which engine, how it is to be reached, and the lines that make the same again."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import machine_words
from kimigguf.errors import MachineError, UsageError
from kimigguf.home import from_home

if TYPE_CHECKING:
    from kimigguf.cli.plan_target import Target
    from kimigguf.engines.command import Command
    from kimigguf.engines.engine import FoundEngine
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.placement.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How the planned server is to be reached, and what llama-server is told besides, as ``serve`` takes it."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key_file: Path | None = None
    extra: tuple[str, ...] = ()

    @property
    def api_key_path(self) -> str | None:
        """The key file as it can stand in another folder's command line."""
        return None if self.api_key_file is None else str(from_home(self.api_key_file).absolute())


def wished(app: App, host: str, port: int, api_key_file: Path | None, extra: tuple[str, ...]) -> Wish:
    """What was asked of the server, if a server may be so.

    Raises:
        UsageError: ``key-needed``, ``bad-key-file``, ``tls-half``, ``tls-unusable``.
    """
    from kimigguf.engines.command import is_loopback
    from kimigguf.engines.keys import read_keys
    from kimigguf.engines.passthrough import absolute
    from kimigguf.engines.tls import served_certificate

    with app.show.progress() as listen:
        served_certificate(extra, listen)
    wish = Wish(host=host, port=port, api_key_file=api_key_file, extra=absolute(extra))
    if wish.api_key_path is not None:
        read_keys(Path(wish.api_key_path))
    elif not is_loopback(host):
        raise UsageError(
            f"serving on {host} lets others on the network in, and there is no API key",
            code="key-needed",
            hint="(umask 077; head -c 32 /dev/urandom | base64 > k3.key) and add --api-key-file k3.key",
        )
    return wish


def planned_engine(
    app: App, machine: "Machine", *, kind: str, engine_path: Path | None, form: str | None
) -> "tuple[FoundEngine, tuple[str, ...]]":
    """The engine to write the command line for; a plain llama-server for another machine, or where there is none.

    A file of ``form`` starts a llama-server: an engine of Python's is taken for one only where nobody asked for it.
    """
    from kimigguf.engines.choose import choose
    from kimigguf.engines.engine import EngineKind

    if not machine.is_this_one and engine_path is None:
        return _plain(machine), ()
    try:
        engine = choose(app.environ, kind=kind, engine_path=engine_path)
    except MachineError as error:
        if engine_path is not None or kind != "auto":
            raise
        return _plain(machine), (f"{error.message}: {error.hint}",)
    if form is None or engine.kind in {EngineKind.LLAMA_SERVER, EngineKind.LLAMA}:
        return engine, ()
    if kind != "auto":
        raise UsageError(
            f"--format {form} starts a llama-server, and --engine {kind} is none",
            code="format-needs-llama-server",
            hint="leave --engine out, or name a llama-server with --engine-path",
        )
    return _plain(machine), ("there is no llama-server on this machine; the file says llama-server, found by PATH",)


def _plain(machine: "Machine") -> "FoundEngine":
    """A llama-server as such, with the machine's accelerators under llama.cpp's names where their kind is known."""
    from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine

    prefixes = {"cuda": "CUDA", "rocm": "ROCm", "metal": "MTL", "vulkan": "Vulkan", "sycl": "SYCL"}
    known = machine.accelerators is not None and all(one.backend for one in machine.accelerators)
    devices = [
        EngineDevice(name=f"{prefixes[str(one.backend)]}{index}", description=one.name)
        for index, one in enumerate(machine.accelerators or ())
        if known
    ]
    return FoundEngine(
        kind=EngineKind.LLAMA_SERVER,
        path="llama-server",
        version=None,
        build=None,
        supports_k3=None,
        backends=None,
        devices=tuple(devices) if known else None,
    )


def as_seen(machine: "Machine", engine: "FoundEngine") -> "tuple[Machine, tuple[str, ...]]":
    """This machine with the accelerators that the engine has, in its order, and what is left unused, in sentences.

    A replay plans on the same; a described machine has another engine than the one here, so it stays as it is.
    """
    from kimigguf.engines.sight import seen_by, undescribed, unseen

    if not machine.is_this_one:
        return machine, ()
    told = (unseen(machine, engine), undescribed(machine, engine))
    return seen_by(machine, engine), tuple(sentence for sentence in told if sentence is not None)


def planned_command(
    app: App, plan: "Plan", engine: "FoundEngine", wish: Wish
) -> "tuple[Command | None, tuple[str, ...]]":
    """The command line, or None with the reason why this engine cannot be told this plan.

    Raises:
        UsageError: ``flag-undoes-plan``, ``engine-takes-no-arguments`` for what stands after ``--``.
    """
    from dataclasses import replace

    from kimigguf.engines.command import command
    from kimigguf.engines.discover import known_flags
    from kimigguf.engines.naming import alias_of
    from kimigguf.engines.passthrough import check_extra
    from kimigguf.engines.serving import load_serving
    from kimigguf.placement.plan import PlannedFile

    check_extra(wish.extra, engine.kind)
    warnings: tuple[str, ...] = ()
    if not plan.model.files:
        # The number of shards is the hub's to say, and changes with a re-upload.
        stand_in = PlannedFile(name=f"FIRST_SHARD_OF_{plan.model.quant}.gguf", size_bytes=0)
        plan = replace(plan, model=replace(plan.model, files=(stand_in,)))
    if not plan.model.folder:
        absent = (
            f"the files are not on this machine yet, and {plan.model.files[0].name} in the command has no folder;"
            f" {bring(plan.model.quant or 'QUANT')} brings the files, and a plan made after that names them"
        )
        warnings = (absent,)
    try:
        profile = load_serving(plan.model.architecture, app.environ)
        made = command(
            plan,
            engine,
            profile=profile,
            host=wish.host,
            port=wish.port,
            alias=alias_of(plan.model, app.environ),
            api_key_file=wish.api_key_path,
            plan_file="plan.json",
            known_flags=known_flags(engine, app.environ),
            extra=wish.extra,
        )
    except MachineError as error:
        return None, (*warnings, f"{error.message} ({error.cause}): {error.hint}")
    return made, warnings


_PLANNED: Final = ("context_tokens", "slots", "kv_type", "ubatch", "reserve_ram", "reserve_vram")
_ENGINE: Final = ("engine_kind", "engine_path")
_REACHED: Final = ("host", "port", "api_key_file")


def _given(*names: str) -> list[str]:
    """Those options, by their parameters' names, as they stand on the command line at hand."""
    ctx = click.get_current_context()
    words: list[str] = []
    for option in ctx.command.params:
        by_user = ctx.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if option.name in names and by_user:
            value = ctx.params[option.name]
            words += [option.opts[-1]] if value is True else [option.opts[-1], str(value)]
    return words


def replay(target: "Target", model: str, extra: tuple[str, ...]) -> str:
    """The commands that bring the files, write this very plan and serve it, with the options that were given."""
    handed_on = ["--", *extra] if extra else []
    steps = [
        f"{shlex.join(['kimigguf', 'plan', model, *_given(*_PLANNED, *_ENGINE, 'models_dir'), '--json'])} > plan.json",
        shlex.join(["kimigguf", "serve", "--plan", "plan.json", *_given(*_ENGINE, *_REACHED), *handed_on]),
    ]
    if not target.model.folder:
        steps.insert(0, bring(model))
    return " && ".join(steps)


def bring(model: str) -> str:
    """The command that brings the files to where the command at hand looks for them."""
    return shlex.join(["kimigguf", "download", model, *_given("models_dir")])


def remake(model: str, extra: tuple[str, ...], form: str) -> str:
    """The command that writes the same file again."""
    words = [*machine_words(), *_given(*_PLANNED, *_ENGINE, *_REACHED, "models_dir"), "--format", form]
    return shlex.join(["kimigguf", "plan", model, *words, *(["--", *extra] if extra else [])])
