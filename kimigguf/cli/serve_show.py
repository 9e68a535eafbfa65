"""What ``serve`` shows: checks before a start, how to reach a ready server, and why something does not fit."""

import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kimigguf.cli.serve_reach import Reach, snippet
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode
from kimigguf.units import duration, memory

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.cli.app import App
    from kimigguf.engines.evidence import Check
    from kimigguf.engines.report import ComparedDevice
    from kimigguf.engines.request import Request
    from kimigguf.engines.session import Prepared, Session
    from kimigguf.placement.placed import Shortfall


def preflight_record(prepared: "Prepared") -> dict[str, Any]:
    """The checks before a start and the command, as JSON values."""
    return {
        "schema": "kimigguf.preflight/1",
        "checks": [_check(check) for check in prepared.checks],
        "command": list(prepared.command.argv),
        "plan_file": str(prepared.plan_file),
    }


def show_preflight(console: "Console", prepared: "Prepared") -> None:
    """The checks before a start and the command, for people."""
    _show_checks(console, map(_check, prepared.checks))
    console.print()
    console.print(shlex.join(prepared.command.argv), markup=False, soft_wrap=True)


def ready_record(session: "Session") -> dict[str, Any]:
    """A ready server as JSON values."""
    server, prepared = session.server, session.prepared
    plan, engine, tested = prepared.plan, prepared.engine, session.selftest
    return {
        "schema": "kimigguf.serve/1",
        "state": str(server.state),
        "url": server.address.url,
        "base_url": f"{server.address.url}/v1",
        "certificate": server.address.certificate,
        "ollama_url": _ollama_url(prepared.request.ollama_port),
        "name": prepared.name,
        "model": server.alias,
        "pid": server.pid,
        "engine": {"kind": str(engine.kind), "path": engine.path, "version": engine.version, "build": engine.build},
        "quant": plan.model.quant,
        "folder": plan.model.folder,
        "context_tokens": plan.settings.context_tokens,
        "slots": plan.settings.slots,
        "load_seconds": round(session.load_seconds, 3),
        "checks": [_check(check) for check in (*prepared.checks, *(tested.checks if tested else ()))],
        "memory": [_device(device) for device in session.memory.devices],
        "memory_unknown": session.memory.reason,
        "prompt_tokens_per_second": tested.measured.prompt_per_second if tested else None,
        "decode_tokens_per_second": tested.measured.decode_per_second if tested else None,
        "log": str(server.log),
        "plan_file": str(prepared.plan_file),
        "command": list(prepared.command.argv),
        "gave_way": list(plan.gave_way),
    }


def _ollama_url(port: int | None) -> str | None:
    from kimigguf.ollama.beside import url

    return None if port is None else url(port)


def _ollama_lines(port: int | None, model: str, *, key: bool) -> tuple[str, ...]:
    """How Ollama's clients reach it; and that they need no key, where one was made to keep others out."""
    if port is None:
        return ()
    open_to_all = ("             (no key is asked for there: every user of this machine can reach it)",) if key else ()
    return (f"  Ollama API OLLAMA_HOST={_ollama_url(port)} as {model}, for Ollama's clients", *open_to_all)


def _check(check: "Check") -> dict[str, Any]:
    return {"what": check.what, "state": str(check.state), "evidence": check.evidence, "hint": check.hint}


def _device(device: "ComparedDevice") -> dict[str, Any]:
    """One device: planned and reported bytes by the engine's own columns."""
    return {
        "device": device.name,
        "engine_name": device.engine_name,
        "planned": {
            "model_bytes": device.ledger.model_bytes,
            "context_bytes": device.ledger.context_bytes,
            "compute_bytes": device.ledger.compute_bytes,
        },
        "reported": {
            "model_bytes": device.engine.model_bytes,
            "context_bytes": device.engine.context_bytes,
            "compute_bytes": device.engine.compute_bytes,
        },
        "difference_bytes": device.difference_bytes,
        "unknown": [str(column) for column in device.unknown],
        "agrees": device.agrees,
    }


def show_ready(console: "Console", session: "Session") -> None:
    """How to reach a ready server, for people."""
    prepared, server = session.prepared, session.server
    settings, key = prepared.plan.settings, prepared.key is not None
    reach = Reach.of(session.server.address, session.prepared.request.extra)
    url = reach.url
    header = ' -H "Authorization: Bearer $KEY"' if key else ""
    _show_checks(console, ready_checks(ready_record(session)))
    for line in (
        "",
        f"ready after {duration(session.load_seconds)}: {server.alias} on {prepared.engine.version}",
        f"  base URL   {url}/v1",
        *reach.remarks,
        *_ollama_lines(prepared.request.ollama_port, server.alias, key=key),
        f"  context    {settings.stream_tokens:,} tokens in each of {settings.slots} slot(s)",
        *_speed_lines(session),
        f"  log        {server.log}",
        "",
    ):
        console.print(line, markup=False)
    for line in (
        f"  curl {reach.curl}{url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\",
        f"""    -d '{{"model":"{server.alias}","messages":[{{"role":"user","content":"Hello"}}]}}'""",
        "",
        *(
            f"  {line}"
            for line in snippet(f"{url}/v1", server.alias, needs_key=key, certificate=server.address.certificate)
        ),
        "",
        f"  from a laptop: ssh -N -L {server.address.port}:127.0.0.1:{server.address.port} THIS-MACHINE",
        f"  in a terminal: kimigguf chat --url {server.address.url}",
        "",
        "Ctrl-C stops it.",
    ):
        console.print(line, markup=False, soft_wrap=True)


def _show_checks(console: "Console", checks: Iterable[Mapping[str, Any]]) -> None:
    from rich.text import Text

    colours = {"passed": "green", "failed": "red", "unknown": "yellow"}
    for check in checks:
        state = check["state"]
        line = Text.assemble((f"{state.upper():8}", colours[state]), f"{check['what']:12} {check['evidence']}")
        console.print(line)
        if check["hint"] and state != "passed":
            console.print(f"{'':21}try: {check['hint']}", markup=False)


def ready_checks(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The checks of a ready server's record, with one for each device's memory: planned beside reported bytes."""
    if record["memory_unknown"] is not None:
        memories = [{"state": "unknown", "evidence": record["memory_unknown"]}]
    else:
        memories = [
            {"state": {True: "passed", False: "failed", None: "unknown"}[device["agrees"]], "evidence": _sizes(device)}
            for device in record["memory"]
        ]
    return [*record["checks"], *({"what": "memory", "hint": None, **found} for found in memories)]


def _sizes(device: Mapping[str, Any]) -> str:
    without = f" but for its {', '.join(device['unknown'])}" if device["unknown"] else ""
    return (
        f"{device['device']}: {memory(sum(device['planned'].values()))} planned{without}, "
        f"{memory(sum(device['reported'].values()))} reported by the engine"
    )


def show_doubts(console: "Console", record: Mapping[str, Any]) -> None:
    """The checks of a server that was started in the background that did not pass; none for one that is not ready."""
    if record["state"] == "ready":
        _show_checks(console, (check for check in ready_checks(record) if check["state"] != "passed"))


def _speed_lines(session: "Session") -> tuple[str, ...]:
    if session.selftest is None:
        return ()
    measured = session.selftest.measured
    prompt, decode = measured.prompt_per_second, measured.decode_per_second
    words = [f"{speed:,.1f} tokens/s {what}" for speed, what in ((prompt, "prompt"), (decode, "decode")) if speed]
    return (f"  speed      {', '.join(words)} (self-test, cold)",) if words else ()


def serve_detached(app: "App", request: "Request") -> int:
    """Start a server that outlives this command, and show how to reach it once it is ready."""
    from kimigguf.engines.background import start_detached
    from kimigguf.engines.session import named, state_folder, with_key

    state = state_folder(app.environ)
    with named(request, app.environ, to_start=True) as name, app.show.progress() as listen:
        # Made here, so that the key is shown on this terminal and stands in no log of the other process; and under
        # the name that nobody else has now, as the file of another server's key would be replaced.
        with named(request, app.environ):
            request = with_key(request, state / "keys" / name, listen)
        answer = start_detached(request.arguments(name), app.environ, folder=state / "logs", name=name, listen=listen)
    fits = answer["state"] == "ready"

    def human(console: "Console") -> None:
        if not fits:
            console.print(f"it does not fit: {answer['reason']}", markup=False)
            return
        show_doubts(console, answer)
        for line in (
            f"ready after {duration(answer['load_seconds'])}: {answer['model']} at {answer['base_url']}",
            *_ollama_lines(request.ollama_port, answer["model"], key=request.api_key_file is not None),
            f"  kimigguf status --name {name}",
            f"  kimigguf logs --name {name} -f",
            f"  kimigguf stop --name {name}",
        ):
            console.print(line, markup=False)

    app.show.answer(answer, human)
    return ExitCode.DONE if fits else ExitCode.ANSWERED_NO


def show_misfit(show: Show, shortfall: "Shortfall") -> int:
    """Why the model does not fit, and what to do; the exit code of that answer."""
    data = {
        "schema": "kimigguf.serve/1",
        "state": "does-not-fit",
        "need_bytes": shortfall.need_bytes,
        "have_bytes": shortfall.have_bytes,
        "missing_bytes": shortfall.missing_bytes,
        "reason": shortfall.reason,
        "gave_way": list(shortfall.gave_way),
    }

    def human(console: "Console") -> None:
        console.print(f"it does not fit: {shortfall.reason}", markup=False)
        console.print(f"{memory(shortfall.missing_bytes)} of RAM are missing", markup=False)
        console.print("kimigguf recommend says which quant fits this machine", markup=False)

    show.answer(data, human)
    return ExitCode.ANSWERED_NO
