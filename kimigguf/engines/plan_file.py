"""Reads and writes the plan as a file: what ``plan --json`` prints and ``serve --plan`` replays."""

import os
from pathlib import Path
from typing import Final

from kimigguf.errors import UsageError
from kimigguf.placement.plan import Plan

_MAX_BYTES: Final = 16 << 20


def read_plan(path: Path) -> Plan:
    """The plan in ``path``.

    Raises:
        UsageError: ``bad-plan``, naming each bad key and what it should be.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large to be a plan", code="bad-plan")
        plan = TypeAdapter(Plan).validate_json(path.read_bytes(), extra="ignore")
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}", code="bad-plan", cause=error.strerror) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()[:8]
        )
        raise UsageError(
            f"{path} is no valid plan",
            code="bad-plan",
            cause=problems,
            hint="make one with: kimigguf plan QUANT --json > plan.json",
        ) from error
    if not plan.model.files or any(Path(file.name).name != file.name for file in plan.model.files):
        # The names are joined to a folder and given to an engine: no plan may point outside of it.
        raise UsageError(f"{path} is no valid plan", code="bad-plan", cause="model.files: plain names of shards")
    return plan


def write_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` whole or not at all, readable by its owner alone."""
    from pydantic import TypeAdapter  # noqa: PLC0415 -- kept out of `kimigguf --help`

    part = path.with_name(path.name + f".{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(TypeAdapter(Plan).dump_json(plan, indent=2))
    part.replace(path)
