"""``kimigguf plan``."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, machine_option, machine_words
from kimigguf.cli.plan_export import check_format, format_option, to_be_there
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, MachineError

if TYPE_CHECKING:
    from kimigguf.cli.measured_show import Measured
    from kimigguf.cli.plan_target import Target
    from kimigguf.engines.command import Command
    from kimigguf.engines.engine import FoundEngine
    from kimigguf.engines.report import Comparison
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.placement.budget import Budget
    from kimigguf.placement.placed import Shortfall
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
    measured: "Measured"
    comparison: "Comparison | None" = None

    @property
    def is_here(self) -> bool:
        """Whether it is about the machine at hand."""
        return self.machine.is_this_one


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
@click.argument("extra", metavar="[-- ENGINE ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@machine_option
@click.option("--context", "context_tokens", type=int, help="Tokens, for all slots.  [default: 32768, or the model's]")
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
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the server; others need a key.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(1, 65535), help="Port in the command.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file of API keys, named in the command.")
@click.option("--reserve-ram", metavar="SIZE", help="RAM to leave free besides, such as 16GiB.")
@click.option("--reserve-vram", metavar="SIZE", help="The same on each GPU.")
@click.option("--models-dir", type=click.Path(path_type=Path, file_okay=False), help="Where downloaded quants lie.")
@click.option("--hub", "ask_hub", is_flag=True, help="Read the real headers from the hub (under 10 MB) if need be.")
@click.option(
    "--verify", is_flag=True, help="Ask the engine's own memory report, too; over 2 % and 32 MiB off: exit 1."
)
@format_option
@click.option("--explain", is_flag=True, help="Say in words why this quant, this split and this context.")
@click.option("-v", "--verbose", is_flag=True, help="Show every row's source and the arithmetic of the budget.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    model: str,
    extra: tuple[str, ...],
    machine: str | None,
    context_tokens: int | None,
    slots: int,
    kv_type: str,
    ubatch: int,
    engine_kind: str,
    engine_path: Path | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    reserve_ram: str | None,
    reserve_vram: str | None,
    models_dir: Path | None,
    ask_hub: bool,
    verify: bool,
    form: str | None,
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
      kimigguf plan UD-IQ1_M --format systemd -- --threads 64
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli import plan_command, plan_export, plan_show
    from kimigguf.cli.measured_show import measured_runs
    from kimigguf.cli.plan_target import resolve
    from kimigguf.memory.settings import KvType, Settings
    from kimigguf.placement.budget import budget
    from kimigguf.placement.placed import Shortfall
    from kimigguf.placement.plan import plan_for, usual_context
    from kimigguf.units import parse_size

    settings = Settings(
        slots=slots,
        kv_type=KvType(kv_type),
        ubatch_tokens=ubatch,
        batch_tokens=max(2048, ubatch),
    )
    if form is not None:
        check_format(app, form, drawn={"--explain": explain, "--verbose": verbose})
    wish = plan_command.wished(app, host, port, api_key_file, extra)
    reserves = [None if text is None else parse_size(text) for text in (reserve_ram, reserve_vram)]
    with app.show.progress() as listen:
        target = resolve(app, model, models_dir=models_dir, ask_hub=ask_hub or verify, listen=listen)
    _check_readable(target)
    if form is not None:
        target = to_be_there(app, target, models_dir)
    context_tokens = usual_context(target.spec) if context_tokens is None else context_tokens
    settings = replace(settings, context_tokens=context_tokens)
    this = chosen_machine(app, machine)
    quant = target.quant
    measured = measured_runs(app, this, {} if quant is None else {quant.name: quant.size_bytes})
    engine, warnings = plan_command.planned_engine(app, this, kind=engine_kind, engine_path=engine_path, form=form)
    this, unused = plan_command.as_seen(this, engine)
    warnings = (*warnings, *unused)
    have = budget(this, reserve_ram_bytes=reserves[0], reserve_vram_bytes=reserves[1])
    plan = plan_for(target.spec, this, settings, model=target.model, have=have)
    if isinstance(plan, Shortfall):
        compare = shlex.join(["kimigguf", "recommend", *machine_words()])
        refusal = Refusal(target=target, machine=this, shortfall=plan, warnings=warnings, compare=compare)
        return plan_export.refuse(app, refusal) if form is not None else _answer_no(app, refusal)
    argv, more = plan_command.planned_command(app, plan, engine, wish)
    comparison = _verify(app, plan, target, engine, argv) if verify else None
    answer = Answer(
        target=target,
        machine=this,
        have=have,
        plan=plan,
        engine=engine,
        command=argv,
        warnings=(*warnings, *more),
        replay=plan_command.replay(target, model, extra),
        measured=measured,
        comparison=comparison,
    )
    if form is not None:
        plan_export.write(app, answer, wish, form, plan_command.remake(model, extra, form))
    else:
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


def _verify(app: App, plan: "Plan", target: "Target", engine: "FoundEngine", argv: "Command | None") -> "Comparison":
    from kimigguf.engines.report import verify

    if target.shards is None:
        raise AssertionError("--verify always reads headers")
    with app.show.progress() as listen:
        return verify(plan, target.shards, engine, argv, environ=app.environ, listen=listen)


__all__: list[Any] = ["Answer", "Refusal", "command"]
