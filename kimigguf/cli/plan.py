"""``kimigguf plan``."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, machine_option, machine_words
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, MachineError

if TYPE_CHECKING:
    from kimigguf.cli.plan_target import Target
    from kimigguf.engines.command import Command
    from kimigguf.engines.engine import FoundEngine
    from kimigguf.engines.report import Comparison
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.placement.budget import Budget
    from kimigguf.placement.place import Shortfall
    from kimigguf.placement.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that the command says about one plan, drawn by ``plan_show``. ``warnings`` are about the command line.

    ``replay`` is what serves this plan, ready to paste, by way of a plan file that is written first.
    """

    target: "Target"
    machine: "Machine"
    have: "Budget"
    plan: "Plan"
    engine: "FoundEngine"
    command: "Command | None"
    warnings: tuple[str, ...]
    replay: str
    comparison: "Comparison | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the command says where there is no plan. ``compare`` is what shows all quants on the same machine."""

    target: "Target"
    machine: "Machine"
    shortfall: "Shortfall"
    warnings: tuple[str, ...]
    compare: str


@click.command("plan", short_help="Show where every byte of a quant would go, and the exact command line.")
@click.argument("model", metavar="QUANT|PATH")
@machine_option
@click.option("--context", "context_tokens", type=int, default=32768, show_default=True, help="Tokens, for all slots.")
@click.option("--slots", type=click.IntRange(1, 256), default=1, show_default=True, help="Conversations at a time.")
@click.option(
    "--kv-type",
    type=click.Choice(["f16", "q8_0", "q4_0"]),
    default="f16",
    show_default=True,
    help="Number format of the KV cache, K and V alike.",
)
@click.option(
    "--ubatch", type=click.IntRange(1, 65536), default=512, show_default=True, help="Tokens of the physical batch."
)
@click.option(
    "--engine",
    "engine_kind",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "llama-server", "embedded", "llama-cpp-python"]),
    help="What will run it.",
)
@click.option("--engine-path", type=click.Path(path_type=Path), help="A llama-server, or the folder it lies in.")
@click.option("--reserve-ram", metavar="SIZE", help="RAM to leave free besides, such as 16GiB.")
@click.option("--reserve-vram", metavar="SIZE", help="The same on each GPU.")
@click.option("--models-dir", type=click.Path(path_type=Path, file_okay=False), help="Where downloaded quants lie.")
@click.option("--hub", "ask_hub", is_flag=True, help="Read the real headers from the hub (under 10 MB) if need be.")
@click.option("--verify", is_flag=True, help="Ask the engine's own memory report, too; differ by over 2 %: exit 1.")
@click.option("--explain", is_flag=True, help="Say in words why this quant, this split and this context.")
@click.option("-v", "--verbose", is_flag=True, help="Show every row's source and the arithmetic of the budget.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    model: str,
    machine: str | None,
    context_tokens: int,
    slots: int,
    kv_type: str,
    ubatch: int,
    engine_kind: str,
    engine_path: Path | None,
    reserve_ram: str | None,
    reserve_vram: str | None,
    models_dir: Path | None,
    ask_hub: bool,
    verify: bool,
    explain: bool,
    verbose: bool,
) -> int:
    """Show where every byte of a quant would go on a machine, and the exact command line that puts it there.

    QUANT is a name from `kimigguf recommend`; PATH any shard of a set, or its folder. Nothing is downloaded. Exits
    with 1 when it does not fit, and says what would.

    \b
    Examples:
      kimigguf plan UD-IQ1_M
      kimigguf plan UD-Q2_K_XL --machine epyc-1536g-cpu --context 131072 --explain
      kimigguf download UD-IQ1_M
      kimigguf plan UD-IQ1_M --json > plan.json && kimigguf serve --plan plan.json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli import plan_show
    from kimigguf.cli.plan_target import resolve
    from kimigguf.memory.settings import KvType, Settings
    from kimigguf.placement.budget import budget
    from kimigguf.placement.place import Shortfall
    from kimigguf.placement.plan import plan_for
    from kimigguf.units import parse_size

    settings = Settings(
        context_tokens=context_tokens,
        slots=slots,
        kv_type=KvType(kv_type),
        ubatch_tokens=ubatch,
        batch_tokens=max(2048, ubatch),
    )
    reserves = [None if text is None else parse_size(text) for text in (reserve_ram, reserve_vram)]
    with app.show.progress() as listen:
        target = resolve(app, model, models_dir=models_dir, ask_hub=ask_hub or verify, listen=listen)
    _check_readable(target)
    this = chosen_machine(app, machine)
    engine, warnings = _engine(app, kind=engine_kind, engine_path=engine_path, is_here=this.is_this_one)
    this, unused = _as_seen(this, engine)
    warnings = (*warnings, *unused)
    have = budget(this, reserve_ram_bytes=reserves[0], reserve_vram_bytes=reserves[1])
    plan = plan_for(target.spec, this, settings, model=target.model, have=have)
    if isinstance(plan, Shortfall):
        compare = shlex.join(["kimigguf", "recommend", *machine_words()])
        return _answer_no(app, Refusal(target=target, machine=this, shortfall=plan, warnings=warnings, compare=compare))
    argv, more = _command(app, plan, engine)
    comparison = _verify(app, plan, target, engine, argv) if verify else None
    answer = Answer(
        target=target,
        machine=this,
        have=have,
        plan=plan,
        engine=engine,
        command=argv,
        warnings=(*warnings, *more),
        replay=_replay(target, model),
        comparison=comparison,
    )
    app.show.answer(
        plan_show.record(answer), lambda console: plan_show.draw(console, answer, explain=explain, verbose=verbose)
    )
    return ExitCode.ANSWERED_NO if comparison is not None and comparison.agrees is False else ExitCode.DONE


def _check_readable(target: "Target") -> None:
    """Refuse a quant whose tensors no mainline engine reads: a plan for it could not be run."""
    quant = target.quant
    if quant is not None and quant.engine.min_build is None and quant.engine.reason is not None:
        raise MachineError(
            f"no mainline llama.cpp reads {quant.name}",
            code="quant-unsupported",
            cause=quant.engine.reason,
            hint=quant.engine.alternative,
        )


def _answer_no(app: App, refusal: Refusal) -> int:
    from kimigguf.cli import plan_show

    app.show.answer(plan_show.refusal_record(refusal), lambda console: plan_show.draw_refusal(console, refusal))
    return ExitCode.ANSWERED_NO


def _engine(app: App, *, kind: str, engine_path: Path | None, is_here: bool) -> "tuple[FoundEngine, tuple[str, ...]]":
    """The engine to write the command line for; a plain llama-server for another machine, or where there is none."""
    from kimigguf.engines.discover import choose
    from kimigguf.engines.engine import EngineKind, FoundEngine

    plain = FoundEngine(
        kind=EngineKind.LLAMA_SERVER, path="llama-server", version=None, build=None, supports_k3=None, backends=None
    )
    if not is_here and engine_path is None:
        return plain, ()
    try:
        return choose(app.environ, kind=kind, engine_path=engine_path), ()
    except MachineError as error:
        if engine_path is not None or kind != "auto":
            raise
        return plain, (f"{error.message}: {error.hint}",)


def _as_seen(machine: "Machine", engine: "FoundEngine") -> "tuple[Machine, tuple[str, ...]]":
    """This machine with the accelerators that the engine has, in its order, and what is left unused, in sentences.

    A replay plans on the same; a described machine has another engine than the one here, so it stays as it is.
    """
    from kimigguf.engines.sight import seen_by, undescribed, unseen

    if not machine.is_this_one:
        return machine, ()
    told = (unseen(machine, engine), undescribed(machine, engine))
    return seen_by(machine, engine), tuple(sentence for sentence in told if sentence is not None)


def _command(app: App, plan: "Plan", engine: "FoundEngine") -> "tuple[Command | None, tuple[str, ...]]":
    """The command line, or None with the reason why this engine cannot be told this plan."""
    from dataclasses import replace

    from kimigguf.engines.command import command
    from kimigguf.engines.serving import load_serving
    from kimigguf.placement.plan import PlannedFile

    warnings: tuple[str, ...] = ()
    if not plan.model.files:
        # The number of shards is the hub's to say, and changes with a re-upload.
        stand_in = PlannedFile(name=f"FIRST_SHARD_OF_{plan.model.quant}.gguf", size_bytes=0)
        plan = replace(plan, model=replace(plan.model, files=(stand_in,)))
    if not plan.model.folder:
        absent = (
            f"the files are not on this machine yet, and {plan.model.files[0].name} in the command has no folder;"
            f" kimigguf download {plan.model.quant} brings the files, and a plan made after that names them"
        )
        warnings = (absent,)
    try:
        profile = load_serving(plan.model.architecture, app.environ)
        return command(plan, engine, profile=profile, plan_file="plan.json"), warnings
    except MachineError as error:
        return None, (*warnings, f"{error.message} ({error.cause}): {error.hint}")


def _replay(target: "Target", model: str) -> str:
    """The commands that bring the files, write this very plan and serve it, with the options that were given."""
    ctx = click.get_current_context()

    def given(*names: str) -> list[str]:
        words: list[str] = []
        for option in ctx.command.params:
            by_user = ctx.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
            if option.name in names and by_user:
                value = ctx.params[option.name]
                words += [option.opts[-1]] if value is True else [option.opts[-1], str(value)]
        return words

    engine = ("engine_kind", "engine_path")
    wanted = ("context_tokens", "slots", "kv_type", "ubatch", "reserve_ram", "reserve_vram")
    steps = [
        f"{shlex.join(['kimigguf', 'plan', model, *given(*wanted, *engine, 'models_dir'), '--json'])} > plan.json",
        shlex.join(["kimigguf", "serve", "--plan", "plan.json", *given(*engine)]),
    ]
    if not target.model.folder:
        steps.insert(0, shlex.join(["kimigguf", "download", model, *given("models_dir")]))
    return " && ".join(steps)


def _verify(app: App, plan: "Plan", target: "Target", engine: "FoundEngine", argv: "Command | None") -> "Comparison":
    from kimigguf.engines.report import verify

    if target.shards is None:
        raise AssertionError("--verify always reads headers")
    with app.show.progress() as listen:
        return verify(plan, target.shards, engine, argv, environ=app.environ, listen=listen)


__all__: list[Any] = ["Answer", "Refusal", "command"]
