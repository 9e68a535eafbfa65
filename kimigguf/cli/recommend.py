"""``kimigguf recommend``."""

import platform
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.machine_option import chosen_machine, machine_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError
from kimigguf.units import memory, storage

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.catalogue.quants import ModelProfile
    from kimigguf.hardware.snapshot import Machine
    from kimigguf.placement.budget import Budget
    from kimigguf.placement.recommend import Recommendation, Verdict

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
@click.option("--prefer", type=click.Choice(["quality", "speed"]), default="quality", show_default=True)
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
    from kimigguf.memory.settings import Settings
    from kimigguf.placement.budget import budget
    from kimigguf.placement.recommend import Prefer, recommend

    profile = load_model(model_name, app.environ)
    check_context(context_tokens, profile.context_max_tokens)
    this = chosen_machine(app, machine)
    have = budget(this)
    answer = recommend(profile, have, this.disks, Settings(context_tokens=context_tokens), Prefer(prefer))
    data = _record(this.name, profile, have, answer, context_tokens=context_tokens, prefer=prefer)
    app.show.answer(data, lambda console: _draw(console, this, profile, have, answer, verbose=verbose))
    return ExitCode.DONE if answer.recommended else ExitCode.ANSWERED_NO


def check_context(context_tokens: int, maximum: int | None) -> None:
    """Refuse a context the model was not made for.

    Raises:
        UsageError: ``bad-context`` or ``context-too-large``.
    """
    if context_tokens < 1:
        raise UsageError(f"a context of {context_tokens} tokens makes no sense", code="bad-context")
    if maximum is not None and context_tokens > maximum:
        raise UsageError(
            f"a context of {context_tokens:,} tokens is above the model's {maximum:,}",
            code="context-too-large",
            hint=f"--context {maximum} is the most; 32768 to 131072 is usual",
        )


def _record(
    name: str, profile: "ModelProfile", have: "Budget", answer: "Recommendation", *, context_tokens: int, prefer: str
) -> dict[str, Any]:
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
    verbose: bool,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    where = f"{machine.name}" if machine.source != "detected" else f"this machine ({platform.machine()})"
    console.print(
        Text.assemble((profile.title, "bold"), f" on {where}: usable {memory(have.ram_bytes)} RAM"
                      f" + {memory(have.vram_bytes)} VRAM = {storage(have.total_bytes)}")
    )  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("Quant", no_wrap=True)
    table.add_column("Download", justify="right", no_wrap=True)
    table.add_column("Needs (GB)", justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Why", overflow="fold")
    for verdict in answer.verdicts:
        chosen = verdict.quant == answer.recommended
        table.add_row(
            Text(verdict.quant, style="bold" if chosen else ""),
            "unknown" if verdict.download_bytes is None else storage(verdict.download_bytes),
            _need(verdict),
            Text(verdict.fit, style=_COLOURS[verdict.fit]),
            Text("; ".join(verdict.reasons), style="dim" if verdict.fit == "unsupported" else ""),
        )
    console.print(table)
    if answer.recommended:
        console.print(Text.assemble(("recommended: ", "bold"), (answer.recommended, "bold green")))
    else:
        console.print(Text("recommended: none", style="bold"))
        for way in answer.ways_out:
            console.print(f"  - {way}", markup=False)
    if verbose:
        _draw_arithmetic(console, profile, have, answer)


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
        console.print(
            f"  {verdict.quant}: {storage(verdict.download_bytes)} x {1 + profile.margin.low:.2f} ="
            f" {storage(verdict.need_low_bytes)}, x {1 + profile.margin.high:.2f} ="
            f" {storage(verdict.need_high_bytes)}; exact ledger {storage(verdict.ledger_bytes)}",
            markup=False,
        )
