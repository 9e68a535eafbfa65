"""Real runs as files: what ``bench`` writes, ``profiles/measured`` ships, and ``recommend`` and ``plan`` show.

One run per TOML file. A key that is not there is unknown. Sizes may be written as "594.0GB". A run that was made
elsewhere has a ``source`` that is a URL; ``bench`` writes its own name.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Final

from kimigguf import profile_files
from kimigguf.errors import MachineError, UsageError
from kimigguf.hardware.fingerprint import Fingerprint, is_such
from kimigguf.hardware.machines import give_name, without_unknown
from kimigguf.speed.samples import Clock, Speed, Warmth

KIND: Final = "measured"
BENCH: Final = "kimigguf bench"
_WHAT: Final = "measurement"
_SIZE_TOLERANCE: Final = 100
"""One part in so many: an engine's count of its tensors leaves out headers and padding; another quant differs more."""

_STEADY: Final = 1.1
"""Ends that are farther apart than this are told beside the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Which weights. ``size_bytes`` is what the files take, or the engine's own count of its tensors."""

    quant: str | None = None
    architecture: str | None = None
    size_bytes: int | None = None
    parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSettings:
    """How it was served. ``placement`` says in words where the weights lay."""

    context_tokens: int | None = None
    slots: int | None = None
    ubatch_tokens: int | None = None
    kv_type: str | None = None
    placement: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The most that was in use at one place while it was measured; ``what`` says by whose count."""

    where: str
    what: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One real run. ``date`` is ISO 8601, ``source`` a URL or ``kimigguf bench``, ``engine`` a build."""

    source: str
    machine: Fingerprint
    model: MeasuredModel
    speeds: tuple[Speed, ...]
    date: str | None = None
    engine: str | None = None
    clock: Clock | None = None
    note: str | None = None
    settings: MeasuredSettings = MeasuredSettings()
    memory: tuple[PeakMemory, ...] = ()

    @property
    def was_elsewhere(self) -> bool:
        """Whether somebody else reported it."""
        return self.source != BENCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs that could be read, by file, and why others could not."""

    runs: Mapping[str, Run]
    problems: tuple[str, ...] = ()


def load_runs(environ: Mapping[str, str] = os.environ) -> Runs:
    """Every measurement on this machine, a user's own and the shipped ones. A bad file is told and left out."""
    runs: dict[str, Run] = {}
    problems: list[str] = []
    for name in profile_files.names(KIND, environ):
        try:
            path = profile_files.find(KIND, name, environ)
            runs[str(path)] = profile_files.load(path, Run, what=_WHAT)
        except UsageError as error:
            problems.append(f"{error.message}: {error.cause}" if error.cause else error.message)
    return Runs(runs=runs, problems=tuple(problems))


def save(run: Run, environ: Mapping[str, str] = os.environ) -> Path:
    """Write a run to the user's measurements, whole or not at all, under a name of its own.

    Raises:
        MachineError: ``cannot-write`` with the system's reason.
    """
    import tomli_w  # noqa: PLC0415 -- only when saving

    folder = profile_files.own_folder(KIND, environ)
    stem = re.sub(
        r"[^a-z0-9]+", "-", f"{run.model.quant or run.model.architecture or 'model'} {run.date or ''}".lower()
    )
    text = f"# Written by `{BENCH}`; recommend and plan show it on this machine.\n"
    text += tomli_w.dumps(without_unknown(asdict(run)))
    part = folder / f".{stem}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        names = (f"{stem.strip('-')}{f'-{number}' if number > 1 else ''}.toml" for number in count(1))
        while True:
            path = folder / next(names)
            with suppress(FileExistsError):
                give_name(part, path, overwrite=False)
                return path
    except OSError as error:
        hint = "KIMIGGUF_PROFILES may name a folder that you may write"
        raise MachineError(f"cannot write to {folder}", code="cannot-write", cause=error.strerror, hint=hint) from error
    finally:
        with suppress(OSError):  # gone by its own name, or never there
            part.unlink()


class Where(StrEnum):
    """Where a run was made, as seen from the machine that is asked about."""

    HERE = "here"
    ON_SUCH = "on such a machine"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A run that speaks of the quant and the machine at hand, and the file it stands in."""

    where: Where
    run: Run
    file: str


def matching(
    runs: Mapping[str, Run], machine: Fingerprint, quant: str, size_bytes: int, *, is_this_one: bool
) -> tuple[Told, ...]:
    """The latest own run of this quant on such a machine; where there is none, what others report of one, latest first.

    The size is held against the catalogue's as well: a test model may carry a quant's name.

    Args:
        runs: By file.
        machine: What is asked about.
        quant: Its name.
        size_bytes: The catalogue's size of its files.
        is_this_one: Whether that is the machine at hand, as it was just read.
    """
    fitting = [
        (file, run)
        for file, run in runs.items()
        if run.model.quant == quant
        and _same_size(run, size_bytes)
        and is_such(run.machine, machine)
        and any(speed.decode_tokens_per_second for speed in run.speeds)
    ]
    fitting.sort(key=lambda one: one[1].date or "", reverse=True)
    own = [(file, run) for file, run in fitting if not run.was_elsewhere]
    where = Where.ELSEWHERE if not own else Where.HERE if is_this_one else Where.ON_SUCH
    return tuple(Told(where=where, run=run, file=file) for file, run in own[:1] or fitting)


def _same_size(run: Run, size_bytes: int) -> bool:
    """Whether it ran the very files; what others report seldom says, what ``bench`` keeps must."""
    told = run.model.size_bytes
    return run.was_elsewhere if told is None else abs(told - size_bytes) <= size_bytes // _SIZE_TOLERANCE


def in_words(run: Run) -> str:
    """The speeds of a run in a line: what was generated per second, at which depth, with what, when, told by whom.

    Of a depth that was measured cold and warm the cold figure stands for both: generating is the same after either.
    """
    rows = [speed for speed in run.speeds if speed.decode_tokens_per_second is not None]
    cold = {speed.depth_tokens for speed in rows if speed.depth_tokens is not None and speed.warmth is Warmth.COLD}
    rows = [speed for speed in rows if speed.depth_tokens not in cold or speed.warmth is Warmth.COLD]
    context = run.settings.context_tokens
    facts = [f"context {context:,}" if context else "", run.engine or "", (run.date or "")[:10]]
    facts += [run.source] if run.was_elsewhere else []
    return f"{', '.join(map(_figure, rows))} ({', '.join(fact for fact in facts if fact)})"


def _figure(speed: Speed) -> str:
    rate = speed.decode_tokens_per_second
    if rate is None:
        raise ValueError("only rows with a rate are told")
    places = 1 if rate.median >= 1 else 2
    ends = ""
    if rate.lowest is not None and rate.highest is not None and rate.highest > _STEADY * rate.lowest:
        ends = f" ({rate.lowest:.{places}f}-{rate.highest:.{places}f})"
    if speed.depth_tokens is not None:
        where = f" at depth {speed.depth_tokens:,}"
    else:
        where = "" if speed.warmth is None else f" {speed.warmth}"
    return f"{rate.median:.{places}f}{ends} tok/s{where}"
