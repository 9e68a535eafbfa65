"""``kimigguf bench``: how fast a running server is, by its own clock."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimigguf.cli.app import App
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode, KimiggufError, UsageError

if TYPE_CHECKING:
    from kimigguf.engines.bench import Shape
    from kimigguf.engines.bench_client import BenchClient
    from kimigguf.engines.bench_report import Report
    from kimigguf.engines.bench_target import Target
    from kimigguf.engines.registry import Entry
    from kimigguf.speed.samples import Rejected, Sample


@click.command("bench", short_help="Measure how fast a running server is.")
@click.option("--name", help="The server of this name; the one that runs by default.")
@click.option("--url", help="Any llama-server, :8081 on this machine, or another OpenAI-compatible server.")
@click.option("--depths", metavar="N,N,...", help="Tokens of context before what is measured.  [default: 0,4096]")
@click.option("--repeat", type=click.IntRange(1, 1000), default=3, show_default=True, help="Conversations per depth.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="A file that holds the API key; KIMIGGUF_API_KEY holds the key itself.",
)
@output_options
@click.pass_obj
def command(
    app: App, *, name: str | None, url: str | None, depths: str | None, repeat: int, api_key_file: Path | None
) -> int:
    """Measure a running server: time to the first token, prompt and decode tokens per second, peak memory.

    At each depth it holds a conversation of two turns. The first is cold: a prompt that was never sent. The second is
    warm: the next turn, on top of what the server still has. Each turn is 512 new tokens of prompt and 64 generated.
    What it finds is kept, and `recommend` and `plan` show it as measured here.

    \b
    Examples:
      kimigguf bench
      kimigguf bench --depths 0,4096,32768 --repeat 5
      kimigguf bench --url http://127.0.0.1:8080 --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.cli.bench_show import draw
    from kimigguf.engines.bench import Shape, chosen_depths
    from kimigguf.engines.bench_client import BenchClient
    from kimigguf.engines.bench_report import to_data
    from kimigguf.engines.bench_target import look_at
    from kimigguf.engines.endpoint import sent_in_the_clear

    asked = None if depths is None else _parsed(depths)
    entry, address = _chosen(app, name, url)
    shape = Shape()
    trust = entry.address.trust if entry is not None else None
    key = _key(app, entry, api_key_file)
    if warning := sent_in_the_clear(address, key):
        app.show.note(warning)
    with BenchClient(address, key, tls=trust) as client:
        target = look_at(client, entry, _quants(app))
        chosen = chosen_depths(asked, target, shape)
        report, ended = _run(app, client, target, chosen, repeat=repeat, shape=shape)
    if isinstance(ended, KimiggufError) and not (report.speeds or report.rejected):
        raise ended
    saved, problem = (None, None) if ended is not None or report.why_not_kept else _save(app, report)
    data = {
        "schema": "kimigguf.bench/1",
        **to_data(report),
        "ended": None if ended is None else getattr(ended, "code", "interrupted"),
        "saved": None if saved is None else str(saved),
        "not_saved": None
        if saved
        else ("it did not come to its end" if ended else report.why_not_kept or str(problem)),
    }
    app.show.answer(data, lambda console: draw(console, report, data))
    if error := problem or (ended if isinstance(ended, KimiggufError) else None):
        raise error
    if ended is not None:
        app.show.note("interrupted")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if report.is_measured else ExitCode.ANSWERED_NO


def _run(
    app: App, client: "BenchClient", target: "Target", depths: tuple[int, ...], *, repeat: int, shape: "Shape"
) -> tuple["Report", BaseException | None]:
    """What was measured until the end, or until an interrupt or a failure, which comes with it."""
    from kimigguf.engines.bench import measure
    from kimigguf.engines.bench_report import loaded_columns, make_report
    from kimigguf.hardware.detect import PATIENT_LIMIT_SECONDS, detect
    from kimigguf.hardware.fingerprint import fingerprint
    from kimigguf.hardware.usage import PeakWatch

    here = target.elsewhere is None
    machine = fingerprint(detect(environ=app.environ, limit_seconds=PATIENT_LIMIT_SECONDS)) if here else None
    found: list[Sample | Rejected] = []
    ended: BaseException | None = None
    with app.show.progress() as listen, PeakWatch(target.pid, app.environ) as watch:
        try:
            for one in measure(client, target, depths, repeat=repeat, shape=shape, listen=listen):
                found.append(one)  # noqa: PERF402 -- what is there is kept when the next one fails
        except (KeyboardInterrupt, KimiggufError) as error:
            ended = error
    return make_report(target, machine, found, watch.peaks, loaded_columns(target.log)), ended


def _save(app: App, report: "Report") -> tuple[Path | None, KimiggufError | None]:
    """Where the measurement was written, or why it could not be: the figures are shown all the same."""
    from kimigguf.engines.bench_report import to_run
    from kimigguf.engines.registry import now
    from kimigguf.speed.measured import save

    try:
        return save(to_run(report, now()), app.environ), None
    except KimiggufError as error:
        return None, error


def _parsed(text: str) -> tuple[int, ...]:
    """The depths in ``0,4096``.

    Raises:
        UsageError: ``bad-depths``.
    """
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"{text!r} is no list of depths", code="bad-depths", hint="numbers of tokens, such as --depths 0,4096,32768"
        )
    return tuple(int(word) for word in words)


def _chosen(app: App, name: str | None, url: str | None) -> tuple["Entry | None", str]:
    """The server as the registry knows it, if it does, and its address.

    Raises:
        UsageError: ``name-and-url``, ``no-server``, ``which-server``, ``bad-url``.
    """
    from urllib.parse import urlsplit

    from kimigguf.engines.endpoint import base_url
    from kimigguf.engines.registry import entries, find
    from kimigguf.engines.session import servers_folder

    folder = servers_folder(app.environ)
    if url is None:
        entry = find(folder, name)
        return entry, entry.address.url
    if name is not None:
        raise UsageError("give either --name or --url", code="name-and-url")
    asked = urlsplit(base_url(url))
    own = {"127.0.0.1", "localhost", "::1"}
    for entry in entries(folder):
        if entry.port == asked.port and asked.hostname in own | {entry.host}:
            return entry, url
    return None, url


def _key(app: App, entry: "Entry | None", file: Path | None) -> str | None:
    from kimigguf.engines.keys import read_keys

    if file is None and entry is not None and entry.api_key_file:
        file = Path(entry.api_key_file)
    return app.environ.get("KIMIGGUF_API_KEY") if file is None else read_keys(file)[0]


def _quants(app: App) -> tuple[str, ...]:
    """The names of all quants that the catalogue knows, the longest first: one may end like another."""
    from kimigguf.catalogue.profiles import load_model

    names = [quant.name for quant in load_model("kimi-k3", app.environ).quants]
    return tuple(sorted(names, key=len, reverse=True))
