"""Asks the user's own engine what a plan would take: its memory report, run on header stubs with the final arguments.

llama.cpp's ``llama-fit-params`` loads a model without allocating and prints what each device would hold. It reads no
tensor data, so a sparse file with the true header answers as the real one does, before anything is downloaded.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf.engines.command import Command, device_names
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.events import Listener, Step, ignore
from kimigguf.memory.layout import HOST
from kimigguf.memory.ledger import Column, Ledger
from kimigguf.placement.plan import Plan
from kimigguf.units import MIB

if TYPE_CHECKING:
    from kimigguf.gguf_file.shards import ShardSet

TOLERANCE_PERCENT: Final = 2
TOLERANCE_FLOOR_BYTES: Final = 32 * MIB
"""On a device that holds next to nothing, alignment and the report's whole MiB are more than two percent."""
_TIMEOUT_SECONDS: Final = 300.0
_HOST: Final = "Host"
_LINE: Final = re.compile(r"^(\S+) (\d+) (\d+) (\d+)\s*$", re.MULTILINE)
_FLAG: Final = re.compile(r"--?[A-Za-z]")
_LONG_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]+")
_COLUMNS: Final = (Column.MODEL, Column.CONTEXT, Column.COMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The three columns of the engine's memory report, in bytes."""

    model_bytes: int
    context_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.of(_COLUMNS)

    def of(self, columns: Sequence[Column]) -> int:
        """The sum of some of the columns."""
        sizes = {
            Column.MODEL: self.model_bytes,
            Column.CONTEXT: self.context_bytes,
            Column.COMPUTE: self.compute_bytes,
        }
        return sum(sizes[column] for column in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDevice:
    """One device (or the host): what the ledger says beside what the engine says.

    ``unknown`` are the columns that the ledger cannot tell in full, as the compute buffer of a model that is no K3.
    """

    name: str
    engine_name: str
    ledger: Columns
    engine: Columns
    unknown: tuple[Column, ...] = ()

    @property
    def difference_bytes(self) -> int:
        """How much more the ledger counts than the engine; negative where it counts less."""
        return self.ledger.total_bytes - self.engine.total_bytes

    @property
    def agrees(self) -> bool | None:
        """Whether the columns that are known are, together, within two percent of the engine's, or within 32 MiB.

        None: they are, but not all columns are known.
        """
        ours = self.ledger.total_bytes - self.ledger.of(self.unknown)
        theirs = self.engine.total_bytes - self.engine.of(self.unknown)
        allowed = max(theirs * TOLERANCE_PERCENT // 100, TOLERANCE_FLOOR_BYTES)
        if abs(ours - theirs) > allowed:
            return False
        return None if self.unknown else True


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The ledger beside the engine's report; without ``devices`` it could not be made, and ``reason`` says why."""

    devices: tuple[ComparedDevice, ...] = ()
    reason: str | None = None
    argv: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool | None:
        """Whether every device agrees; None: unknown."""
        answers = {device.agrees for device in self.devices}
        if False in answers:
            return False
        return None if not answers or None in answers else True

    @property
    def why_unknown(self) -> str:
        """Why ``agrees`` is None, in words."""
        missing = {str(column) for device in self.devices for column in device.unknown}
        return self.reason or f"the ledger does not know all of: {', '.join(sorted(missing))}"


def report_tool(engine: FoundEngine) -> tuple[str, ...] | None:
    """How to start the memory report that comes with an engine; None for one that has none."""
    if engine.path is None or engine.kind not in {EngineKind.LLAMA_SERVER, EngineKind.LLAMA}:
        return None
    if engine.kind is EngineKind.LLAMA:
        return (engine.path, "fit-params")
    tool = beside(Path(engine.path), "llama-fit-params")
    return (str(tool),) if tool else None


def beside(program: Path, name: str) -> Path | None:
    """Another program of the same llama.cpp, in the folder of this one or of what it links to; None if not there."""
    for folder in (program.parent, program.resolve().parent):
        tool = folder / f"{name}{program.suffix if program.suffix == '.exe' else ''}"
        if tool.is_file():
            return tool
    return None


def memory_arguments(argv: Sequence[str], known: frozenset[str]) -> tuple[str, ...]:
    """Those arguments of a server's command line that the report tool takes, with their values, in their order."""
    kept: list[str] = []
    keep = False
    for word in argv:
        if _FLAG.match(word):
            keep = word in known
        if keep:
            kept.append(word)
    return tuple(kept)


def parse_report(output: str) -> dict[str, Columns]:
    """Read the report: a line per device with MiB of model, context and compute; the host's is called ``Host``."""
    return {
        match[1]: Columns(
            model_bytes=int(match[2]) * MIB, context_bytes=int(match[3]) * MIB, compute_bytes=int(match[4]) * MIB
        )
        for match in _LINE.finditer(output)
    }


def compare(ledger: Ledger, report: Mapping[str, Columns], engine_names: Sequence[str]) -> Comparison:
    """Set the ledger's devices, in order, beside the engine's of ``engine_names``, and the host beside the host."""
    if missing := [name for name in (*engine_names, _HOST) if name not in report]:
        return Comparison(reason=f"the engine's report has no line for {', '.join(missing)}")
    pairs = [*enumerate(engine_names), (HOST, _HOST)]
    return Comparison(
        devices=tuple(
            ComparedDevice(
                name="host" if device is HOST else ledger.devices[device],
                engine_name=name,
                ledger=Columns(
                    model_bytes=ledger.total_bytes(device, column=Column.MODEL),
                    context_bytes=ledger.total_bytes(device, column=Column.CONTEXT),
                    compute_bytes=ledger.total_bytes(device, column=Column.COMPUTE),
                ),
                engine=report[name],
                unknown=_unknown(ledger, device),
            )
            for device, name in pairs
        )
    )


def _unknown(ledger: Ledger, device: int | None) -> tuple[Column, ...]:
    missing = {row.column for row in ledger.unknown if row.device == device}
    return tuple(column for column in _COLUMNS if column in missing)


def verify(
    plan: Plan,
    shards: "ShardSet",
    engine: FoundEngine,
    command: Command | None,
    *,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
    listen: Listener = ignore,
) -> Comparison:
    """Run the engine's memory report for ``plan`` on stubs of ``shards`` and set it beside the plan's ledger.

    Args:
        plan: What was planned.
        shards: The headers of its files.
        engine: The engine whose tool is asked.
        command: The final command line; None if there is none for this engine.
        environ: The environment of the tool.
        extra: Further arguments of the tool, such as where its devices are to be found.
        listen: Told what goes on.
    """
    tool = report_tool(engine)
    if command is None or tool is None:
        why = "has no memory report of its own" if command is not None else "cannot be told this plan"
        return Comparison(reason=f"the engine {engine.kind} {why}, so nothing could be compared")
    from kimigguf.gguf_file.stub import write_stubs  # noqa: PLC0415 -- only for this

    listen(Step(text="asking the engine for its own memory report"))
    known = _known_flags(tool, environ)
    if known is None:
        return Comparison(reason=f"{' '.join(tool)} does not answer --help as llama.cpp's does")
    with tempfile.TemporaryDirectory(prefix="kimigguf-stubs-") as folder:
        first = write_stubs(shards, Path(folder))
        arguments = _with_model(memory_arguments(command.argv[1:], known), str(first))
        argv = (*tool, *extra, *arguments, "-fitp", "on")
        outcome = _run(argv, environ)
    if isinstance(outcome, str):
        return Comparison(reason=outcome, argv=argv)
    compared = compare(plan.ledger, parse_report(outcome.stdout), device_names(plan, engine))
    if compared.devices:
        return Comparison(devices=compared.devices, argv=argv)
    return Comparison(reason=_last_words(outcome.stderr) or compared.reason, argv=argv)


def _with_model(arguments: tuple[str, ...], path: str) -> tuple[str, ...]:
    """The same arguments for another file."""
    index = arguments.index("--model")
    return (*arguments[: index + 1], path, *arguments[index + 2 :])


def _known_flags(tool: tuple[str, ...], environ: Mapping[str, str]) -> frozenset[str] | None:
    outcome = _run((*tool, "--help"), environ)
    flags = frozenset() if isinstance(outcome, str) else frozenset(_LONG_FLAG.findall(outcome.stdout + outcome.stderr))
    return flags if "--model" in flags else None


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> "subprocess.CompletedProcess[str] | str":
    """What a run of the tool printed, or in words why it did not run to its end."""
    try:
        return subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} gave no answer within {_TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        return f"{argv[0]} does not run here: {error.strerror}"


def _last_words(stderr: str) -> str | None:
    """The line in which the tool says why it gave up."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"error|fail|invalid|unknown", line, re.IGNORECASE)]
    return f"the engine's report failed: {(wrong or lines)[0][:300]}" if lines else None
