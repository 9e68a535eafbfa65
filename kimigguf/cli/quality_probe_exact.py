"""``kimigguf quality-probe exact``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.models_option import models_option
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.probe.teacher_forced import Exact


@click.command("exact", short_help="Compare two local models token by token, with llama.cpp's own tool.")
@click.argument("candidate", metavar="QUANT|PATH")
@click.argument("arguments", metavar="[-- LLAMA_ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--reference", metavar="QUANT|PATH", help="The model to hold it against: a higher quant.")
@click.option("--logits", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Keep the reference's logits here, or take them from here where they are its own.")  # fmt: skip
@click.option("--text", "text_file", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
              help="What both read, such as your own work; a suite's questions if not given.")  # fmt: skip
@click.option("--suite", "suite_name", metavar="NAME|FILE",
              help="Whose questions are read; standard if not given.")  # fmt: skip
@click.option("--context", "context_tokens", type=click.IntRange(16),
              help="Tokens in a chunk, whose second half is scored; 512 if not given.")  # fmt: skip
@click.option("--chunks", type=click.IntRange(2), help="Most chunks to read; 20 if not given.")
@click.option("--engine-path", type=click.Path(path_type=Path), help="Folder of the llama-perplexity to use.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="A run's folder: its report and `compare` then show this too.")  # fmt: skip
@models_option
@output_options
@click.pass_obj
def exact_command(
    app: App,
    *,
    candidate: str,
    arguments: tuple[str, ...],
    reference: str | None,
    logits: Path | None,
    text_file: Path | None,
    suite_name: str | None,
    context_tokens: int | None,
    chunks: int | None,
    engine_path: Path | None,
    out: Path | None,
    models_dir: Path | None,
) -> int:
    """Hold a local quant against a higher one, token by token, over the same text (teacher-forced).

    llama.cpp's llama-perplexity does the work: how far the candidate's probabilities are from the reference's
    (Kullback-Leibler divergence), and how often both hold the same token for the likeliest. One model is in memory at a
    time. The logits take about 2 bytes for each scored token and word of the vocabulary (84 MB a chunk for Kimi K3);
    --logits keeps them, so that one reference serves many quants, on other machines too (with the .json beside the
    file, which says whose they are: another --reference, --text, --context or --chunks is refused). What stands after
    -- goes to llama-perplexity, for placement.

    \b
    Examples:
      kimigguf quality-probe exact UD-IQ1_M --reference UD-Q2_K_XL --out exact
      kimigguf quality-probe exact UD-IQ1_S --logits q2.logits -- -ngl 99 -cmoe
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.probe.teacher_forced import Request, compare, record, write

    if reference is None and logits is None:
        raise click.UsageError("Missing option '--reference' (or '--logits' with those of an earlier run).")
    # What kept logits were made from is theirs to say, unless something else is named.
    named = text_file is not None or suite_name is not None or logits is None or not logits.exists()
    request = Request(
        candidate=_model(app, candidate, models_dir),
        reference=None if reference is None else _model(app, reference, models_dir),
        text=_text(app, text_file, suite_name or "standard") if named else None,
        logits=logits,
        context_tokens=context_tokens,
        chunks=chunks,
        arguments=arguments,
        engine_path=engine_path,
    )
    with app.show.progress() as listen:
        found = compare(request, app.environ, listen)
    answer = record(found)
    if out is not None:
        write(out, answer)
    app.show.answer(answer, lambda console: _draw(console, found))
    return ExitCode.DONE


def _model(app: App, text: str, models_dir: Path | None) -> Path:
    from kimigguf.cli.chosen_set import DEFAULT_MODEL, Wanted, chosen_set

    return chosen_set(app, Wanted(text=text, models_dir=models_dir, model_name=DEFAULT_MODEL)).first


def _text(app: App, text_file: Path | None, suite_name: str) -> str:
    from kimigguf.probe.suites import load_suite
    from kimigguf.probe.teacher_forced import suite_text

    if text_file is None:
        return suite_text(load_suite(suite_name, app.environ))
    try:
        return text_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {text_file}", code="unreadable-file", cause=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{text_file} is not UTF-8", code="unreadable-file", cause=str(error)) from error


def _draw(console: "Console", found: "Exact") -> None:
    from rich import box
    from rich.table import Table

    from kimigguf.probe.divergence import in_words, ratio_note

    what, size = found.divergence, found.logits
    console.print(f"candidate  {found.candidate}", markup=False)
    console.print(f"reference  {found.reference or 'its logits, from a file'}", markup=False)
    console.print(f"read       {size.chunks} chunks of {size.context_tokens} tokens, {size.scored_tokens:,} scored")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("standard error", justify="right")
    for name, estimate, form in (
        ("mean divergence, nats", what.mean, "{:.4f}"),
        ("same likeliest token", what.same_top, "{:.2%}"),
        ("perplexity, candidate", what.candidate_perplexity, "{:.3f}"),
        ("perplexity, reference", what.reference_perplexity, "{:.3f}"),
        ("perplexity, ratio", what.perplexity_ratio, "{:.4f}"),
        ("probability, rms change", what.probability_rms, "{:.2%}"),
    ):
        table.add_row(name, form.format(estimate.mean), "± " + form.format(estimate.error))
    for name, value in (("median", what.median), ("99 % of tokens below", what.percentile_99), ("worst", what.maximum)):
        table.add_row(f"divergence, {name}", f"{value:.4f}", "")
    console.print(table)
    console.print(f"by the rough scale in use (0.01, 0.05, 0.1 nats): {in_words(what.mean.mean)}", markup=False)
    if (note := ratio_note(what)) is not None:
        console.print(note, markup=False)
