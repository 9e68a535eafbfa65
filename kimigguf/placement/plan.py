"""The plan: everything ``serve`` needs to do the same thing again, as one value. ``plan_file`` gives it a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kimigguf.errors import UsageError
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.layout import Layout
from kimigguf.memory.ledger import Ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import Budget, budget
from kimigguf.placement.place import place
from kimigguf.placement.placed import Placed, Policy, Shortfall
from kimigguf.placement.streaming import can_stream

if TYPE_CHECKING:
    from kimigguf.gguf_file.shards import ShardSet

SCHEMA: Final = "kimigguf.plan/1"
_USUAL_CONTEXT_TOKENS: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One shard: its name, size and, where known, SHA-256 (lower-case hex)."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Which files. ``folder`` is absolute, None while they are not on this machine. The first file is the one loaded.

    ``files`` is empty in a plan made from the catalogue's facts alone, before anybody asked the hub for its shards.
    """

    architecture: str
    quant: str | None
    repository: str | None
    commit: str | None
    folder: str | None
    files: tuple[PlannedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """The machine that the plan was made for, as far as a replay must match it; budgets are what the plan may use."""

    name: str
    ram_bytes: int | None
    device_names: tuple[str | None, ...]
    device_bytes: tuple[int | None, ...]
    ram_budget_bytes: int | None = None
    device_budget_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``gave_way`` lists, in order, the settings that were lowered to make it fit, in words.

    ``streamed_bytes`` of the host's experts have no room in RAM and are read from disk again and again; ``notices``
    are what a reader should know besides.
    """

    schema: Literal["kimigguf.plan/1"] = SCHEMA
    model: PlannedModel
    machine: PlannedMachine
    settings: Settings
    layout: Layout
    ledger: Ledger
    gave_way: tuple[str, ...] = ()
    streamed_bytes: int = 0
    notices: tuple[str, ...] = ()


def plan_for(
    spec: ModelSpec,
    machine: Machine,
    settings: Settings,
    *,
    model: PlannedModel,
    policy: Policy | None = None,
    have: Budget | None = None,
) -> Plan | Shortfall:
    """The plan for running a model on a machine, or what is missing. The one way from here to a placement.

    Args:
        spec: The model, from headers or from the catalogue.
        machine: Where it is to run.
        settings: What is wanted; lowered only as far as it must be.
        model: Which files these are.
        policy: By default experts may stream from a local NVMe that holds (or has room for) the files.
        have: The budget, if reserves or the like make it differ from ``budget(machine)``.

    Raises:
        UsageError: ``bad-context`` or ``context-too-large``.
    """
    check_context(settings.context_tokens, spec.context_max_tokens)
    have = have or budget(machine)
    if policy is None:
        # A described machine does not have this one's folders.
        folder = model.folder if machine.is_this_one else None
        policy = Policy(may_stream=can_stream(machine.disks, spec.weight_bytes, folder=folder))
    match place(spec, have, settings, policy=policy):
        case Placed() as placed:
            return make_plan(placed, model=model, machine=machine, have=have)
        case shortfall:
            return shortfall


def make_plan(placed: Placed, *, model: PlannedModel, machine: Machine, have: Budget) -> Plan:
    """Bind a placement to its files and its machine."""
    return Plan(
        model=model,
        machine=planned_machine(machine, have),
        settings=placed.settings,
        layout=placed.layout,
        ledger=placed.ledger,
        gave_way=placed.gave_way,
        streamed_bytes=placed.streamed_bytes,
        notices=placed.notices,
    )


def planned_machine(machine: Machine, have: Budget) -> PlannedMachine:
    """What a plan remembers of its machine."""
    accelerators = machine.accelerators or ()
    return PlannedMachine(
        name=machine.name,
        ram_bytes=machine.ram.total_bytes,
        device_names=tuple(accelerator.name for accelerator in accelerators),
        device_bytes=tuple(accelerator.total_bytes for accelerator in accelerators),
        ram_budget_bytes=have.ram_bytes,
        device_budget_bytes=tuple(device.usable_bytes for device in have.devices),
    )


def planned_model(
    shards: "ShardSet",
    *,
    folder: str | None,
    quant: str | None = None,
    repository: str | None = None,
    commit: str | None = None,
    sha256: Mapping[str, str | None] | None = None,
) -> PlannedModel:
    """A set of files as a plan names it; ``sha256`` maps shard names to their digests where they are known."""
    known = sha256 or {}
    return PlannedModel(
        architecture=shards.architecture or "",
        quant=quant,
        repository=repository,
        commit=commit,
        folder=folder,
        files=tuple(
            PlannedFile(name=file.name, size_bytes=file.size_bytes, sha256=known.get(file.name))
            for file in shards.files
        ),
    )


def usual_context(spec: ModelSpec) -> int:
    """The context of whoever asks for none, in tokens: 32,768 or, of a model made for fewer, what it was made for."""
    return min(_USUAL_CONTEXT_TOKENS, spec.context_max_tokens or _USUAL_CONTEXT_TOKENS)


def check_context(context_tokens: int, maximum: int | None) -> None:
    """Refuse a context that the model was not made for.

    Raises:
        UsageError: ``bad-context`` or ``context-too-large``.
    """
    if context_tokens < 1:
        raise UsageError(f"a context of {context_tokens} tokens makes no sense", code="bad-context")
    if maximum is not None and context_tokens > maximum:
        raise UsageError(
            f"a context of {context_tokens:,} tokens is above the model's {maximum:,}",
            code="context-too-large",
            hint=f"ask for at most --context {maximum}",
        )
