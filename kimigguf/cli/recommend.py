"""``kimigguf recommend``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, machine_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode
from kimigguf.units import memory, storage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kimigguf.catalogue.quants import ModelProfile
    from kimigguf.cli.measured_show import Measured
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.placement.budget import Budget
    from kimigguf.placement.recommend import Recommendation, Verdict

_WIDE_COLUMNS = 110
"""From this width on the table has room for the reasons."""
_COLOURS = {
    "fits-vram": "bold green",
    "fits": "green",
    "tight": "yellow",
    "below-margin": "dark_orange",
    "streams-from-disk": "magenta",
    "does-not-fit": "red",
    "unsupported": "dim",
    "unknown": "dim",
}


@click.command("recommend", short_help="Say which quant of Kimi K3 this machine can run, and why.")
@machine_option
@click.option("--context", "context_tokens", type=int, default=32768, show_default=True, help="Tokens of context.")
@click.option(
    "--prefer",
    type=click.Choice(["quality", "speed"]),
    default="quality",
    show_default=True,
    help="Of the quants that fit, the best one or the fastest.",
)
@click.option("--model", "model_name", default="kimi-k3", show_default=True, help="Model profile.")
@click.option("-v", "--verbose", is_flag=True, help="Show the arithmetic of every verdict.")
@output_options
@click.pass_obj
def command(app: App, *, machine: str | None, context_tokens: int, prefer: str, model_name: str, verbose: bool) -> int:
    """Say which quant of Kimi K3 a machine can run, and why.

    A quant needs its download size plus 10 to 15 % of addressable memory (RAM and VRAM together), and the exact
    ledger of its context must fit as well. Exits with 1 when nothing fits.

    \b
    Examples:
      kimigguf recommend
      kimigguf recommend --machine epyc-768g-rtx-pro-6000 -v
      kimigguf recommend --context 131072 --prefer speed --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.catalogue.profiles import load_model
    from kimigguf.cli.measured_show import draw, measured_runs
    from kimigguf.memory.settings import Settings
    from kimigguf.placement.budget import budget
    from kimigguf.placement.plan import check_context
    from kimigguf.placement.recommend import Prefer, recommend

    profile = load_model(model_name, app.environ)
    check_context(context_tokens, profile.context_max_tokens)
    this = chosen_machine(app, machine)
    have = budget(this)
    here = _whole_here(app) if this.is_this_one else {}
    answer = recommend(profile, have, this.disks, Settings(context_tokens=context_tokens), Prefer(prefer), here=here)
    measured = measured_runs(app, this, {quant.name: quant.size_bytes for quant in profile.quants})
    data = _record(this.name, profile, have, answer, measured=measured, context_tokens=context_tokens, prefer=prefer)

    def human(console: "Console") -> None:
        _draw(console, this, profile, have, answer, context_tokens=context_tokens, verbose=verbose)
        draw(console, measured)

    app.show.answer(data, human)
    return ExitCode.DONE if answer.recommended else ExitCode.ANSWERED_NO


def _whole_here(app: App) -> dict[str, str]:
    """The quants that are whole on this machine, and their folders."""
    from kimigguf.download.store import SetState, managed_sets, models_dir

    whole = {SetState.WHOLE, SetState.UNVERIFIED}
    sets = managed_sets(models_dir(app.environ))
    return {stored.quant: str(stored.folder.absolute()) for stored in sets if stored.quant and stored.state in whole}


def _record(
    name: str,
    profile: "ModelProfile",
    have: "Budget",
    answer: "Recommendation",
    *,
    measured: "Measured",
    context_tokens: int,
    prefer: str,
) -> dict[str, Any]:
    from kimigguf.cli.measured_show import record

    margin = profile.margin
    return {
        "schema": "kimigguf.recommend/1",
        "machine": name,
        "model": profile.name,
        "policy": {
            "margin_low": margin.low if margin else None,
            "margin_high": margin.high if margin else None,
            "context_tokens": context_tokens,
            "prefer": prefer,
        },
        "have": {
            "ram_bytes": have.ram_bytes,
            "vram_bytes": have.vram_bytes,
            "total_bytes": have.total_bytes,
        },
        "recommended": answer.recommended,
        "ways_out": list(answer.ways_out),
        "verdicts": [
            {
                "quant": verdict.quant,
                "verdict": verdict.fit.value,
                "download_bytes": verdict.download_bytes,
                "need_low_bytes": verdict.need_low_bytes,
                "need_high_bytes": verdict.need_high_bytes,
                "ledger_bytes": verdict.ledger_bytes,
                "reasons": list(verdict.reasons),
                "measured": [record(told) for told in measured.get(verdict.quant, ())],
            }
            for verdict in answer.verdicts
        ],
    }


def _draw(
    console: "Console",
    machine: "Machine",
    profile: "ModelProfile",
    have: "Budget",
    answer: "Recommendation",
    *,
    context_tokens: int,
    verbose: bool,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    where = "this machine" if machine.is_this_one else machine.name
    console.print(Text.assemble((profile.title, "bold"), f" on {where}, context {context_tokens:,} tokens"))
    console.print(
        f"usable: {memory(have.ram_bytes)} RAM + {memory(have.vram_bytes)} VRAM"
        f" = {memory(have.total_bytes)} ({storage(have.total_bytes)})"
    )
    wide = console.width >= _WIDE_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading, justify in (("Quant", "left"), ("Download", "right"), ("Needs (GB)", "right"), ("Spare", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # two literals, held as str
    table.add_column("Verdict", no_wrap=True)
    if wide:
        table.add_column("Why")
    for verdict in answer.verdicts:
        cells: list[str | Text] = [
            Text(verdict.quant, style="bold" if verdict.quant == answer.recommended else ""),
            storage(verdict.download_bytes),
            _need(verdict),
            _spare(verdict, have.total_bytes),
            Text(verdict.fit, style=_COLOURS[verdict.fit]),
            verdict.reasons[0],
        ]
        table.add_row(*cells[: len(table.columns)])
    console.print(table)
    for line in _conclusion(profile, answer, told=wide):
        console.print(line)
    if verbose:
        _draw_arithmetic(console, profile, have, answer)


def _conclusion(profile: "ModelProfile", answer: "Recommendation", *, told: bool) -> Iterator["Text"]:
    """The recommendation; then why nothing better, or every way out."""
    from rich.text import Text

    if answer.recommended is None:
        yield Text("recommended: none", style="bold")
        if not profile.quants and not told:
            yield Text(f"  - {answer.verdicts[0].reasons[0]}")
        for way in answer.ways_out:
            yield Text(f"  - {way}")
        return
    yield Text.assemble(("recommended: ", "bold"), (answer.recommended, "bold green"))
    rank = {quant.name: quant.quality_rank for quant in profile.quants}
    better = [v for v in answer.verdicts if rank[v.quant] > rank[answer.recommended]]
    if better and not told:
        nearest = min(better, key=lambda v: rank[v.quant])
        yield Text(f"next better, {nearest.quant}: {nearest.reasons[0]}")


def _spare(verdict: "Verdict", total_bytes: int | None) -> str:
    """What is left, or lacking, beside the low end of the need."""
    if verdict.need_low_bytes is None or verdict.ledger_bytes is None or total_bytes is None:
        return "unknown"
    if verdict.fit == "unsupported":
        return "-"
    return f"{(total_bytes - max(verdict.need_low_bytes, verdict.ledger_bytes)) / 1e9:+.1f} GB"


def _need(verdict: "Verdict") -> str:
    if verdict.need_low_bytes is None or verdict.need_high_bytes is None:
        return "unknown"
    return f"{verdict.need_low_bytes / 1e9:.1f}-{verdict.need_high_bytes / 1e9:.1f}"


def _draw_arithmetic(console: "Console", profile: "ModelProfile", have: "Budget", answer: "Recommendation") -> None:
    console.print("\nWhat may be used:", style="bold")
    for line in have.lines:
        console.print(f"  {line.what}: {memory(line.size_bytes)}  ({line.reason})", markup=False)
    if profile.margin is None:
        return
    console.print("\nWhat each quant needs:", style="bold")
    console.print(f"  margin rule: {profile.margin.source}", markup=False)
    for verdict in answer.verdicts:
        console.print(f"  {verdict.quant}: {'; '.join(verdict.reasons)}", markup=False)
        console.print(
            f"    {storage(verdict.download_bytes)} x {1 + profile.margin.low:.2f} ="
            f" {storage(verdict.need_low_bytes)}, x {1 + profile.margin.high:.2f} ="
            f" {storage(verdict.need_high_bytes)}; exact ledger {storage(verdict.ledger_bytes)}",
            markup=False,
        )
