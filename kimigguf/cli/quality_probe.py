"""``kimigguf quality-probe``."""

import sys
from pathlib import Path

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode


@click.command("quality-probe", short_help="Compare a running quant with a reference endpoint.")
@click.option("--candidate", metavar="URL", required=True, help="The server to judge, such as http://127.0.0.1:8080.")
@click.option("--reference", metavar="NAME|URL", required=True,
              help="What to judge it by (kimi, openrouter or an address); it is asked twice.")  # fmt: skip
@click.option("--candidate-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--reference-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--suite", "suite_name", metavar="NAME|FILE", default="quick", show_default=True, help="What to ask.")
@click.option("--seed", type=int, help="Draw other questions from a generated suite (standard).")
@click.option("--repeat", "repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds of it.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.05, show_default=True,
              help="The difference in a share (0.05 = 5 points) that you still call the same.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=1), help="Bound of an answer with its thinking.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Sent to both; each one's own if not given.")
@click.option("--parallel", type=click.IntRange(1, 64), default=1, show_default=True, help="Questions at once per arm.")
@click.option("--timeout", "timeout_seconds", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              help="Seconds of silence that end a call.")  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for calls, report.json and report.html; a stopped run goes on.",
)
@click.option("--reference-run", type=click.Path(path_type=Path), metavar="DIR",
              help="Take the reference's answers from the --out folder of an earlier run.")  # fmt: skip
@click.option("--budget-usd", type=click.FloatRange(min=0), metavar="USD",
              help="Never spend more than this on the reference; no question is asked then.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Spend what it costs without being asked.")
@output_options
@click.pass_obj
def command(
    app: App,
    *,
    candidate: str,
    reference: str,
    candidate_model: str | None,
    reference_model: str | None,
    suite_name: str,
    seed: int | None,
    repeats: int,
    tolerance: float,
    max_tokens: int | None,
    temperature: float | None,
    parallel: int,
    timeout_seconds: float,
    out: Path | None,
    reference_run: Path | None,
    budget_usd: float | None,
    yes: bool,
) -> int:
    """Say whether a running quant still answers like the reference, as far as the answers can bear it.

    Both are asked the same questions, the reference twice: what it differs from itself is the noise. Exits with 1 when
    the candidate is worse by more than the tolerance; too few samples are said to be too few. Keys are read from
    KIMIGGUF_CANDIDATE_API_KEY and KIMIGGUF_REFERENCE_API_KEY, or from the variable that a named reference has
    (MOONSHOT_API_KEY, ...). What a named reference may cost is said, and confirmed, before it is asked.

    \b
    Examples:
      kimigguf quality-probe --candidate http://127.0.0.1:8080 --reference kimi --budget-usd 5 --out probe-iq1s
      kimigguf quality-probe --candidate :8080 --reference :8081 --suite mine.toml --json
      kimigguf quality-probe --candidate :8080 --reference :8081 --suite standard --reference-run probe-iq1s
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.probe.report import draw
    from kimigguf.probe.session import Request, probe

    request = Request(
        candidate=candidate,
        reference=reference,
        candidate_model=candidate_model,
        reference_model=reference_model,
        suite=suite_name,
        seed=seed,
        repeats=repeats,
        tolerance=tolerance,
        max_tokens=max_tokens,
        temperature=temperature,
        parallel=parallel,
        timeout_seconds=timeout_seconds,
        out=out,
        reference_run=reference_run,
        budget_usd=budget_usd,
    )
    with app.show.progress() as listen:
        found = probe(request, app.environ, agree=lambda usd: yes or _agreed(usd), listen=listen)
    if out is not None:
        app.show.note(f"the report is in {out / 'report.html'}")
    app.show.answer(found.answer, lambda console: draw(console, found.scores, found.candidate, found.reference))
    return ExitCode.ANSWERED_NO if found.scores.verdict == "worse" else ExitCode.DONE


def _agreed(usd: float) -> bool:
    """Ask whoever sits at the terminal; nobody there is a no."""
    return sys.stdin.isatty() and click.confirm(f"The reference may cost up to ${usd:.2f}. Go on?", err=True)
