"""The plan as a file: what ``plan --json`` prints and ``serve --plan`` replays, and what must still hold for that."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kimigguf.errors import UsageError
from kimigguf.hardware.fingerprint import Card, Fingerprint, differences, fingerprint
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.layout import HOST
from kimigguf.placement.budget import Budget, budget
from kimigguf.placement.placed import device_need_bytes, host_have_bytes, resident_bytes
from kimigguf.placement.plan import Plan, PlannedFile
from kimigguf.units import memory
from kimigguf.whole_file import write_whole

_MAX_BYTES: Final = 16 << 20


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; its ``schema`` is in it."""
    from pydantic import TypeAdapter  # noqa: PLC0415 -- kept out of `kimigguf --help`

    record: dict[str, Any] = TypeAdapter(Plan).dump_python(plan, mode="json")
    return record


def write_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` whole or not at all, readable by its owner alone."""
    from pydantic import TypeAdapter  # noqa: PLC0415 -- kept out of `kimigguf --help`

    write_whole(path, TypeAdapter(Plan).dump_json(plan, indent=2), mode=0o600)


def load_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: ``bad-plan``, naming each bad key and what it should be; ``plan-says-no`` for the answer of a
            ``plan --json`` that found no room.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    hint = "make one with: kimigguf plan QUANT --json > plan.json"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large to be a plan", code="bad-plan", hint=hint)
        text = path.read_bytes()
        _refuse_shortfall(path, text)
        plan = TypeAdapter(Plan).validate_json(text, extra="ignore")
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}", code="bad-plan", cause=error.strerror, hint=hint) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()[:8]
        )
        raise UsageError(f"{path} is no valid plan", code="bad-plan", cause=problems, hint=hint) from error
    if problem := _contradiction(plan):
        raise UsageError(f"{path} is no valid plan", code="bad-plan", cause=problem, hint=hint)
    return plan


def _refuse_shortfall(path: Path, text: bytes) -> None:
    """A shell writes ``plan --json > plan.json`` whatever the answer is: one that says no is told as that."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # no JSON: the plan's own reader says so, and where
        return
    if isinstance(data, dict) and str(data.get("schema")).startswith("kimigguf.shortfall/"):
        raise UsageError(
            f"{path} says that {data.get('quant') or 'the model'} does not fit",
            code="plan-says-no",
            cause=str(data.get("reason") or "kimigguf plan found no room for it"),
            hint="find what fits with: kimigguf recommend",
        )


def remake_commands(plan: Plan) -> str:
    """The commands that make a plan again with its own settings, into plan.json, after bringing its files here.

    What is asked for is what the plan ended up with, so that nothing has to give way a second time.
    """
    settings = plan.settings
    words = ["--context", str(settings.context_tokens), "--slots", str(settings.slots)]
    words += ["--kv-type", str(settings.kv_type), "--ubatch", str(settings.ubatch_tokens)]
    here = plan.model.folder is not None
    target = shlex.quote((plan.model.folder if here else plan.model.quant) or "QUANT")
    bring = "" if here else f"kimigguf download {target} && "
    return f"{bring}kimigguf plan {target} {' '.join(words)} --json > plan.json"


def _contradiction(plan: Plan) -> str | None:
    """What the types cannot say. Names are joined to a folder and given to an engine, so none may point out of it."""
    for file in plan.model.files:
        if Path(file.name).name != file.name or not file.name.isprintable():
            return "model.files: should be plain names of shards"
    count = len(plan.layout.devices)
    places = [place for layer in plan.layout.layers for place in (layer.trunk, layer.experts)]
    places += [plan.layout.head, *(device for _, device in plan.layout.moved), *(r.device for r in plan.ledger.rows)]
    if any(place is not HOST and not 0 <= place < count for place in places):
        return f"layout: names a device that is none of its {count}"
    sizes = (plan.settings.context_tokens, plan.settings.slots, plan.settings.ubatch_tokens, plan.settings.batch_tokens)
    if min(sizes) < 1 or plan.settings.checkpoints < 0 or plan.settings.prompt_cache_bytes < 0:
        return "settings: context, slots and batches should be at least 1, caches not negative"
    return None


def changes(
    plan: Plan, machine: Machine, *, have: Budget | None = None, files: Sequence[PlannedFile] | None = None
) -> tuple[str, ...]:
    """What differs now from what the plan was made for, in words; empty where it can be replayed as it stands.

    Args:
        plan: The plan to replay.
        machine: The machine as it is now.
        have: Its budget, if reserves make it differ from ``budget(machine)``.
        files: The set as it lies on disk now, in load order; None leaves files unchecked.
    """
    have = have or budget(machine)
    return (*_machine_changes(plan, machine, have), *(_file_changes(plan, files) if files is not None else ()))


def _machine_changes(plan: Plan, machine: Machine, have: Budget) -> list[str]:
    planned = zip(plan.machine.device_names, plan.machine.device_bytes, strict=False)
    then = Fingerprint(
        ram_bytes=plan.machine.ram_bytes,
        cards=tuple(Card(name=name, total_bytes=size) for name, size in planned),
    )
    found = [*differences(then, fingerprint(machine), told_by="the plan")]
    return found or _too_little(plan, have)


def _too_little(plan: Plan, have: Budget) -> list[str]:
    """The machine is the same; what others use of it now may not be."""
    found: list[str] = []
    for index, (name, device) in enumerate(zip(plan.layout.devices, have.devices, strict=False)):
        need, usable = device_need_bytes(plan.ledger, index), device.usable_bytes
        if usable is not None and need > usable:
            found.append(f"{name}: the plan needs {memory(need)}, and {memory(usable)} are usable now")
    # Experts on the host lie in the page cache: they may be dropped and read again, the rest may not.
    need = resident_bytes(plan.ledger) if plan.streamed_bytes else plan.ledger.total_bytes(HOST)
    usable = host_have_bytes(plan.ledger, have)
    if usable is not None and need > usable:
        beside = " beside what the devices take of it" if usable != have.ram_bytes else ""
        found.append(f"RAM: the plan needs {memory(need)}, and {memory(max(0, usable))} are usable now{beside}")
    return found


def _file_changes(plan: Plan, files: Sequence[PlannedFile]) -> list[str]:
    now = {file.name: file for file in files}
    found = [f"{file.name}: not in the plan" for file in files if file.name not in {f.name for f in plan.model.files}]
    for file in plan.model.files:
        other = now.get(file.name)
        if other is None:
            found.append(f"{file.name}: missing")
        elif other.size_bytes != file.size_bytes:
            found.append(f"{file.name}: {other.size_bytes} bytes now, {file.size_bytes} in the plan")
        elif file.sha256 and other.sha256 and file.sha256 != other.sha256:
            found.append(f"{file.name}: SHA-256 {other.sha256[:12]}... now, {file.sha256[:12]}... in the plan")
    return found
