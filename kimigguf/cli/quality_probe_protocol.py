"""``kimigguf quality-probe protocol``."""

from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.quality_probe_sides import agreed, candidate_of
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kimigguf.probe.protocol import Check
    from kimigguf.probe.protocol_session import Found


@click.command("protocol", short_help="See whether a server speaks the protocol as Kimi K3 needs it.")
@click.option("--candidate", metavar="URL", help="The server to look at; the one that you run if not given.")
@click.option("--reference", metavar="NAME|URL", help="What to hold it against; it is asked the same once.")
@click.option("--candidate-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--reference-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--max-tokens", type=click.IntRange(min=64), default=2048, show_default=True,
              help="Bound of a reply with its thinking.")  # fmt: skip
@click.option("--timeout", "timeout_seconds", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              help="Seconds of silence that end a call.")  # fmt: skip
@click.option("--budget-usd", type=click.FloatRange(min=0), metavar="USD", help="Never spend more on the reference.")
@click.option("--yes", is_flag=True, help="Spend what it costs without being asked.")
@output_options
@click.pass_obj
def protocol_command(
    app: App,
    *,
    candidate: str | None,
    reference: str | None,
    candidate_model: str | None,
    reference_model: str | None,
    max_tokens: int,
    timeout_seconds: float,
    budget_usd: float | None,
    yes: bool,
) -> int:
    """Ask a dozen short requests and look at how the replies come, not at whether they are clever.

    Finish reasons, thinking apart from the answer and taken back in later turns, tool calls with and without streaming,
    two at once and to the end of a loop, markers of the chat format left in the text, effort, sampling, prompt tokens.
    Exits with 1 where the candidate fails what the reference does not. What one reply cannot show is unknown.

    \b
    Examples:
      kimigguf quality-probe protocol
      kimigguf quality-probe protocol --reference kimi --budget-usd 1
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.serving import DEFAULT, chat_template_arguments, load_serving
    from kimigguf.probe.protocol_session import Request, look

    serving = load_serving(DEFAULT)
    url, environ = candidate_of(app, candidate)
    request = Request(
        candidate=url,
        reference=reference,
        candidate_model=candidate_model,
        reference_model=reference_model,
        max_tokens=max_tokens,
        timeout_seconds=timeout_seconds,
        budget_usd=budget_usd,
    )
    with app.show.progress() as listen:
        found = look(
            request,
            environ,
            arguments=lambda level: chat_template_arguments(serving, level),
            agree=lambda usd, who: yes or agreed(app.show, usd, who),
            listen=listen,
        )
    app.show.answer(found.record, lambda console: draw(console, found))
    return ExitCode.ANSWERED_NO if found.worse else ExitCode.DONE


def draw(console: "Console", found: "Found") -> None:
    """Print what was seen on each side."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(f"candidate  {found.candidate.model} at {found.candidate.url}", markup=False)
    if found.reference is not None:
        console.print(f"reference  {found.reference.model} at {found.reference.url}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", overflow="fold")
    table.add_column("candidate", no_wrap=True)
    if found.there is not None:
        table.add_column("reference", no_wrap=True)
    table.add_column("seen at the candidate", overflow="fold")
    there = {one.name: one for one in found.there or ()}
    for one in found.here:
        cells = [Text(one.name), _status(one)]
        if found.there is not None:
            cells.append(_status(there[one.name]))
        table.add_row(*cells, Text(one.seen))
    console.print(table)
    if found.parity is not None:
        console.print(f"prompt tokens, candidate against reference: {found.parity}", markup=False)
    if found.spent_usd is not None:
        console.print(f"spent on the reference: ${found.spent_usd:.4f}", markup=False)
    if found.worse:
        console.print(Text(f"worse: {', '.join(found.worse)}", style="red"))
    else:
        console.print(Text("nothing fails here" if found.there is None else "nothing fails here alone", style="green"))


def _status(one: "Check") -> "Text":
    from rich.text import Text

    return Text(one.status, style={"pass": "green", "fail": "red"}.get(one.status, "yellow"))
