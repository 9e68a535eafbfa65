"""``kimigguf quality-probe``."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.quality_probe_exact import exact_command
from kimigguf.cli.quality_probe_protocol import protocol_command
from kimigguf.cli.quality_probe_sides import agreed, candidate_of
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, MachineError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


@click.group(
    "quality-probe", invoke_without_command=True, short_help="Compare a running quant with a reference endpoint."
)
@click.option("--candidate", metavar="URL", help="The server to judge; the one that you run if not given.")
@click.option("--reference", metavar="NAME|URL",
              help="What to judge it by (kimi, comet, openrouter or an address); it is asked twice.")  # fmt: skip
@click.option("--candidate-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--reference-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--suite", "suite_name", metavar="NAME|FILE", default="quick", show_default=True,
              help="What to ask: quick, standard, tools, long, basics, or your own.")  # fmt: skip
@click.option("--seed", type=int, help="Draw other questions from a generated suite (standard).")
@click.option("--repeat", "repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds of it.")
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.05, show_default=True,
              help="The difference in a share (0.05 = 5 points) that you still call the same.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=1), help="Bound of an answer with its thinking.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Sent to both; each one's own if not given.")
@click.option("--parallel", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Questions at once per arm; arms at loopback addresses take turns.")  # fmt: skip
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
              help="Hard stop for what this run spends on reference and judge; without a question.")  # fmt: skip
@click.option("--token-level", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Also compare the first tokens of N answers, where both sides give log-probabilities.")  # fmt: skip
@click.option("--costs", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
              help="Your prices (TOML): what a solved task costs on either side, and the break-even.")  # fmt: skip
@click.option("--judge", metavar="NAME|URL",
              help="Who compares answers to questions that have a rubric; its opinion is shown apart.")  # fmt: skip
@click.option("--judge-model", metavar="NAME", help="The model's name there; needed where there are several.")
@click.option("--yes", is_flag=True, help="Spend what it costs without being asked.")
@output_options
@click.pass_context
def command(
    context: click.Context,
    *,
    candidate: str | None,
    reference: str | None,
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
    judge: str | None,
    judge_model: str | None,
    costs: Path | None,
    token_level: int,
    yes: bool,
) -> int:
    """Say whether a running quant still answers like the reference, as far as the answers can bear it.

    Both are asked the same questions, the reference twice: what it differs from itself is the noise. Keys are read from
    KIMIGGUF_CANDIDATE_API_KEY and KIMIGGUF_REFERENCE_API_KEY, or from the variable that a named reference has
    (MOONSHOT_API_KEY, ...). What a named reference may cost is said, and confirmed, before it is asked.

    \b
    Exit code 1: worse by more than the tolerance, or nothing could be compared.
    Exit code 0: the same, better, or NOT ENOUGH SAMPLES: that is no pass, only
                 no proof of a fault. A script reads "verdict" from --json.

    \b
    Examples:
      kimigguf quality-probe --reference kimi --budget-usd 5 --out probe-iq1s
      kimigguf quality-probe --reference :8081 --suite mine.toml --json
      kimigguf quality-probe --reference :8081 --reference-run probe-iq1s
      kimigguf quality-probe --reference kimi --costs costs.toml --out probe-q2kxl
      kimigguf quality-probe compare probe-iq1s probe-q2kxl --out compared.html

    \b
    A file for --costs (a key left out is not counted, and said not to be):
      tasks_per_month = 20000
      correction_usd = 2.0            # to put right by hand what was not solved
      [candidate]
      watts = 1100                    # or usd_per_hour, paid while it answers
      usd_per_kwh = 0.30
      storage_usd_per_month = 20
      operations_usd_per_month = 400  # write-off, rent, somebody's time
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    if context.invoked_subcommand is not None:
        return ExitCode.DONE
    if reference is None:
        raise click.UsageError("Missing option '--reference'.", context)
    app: App = context.obj
    url, environ = candidate_of(app, candidate)
    _check_address(url, reference)
    from kimigguf.probe.judge import sentence
    from kimigguf.probe.report import draw
    from kimigguf.probe.session import Request, probe

    request = Request(
        candidate=url,
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
        judge=judge,
        judge_model=judge_model,
        costs=costs,
        token_level=token_level,
    )
    with app.show.progress() as listen:
        found = probe(request, environ, agree=lambda usd, who: yes or agreed(app.show, usd, who), listen=listen)
    if out is not None:
        app.show.note(f"the report is in {out / 'report.html'}")

    def shown(console: "Console") -> None:
        draw(console, found.scores, found.candidate, found.reference)
        if found.opinion is not None:
            console.print(sentence(found.opinion), markup=False)

    app.show.answer(found.answer, shown)
    return ExitCode.ANSWERED_NO if found.scores.verdict in {"worse", "unknown"} else ExitCode.DONE


def _check_address(candidate: str, reference: str) -> None:
    """Refuse what ``chat`` refuses too: a bare word would be looked up as a host for as long as a name server takes.

    Raises:
        UsageError: ``bad-url``.
    """
    from kimigguf.engines.endpoint import base_url

    try:
        base_url(candidate)
    except UsageError as error:
        words = ["kimigguf", "quality-probe", "--candidate", "http://127.0.0.1:8080", "--reference", reference]
        raise UsageError(error.message, code=error.code, cause=error.cause, hint=shlex.join(words)) from error


@command.command("compare", short_help="Put finished runs with one reference side by side.")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the page to this file.")
@output_options
@click.pass_obj
def compare_command(app: App, *, folders: tuple[Path, ...], out: Path | None) -> int:
    """Put finished runs (their --out folders) side by side: right answers against size and speed.

    Sizes are known for runs whose server told its file, or whose folder is named after a quant.

    \b
    Example:
      kimigguf quality-probe compare probe-iq1s probe-q2kxl --out compared.html
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.catalogue.profiles import load_model
    from kimigguf.probe.compare import compare, compare_page, draw, record

    comparison = compare(folders, load_model(environ=app.environ))
    if out is not None:
        try:
            out.write_text(compare_page(comparison), encoding="utf-8")
        except OSError as error:
            raise MachineError(
                f"cannot write {out}", code="cannot-write", cause=error.strerror, hint="choose another --out FILE"
            ) from error
        app.show.note(f"the page is {out}")
    app.show.answer(record(comparison), lambda console: draw(console, comparison))
    return ExitCode.DONE


command.add_command(exact_command)
command.add_command(protocol_command)
