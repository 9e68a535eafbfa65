"""What a bench found, as one value: figures, where the memory went, what a reader should know, and the run to keep."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kimigguf.engines.bench_target import Target
from kimigguf.engines.loaded import devices_in, parse_log
from kimigguf.engines.report import Columns
from kimigguf.hardware.fingerprint import Fingerprint
from kimigguf.hardware.usage import Peaks
from kimigguf.speed.measured import BENCH, PeakMemory, Run
from kimigguf.speed.samples import Clock, Rejected, Sample, Speed, spread, summarise
from kimigguf.units import duration, storage

_LOG_BYTES: Final = 8 << 20
_WAITED_SECONDS: Final = 1.0
_APART: Final = 2.0
_PAGED_BYTES: Final = 1 << 30
"""Less than this of disk reads is the engine's own bookkeeping, not weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``loaded`` is what the engine's log says that it took per device, empty where it does not say."""

    target: Target
    machine: Fingerprint | None
    speeds: tuple[Speed, ...]
    clock: Clock | None
    rejected: tuple[Rejected, ...]
    peaks: Peaks
    loaded: tuple[tuple[str, Columns], ...]
    notices: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def is_measured(self) -> bool:
        """Whether a speed of generating came out."""
        return any(speed.decode_tokens_per_second for speed in self.speeds)

    @property
    def why_not_kept(self) -> str | None:
        """Why the figures are no measurement of this machine; None if they are one."""
        if not self.is_measured:
            return "nothing was measured"
        if self.target.model.quant is None:
            return "the name of its file tells no quant of the catalogue"
        if self.target.elsewhere is not None:
            return f"which machine serves it is unknown: {self.target.elsewhere}"
        if self.machine is None or self.machine.ram_bytes is None or self.machine.cards is None:
            return "the memory or the accelerators of this machine are unknown"
        return None


def loaded_columns(log: Path | None) -> tuple[tuple[str, Columns], ...]:
    """What the engine says that it took, by device, the host last; empty where there is no log or it does not say."""
    if log is None:
        return ()
    try:
        with log.open("rb") as file:
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ()
    return tuple((parse_log(text, devices_in(text)) or {}).items())


def make_report(
    target: Target,
    machine: Fingerprint | None,
    found: Sequence[Sample | Rejected],
    peaks: Peaks,
    loaded: tuple[tuple[str, Columns], ...],
) -> Report:
    """Put together what was found; samples of both clocks are never mixed, as a server has one kind."""
    samples = [one for one in found if isinstance(one, Sample)]
    speeds = summarise(samples)
    return Report(
        target=target,
        machine=machine,
        speeds=speeds,
        clock=samples[0].clock if samples else None,
        rejected=tuple(one for one in found if isinstance(one, Rejected)),
        peaks=peaks,
        loaded=loaded,
        notices=tuple(_notices(samples, peaks)),
        unknown=tuple(_unknown(target, samples, peaks, loaded)),
    )


def _notices(samples: Sequence[Sample], peaks: Peaks) -> list[str]:
    notices = []
    if others := list(dict.fromkeys(one.others for one in samples if one.others)):
        notices.append(f"other clients used the server meanwhile: {'; '.join(others)}")
    waits = [one.waited_seconds for one in samples if (one.waited_seconds or 0.0) >= _WAITED_SECONDS]
    if waits:
        longest = duration(max(wait for wait in waits if wait is not None))
        notices.append(
            f"{len(waits)} of {len(samples)} requests waited before the server began, up to {longest}:"
            " behind others, or while it kept a prompt for later; no figure has that in it"
        )
    if unsteady := _unsteady_depths(samples):
        notices.append(
            f"the speeds of generating at depth {', '.join(unsteady)} are twice and more apart: something else was at"
            " work on the machine, or weights still came from the disk, so take none of them for its speed"
        )
    if peaks.read_bytes is not None and peaks.read_bytes >= _PAGED_BYTES:
        notices.append(
            f"the engine read {storage(peaks.read_bytes)} from disk meanwhile: not all weights were in memory"
        )
    return notices


def _unsteady_depths(samples: Sequence[Sample]) -> list[str]:
    """The depths whose speeds are far apart, cold and warm together: generating is the same after either."""
    found: list[str] = []
    for depth in dict.fromkeys(one.depth_tokens for one in samples):
        rate = spread(one.decode_tokens_per_second for one in samples if one.depth_tokens == depth)
        if rate and rate.lowest and rate.highest and rate.highest >= _APART * rate.lowest:
            found.append(f"{depth:,}")
    return found


def _unknown(
    target: Target, samples: Sequence[Sample], peaks: Peaks, loaded: tuple[tuple[str, Columns], ...]
) -> list[str]:
    """What could not be told, and why: of the speeds, of the server, of the memory."""
    by_client = [one for one in samples if one.clock is Clock.CLIENT]
    unknown = {
        "the server's own speeds: it sends no `timings`, so these are by the client's clock, with the network and any"
        " queue in them": bool(by_client),
        "tokens per second of some answers: the server did not count their tokens": any(
            one.decode_tokens_per_second is None for one in by_client
        ),
        "whether anything came from a cache: the server does not say, so warm may be cold": any(
            one.cached_tokens is None for one in by_client
        ),
        "whether other clients used it meanwhile: the server shows neither its slots nor its counts": any(
            not one.is_watched for one in samples
        ),
        "the served context: the server does not say": target.context_tokens is None,
    }
    return [sentence for sentence, applies in unknown.items() if applies] + _unknown_memory(target, peaks, loaded)


def _unknown_memory(target: Target, peaks: Peaks, loaded: tuple[tuple[str, Columns], ...]) -> list[str]:
    if target.pid is None:
        return [f"memory: {target.elsewhere}"]
    unknown = {
        f"memory: process {target.pid} cannot be asked": peaks.tree is None,
        "memory of accelerators: no driver answered": peaks.devices is None,
        "peak of the control group: the system does not tell it": peaks.cgroup_bytes is None,
        "the engine's own count of its memory: its log does not say, or is not known": not loaded,
    }
    return [sentence for sentence, applies in unknown.items() if applies]


def to_run(report: Report, date: str) -> Run:
    """The measurement to keep."""
    if report.machine is None:
        raise ValueError("a measurement of no known machine is not kept")
    return Run(
        source=BENCH,
        date=date,
        machine=report.machine,
        model=report.target.model,
        speeds=report.speeds,
        engine=report.target.engine,
        clock=report.clock,
        settings=report.target.settings,
        memory=tuple(_peak_memory(report)),
        note="; ".join(report.notices) or None,
    )


def _peak_memory(report: Report) -> list[PeakMemory]:
    peaks, rows = report.peaks, []
    if peaks.tree is not None:
        for what, size in (
            ("resident", peaks.tree.resident_bytes),
            ("anonymous", peaks.tree.anonymous_bytes),
            ("mapped files", peaks.tree.file_bytes),
        ):
            rows += [] if size is None else [PeakMemory(where="host", what=what, size_bytes=size)]
    if peaks.cgroup_bytes is not None:
        rows.append(PeakMemory(where="host", what="control group, page cache included", size_bytes=peaks.cgroup_bytes))
    rows += [
        PeakMemory(where=name, what="the engine's log", size_bytes=columns.total_bytes)
        for name, columns in report.loaded
    ]
    rows += [
        PeakMemory(where=f"gpu{index} {device.name}", what="in use by all", size_bytes=device.used_bytes)
        for index, device in enumerate(peaks.devices or ())
    ]
    return rows


def to_data(report: Report) -> dict[str, Any]:
    """The report as JSON values, null for unknown."""
    target, peaks = report.target, report.peaks
    return {
        "server": {
            "name": target.name,
            "url": target.url,
            "model": target.model_name,
            "quant": target.model.quant,
            "size_bytes": target.model.size_bytes,
            "engine": target.engine,
            "context_tokens": target.context_tokens,
            "slots": target.slots,
            "pid": target.pid,
        },
        "settings": asdict(target.settings),
        "machine": None if report.machine is None else asdict(report.machine),
        "clock": report.clock,
        "speeds": [asdict(speed) for speed in report.speeds],
        "rejected": [asdict(one) for one in report.rejected],
        "memory": {
            "host": None if peaks.tree is None else asdict(replace(peaks.tree, read_bytes=peaks.read_bytes)),
            "cgroup": peaks.cgroup,
            "cgroup_bytes": peaks.cgroup_bytes,
            "devices": None if peaks.devices is None else [asdict(device) for device in peaks.devices],
            "engine": [{"where": name, **asdict(columns)} for name, columns in report.loaded],
        },
        "notices": list(report.notices),
        "unknown": list(report.unknown),
    }
