"""``kimigguf quality-probe``."""

from contextlib import closing
from pathlib import Path

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode


@click.command("quality-probe", short_help="Compare a running quant with a reference endpoint.")
@click.option("--candidate", metavar="URL", required=True, help="The server to judge, such as http://127.0.0.1:8080.")
@click.option("--reference", metavar="URL", required=True, help="The server to judge it by; it is asked twice.")
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
) -> int:
    """Say whether a running quant still answers like the reference, as far as the answers can bear it.

    Both are asked the same questions, the reference twice: what it differs from itself is the noise. Exits with 1 when
    the candidate is worse by more than the tolerance; too few samples are said to be too few. Keys are read from
    KIMIGGUF_CANDIDATE_API_KEY and KIMIGGUF_REFERENCE_API_KEY.

    \b
    Examples:
      kimigguf quality-probe --candidate http://127.0.0.1:8080 --reference https://api.moonshot.ai/v1 \\
        --reference-model kimi-k3 --repeat 3 --out probe-iq1s
      kimigguf quality-probe --candidate :8080 --reference :8081 --suite mine.toml --json
      kimigguf quality-probe --candidate :8080 --reference :8081 --suite standard --reference-run probe-iq1s
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.probe.client import Asker, Settings
    from kimigguf.probe.page import page
    from kimigguf.probe.report import draw, record
    from kimigguf.probe.run import Side, open_store, reference_calls, run, write_reports
    from kimigguf.probe.score import score
    from kimigguf.probe.suites import load_suite

    suite = load_suite(suite_name, app.environ, seed=seed)
    settings = Settings(timeout_seconds=timeout_seconds, temperature=temperature)
    with (
        closing(Asker("candidate", candidate, app.environ, settings)) as judged,
        closing(Asker("reference", reference, app.environ, settings)) as standard,
    ):
        left = Side(asker=judged, endpoint=judged.endpoint(candidate_model))
        right = Side(asker=standard, endpoint=standard.endpoint(reference_model))
        described = {
            "suite_sha256": suite.sha256,
            "candidate": [left.endpoint.url, left.endpoint.model],
            "reference": [right.endpoint.url, right.endpoint.model],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        stored = reference_calls(reference_run, suite, right.endpoint) if reference_run else ()
        with open_store(out, described) as store, app.show.progress() as listen:
            store.take_over(call for call in stored if call.repeat < repeats)
            calls = run(
                suite,
                left,
                right,
                repeats=repeats,
                parallel=parallel,
                max_tokens=max_tokens,
                store=store,
                listen=listen,
            )
    scores = score(suite, calls, tolerance=tolerance)
    answer = record(scores, left.endpoint, right.endpoint)
    if out is not None:
        html = page(scores, suite, calls, candidate=left.endpoint, reference=right.endpoint, settings=described)
        write_reports(out, answer, html)
        app.show.note(f"the report is in {out / 'report.html'}")
    app.show.answer(
        answer,
        lambda console: draw(console, scores, left.endpoint, right.endpoint),
    )
    return ExitCode.ANSWERED_NO if scores.verdict == "worse" else ExitCode.DONE
