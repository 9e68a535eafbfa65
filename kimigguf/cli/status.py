"""``kimigguf status``: the servers that run here, and how they are."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kimigguf.cli.app import App
from kimigguf.cli.chosen_server import chosen_server, key_of
from kimigguf.cli.show import output_options
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.deaths import Death
    from kimigguf.engines.registry import Entry


@click.command("status", short_help="Show the servers that run on this machine.")
@click.option("--name", help="Only this server.")
@output_options
@click.pass_obj
def command(app: App, name: str | None) -> int:
    """Show every server of yours on this machine: state, memory planned and now, what grew, slots, requests, tokens.

    Requests and tokens are counted from when it was ready, so without the self-test's. One that died by itself is
    shown for a day, until it is started again or stopped.
    Exit code 0 if all are ready, 1 if one is not or has died, or none runs.

    \b
    Example:
      kimigguf status
      kimigguf status --name kimi-k3-8080 --json
    """  # noqa: D301 -- \b is click's marker for text that must not be wrapped
    from kimigguf.engines.deaths import deaths
    from kimigguf.engines.registry import entries
    from kimigguf.engines.session import servers_folder

    folder = servers_folder(app.environ)
    running = entries(folder)
    living = {entry.name for entry in running}
    dead = [one for one in deaths(folder) if one.name not in living and name in {None, one.name}]
    if name and not dead:
        running = (chosen_server(app, name),)
    elif name:
        running = ()
    records = [_record(app, entry) for entry in running]
    died = [_died(death) for death in dead]
    data = {"schema": "kimigguf.status/1", "servers": records, "died": died}
    app.show.answer(data, lambda console: _draw(console, records, died))
    ready = bool(records) and all(r["state"] == "ready" for r in records) and not died
    return ExitCode.DONE if ready else ExitCode.ANSWERED_NO


def _died(death: "Death") -> dict[str, Any]:
    noticed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(death.noticed))
    return {
        "name": death.name,
        "model": death.alias,
        "quant": death.quant,
        "port": death.port,
        "died_at": noticed if death.seen else None,
        "noticed_at": noticed,
        "seconds_ago": round(max(0.0, time.time() - death.noticed)),
        "how": death.how,
        "log": death.log,
    }


def _record(app: App, entry: "Entry") -> dict[str, Any]:
    from kimigguf.engines.observe import observe
    from kimigguf.engines.registry import life_of

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
        **observe(entry, key_of(entry), app.environ),
    }


def _draw(console: "Console", records: list[dict[str, Any]], died: list[dict[str, Any]]) -> None:
    from kimigguf.engines.registry import TO_START

    for record in died:
        for line in _dead_lines(record):
            console.print(line, markup=False)
    if not records and not died:
        console.print(f"no server is running; {TO_START}", markup=False)
    for record in records:
        for line in _lines(record):
            console.print(line, markup=False)


def _dead_lines(record: dict[str, Any]) -> Iterator[str]:
    from kimigguf.units import duration

    ago = f"{duration(record['seconds_ago'])} ago"
    when = f"died {ago}" if record["died_at"] else f"died unseen, found {ago}"
    yield f"{record['name']}: {when}: {record['how']}"
    yield f"  log        {record['log']}"
    yield f"             see: kimigguf doctor --name {record['name']}"
    yield f"             to start it again: kimigguf restart --name {record['name']}"


def _lines(record: dict[str, Any]) -> Iterator[str]:
    from kimigguf.engines.checkup import WAITED_PERCENT
    from kimigguf.units import duration, memory

    def count(name: str, words: str) -> str:
        value = record[name]
        return f"{'unknown' if value is None else f'{value:,}'} {words}"

    def speed(what: str) -> str:
        value = record[f"{what}_tokens_per_second"]
        return f", {value:,.1f} tokens/s on average" if value else ""

    yield f"{record['name']}: {record['state']}, {record['url']}, up {duration(record['uptime_seconds'])}"
    yield f"  model      {record['model']}" + (f" ({record['quant']})" if record["quant"] else "")
    host = record["host_memory"]
    planned = f"{memory(host['planned_bytes'])} planned in RAM"
    if host["planned_bytes"] is None:
        planned = f"{memory(record['planned_bytes'])} planned in all"  # the plan is gone: what is where is not known
    yield f"  memory     {planned}, {memory(record['resident_bytes'])} resident now"
    yield from (f"             {line}" for line in _host_lines(host))
    for device in record["devices"]:
        used = f"{memory(device['used_bytes'])} of {memory(device['total_bytes'])} in use"
        name = device["name"] or "unknown"
        yield f"  {device['device']:10} {memory(device['planned_bytes'])} planned, {used}: {name}"
    pressure = record["memory_pressure"]
    words = {"failed": "runs short: ", "unknown": "unknown: "}.get(pressure["state"], "")
    yield f"  pressure   {words}{pressure['evidence']}"
    if pressure["state"] == "failed":
        yield f"             try: {pressure['hint']}"
    if (waited := record["processor_wait_percent"]) is not None and waited >= WAITED_PERCENT:
        yield f"  processors contended: for {waited:.0f} % of the last 60 s some thread had to wait for one"
        yield f"             see: kimigguf doctor --name {record['name']}"
    busy = "unknown" if record["slots"] is None else f"{record['slots_busy']} of {record['slots']}"
    yield f"  slots      {busy} busy"
    waiting = f", {record['requests_waiting']:,} waiting" if record["requests_waiting"] else ""
    yield f"  requests   {count('requests', 'begun')}, {count('requests_finished', 'finished')}{waiting}"
    yield f"  tokens     {count('prompt_tokens', 'of prompts')}{speed('prompt')}"
    yield f"             {count('generated_tokens', 'generated')}{speed('generated')}"
    yield f"  log        {record['log']}"


def _host_lines(host: dict[str, Any]) -> Iterator[str]:
    """What of the process's memory is its own, how much that has grown since it was ready, and by what."""
    from kimigguf.units import memory

    def added(size: int | None) -> str:
        return "unknown" if size is None else f"{'+' if size >= 0 else ''}{memory(size)}"

    if host["anonymous_bytes"] is not None:
        swapped = f", {memory(host['swapped_bytes'])} swapped out" if host["swapped_bytes"] else ""
        yield f"{memory(host['anonymous_bytes'])} its own, {memory(host['file_bytes'])} of mapped files{swapped}"
    growth = host["growth"]
    if growth["total_bytes"] is not None:
        yield (
            f"since it was ready {added(growth['total_bytes'])}: "
            f"context checkpoints {added(growth['checkpoint_bytes'])}, "
            f"prompt cache {added(growth['prompt_cache_bytes'])}, unexplained {added(growth['unexplained_bytes'])}"
        )
    held = [
        f"{what} {memory(host[f'{name}_bytes'])} of {memory(host[f'{name}_planned_bytes'])} planned"
        for what, name in (("context checkpoints", "checkpoint"), ("prompt cache", "prompt_cache"))
        if host[f"{name}_bytes"] is not None
    ]
    if held:
        yield f"of it now {', '.join(held)}"
