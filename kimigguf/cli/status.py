"""``kimigguf status``: the servers that run here, and how they are."""

import time
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.registry import Entry


@click.command("status", short_help="Show the servers that run on this machine.")
@click.option("--name", help="Only this server.")
@output_options
@click.pass_obj
def command(app: App, name: str | None) -> int:
    """Show every server of yours on this machine: state, memory planned and now, slots, tokens.

    Exit code 0 if all are ready, 1 if one is not or none runs.

    \b
    Example:
      kimigguf status
      kimigguf status --name kimi-k3-8080 --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.registry import entries
    from kimigguf.engines.session import servers_folder

    running = (chosen_server(app, name),) if name else entries(servers_folder(app.environ))
    records = [_record(entry) for entry in running]
    data = {"schema": "kimigguf.status/1", "servers": records}
    app.show.answer(data, lambda console: _draw(console, records))
    return ExitCode.DONE if records and all(r["state"] == "ready" for r in records) else ExitCode.ANSWERED_NO


def _record(entry: "Entry") -> dict[str, Any]:
    from pathlib import Path

    from kimigguf.engines.keys import read_keys
    from kimigguf.engines.registry import life_of, observe
    from kimigguf.errors import UsageError

    try:
        key = read_keys(Path(entry.api_key_file))[0] if entry.api_key_file else None
    except UsageError:  # the file has gone since: what needs the key stays unknown
        key = None
    return {
        "name": entry.name,
        "state": str(life_of(entry)),
        "model": entry.alias,
        "quant": entry.quant,
        "url": entry.address.url,
        "pid": entry.engine.pid,
        "supervisor_pid": entry.supervisor.pid,
        "started_at": entry.started_at,
        "uptime_seconds": round(max(0.0, time.time() - entry.engine.started)),
        "log": entry.log,
        **observe(entry, key),
    }


def _draw(console: "Console", records: list[dict[str, Any]]) -> None:
    from kimigguf.units import duration, memory

    if not records:
        console.print("no server is running; start one with: kimigguf serve UD-IQ1_M --detach", markup=False)
    for record in records:
        unknown = "unknown"
        slots = f"{record['slots_busy']} of {record['slots']}" if record["slots"] is not None else unknown
        tokens = record["generated_tokens"]
        for line in (
            f"{record['name']}: {record['state']}, {record['url']}, up {duration(record['uptime_seconds'])}",
            f"  model      {record['model']}" + (f" ({record['quant']})" if record["quant"] else ""),
            f"  memory     {memory(record['planned_bytes'])} planned, {memory(record['resident_bytes'])} resident now",
            f"  slots      {slots} busy",
            f"  generated  {unknown if tokens is None else f'{tokens:,} tokens'}",
            f"  log        {record['log']}",
        ):
            console.print(line, markup=False, soft_wrap=True)
