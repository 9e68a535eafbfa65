"""How ``kimigguf bench`` shows what it measured."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kimigguf.units import memory

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.bench_report import Report
    from kimigguf.speed.samples import Speed, Spread

_FAST: Final = 100
"""From this rate on a decimal says nothing."""
_WIDE_COLUMNS: Final = 100
"""From this width on the table has room for the tokens of each turn."""


def draw(console: "Console", report: "Report", data: Mapping[str, Any]) -> None:
    """The server in a line, its speeds as a table, what was rejected, where the memory went, what is unknown."""
    target = report.target
    context = "an unknown context" if target.context_tokens is None else f"{target.context_tokens:,} tokens of context"
    what = ", ".join(part for part in (target.model.quant, target.engine, context) if part)
    console.print(f"{target.name or target.model_name} at {target.url}: {what}", markup=False)
    if report.speeds:
        _draw_speeds(console, report)
    for line in _rejections(report):
        console.print(line, markup=False)
    for line in _memory(report):
        console.print(line, markup=False)
    for notice in report.notices:
        console.print(f"note: {notice}", style="yellow", markup=False)
    for unknown in report.unknown:
        console.print(f"unknown: {unknown}", markup=False)
    if data["saved"] is not None:
        console.print(f"kept in {data['saved']}", markup=False)
    else:
        console.print(f"not kept: {data['not_saved']}", markup=False)


def _draw_speeds(console: "Console", report: "Report") -> None:
    from rich import box
    from rich.table import Table

    wide = console.width >= _WIDE_COLUMNS
    counts = ("New", "Cached") if wide else ()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("Depth", "Turn", *counts, "First token (s)", "Prompt tok/s", "Decode tok/s"):
        table.add_column(heading, justify="left" if heading == "Turn" else "right", no_wrap=True)
    for speed in report.speeds:
        table.add_row(*_cells(speed, wide=wide))
    console.print(table)
    counted = {speed.first_token_seconds.count or 0 for speed in report.speeds if speed.first_token_seconds} or {0}
    number = " to ".join(str(count) for count in sorted({min(counted), max(counted)}))
    what = "one of each" if counted == {1} else f"medians of {number}, with the lowest and highest"
    clock = "the server's own clock" if report.clock == "server" else "the client's clock"
    console.print(f"{what}, by {clock}", style="dim")


def _cells(speed: "Speed", *, wide: bool) -> Iterator[str]:
    yield "unknown" if speed.depth_tokens is None else f"{speed.depth_tokens:,}"
    yield str(speed.warmth)
    for count in (speed.prompt_tokens, speed.cached_tokens) if wide else ():
        yield "unknown" if count is None else f"{count:,}"
    yield _told(speed.first_token_seconds, decimals=2)
    yield _told(speed.prompt_tokens_per_second)
    yield _told(speed.decode_tokens_per_second)


def _told(spread: "Spread | None", *, decimals: int = 1) -> str:
    """The median with the ends, to as many places as the largest of them is worth."""
    if spread is None:
        return "unknown"
    values = [spread.median, *(one for one in (spread.lowest, spread.highest) if one is not None)]
    places = 0 if max(values) >= _FAST else decimals if max(values) >= 1 else 2
    median, *ends = (f"{value:.{places}f}" for value in values)
    return median + (f" ({'-'.join(ends)})" if len(set(ends)) > 1 else "")


def _rejections(report: "Report") -> Iterator[str]:
    """Each reason once, with how often it was one."""
    counted = Counter((one.depth_tokens, one.warmth, one.reason) for one in report.rejected)
    for (depth, warmth, reason), count in counted.items():
        times = f" ({count} times)" if count > 1 else ""
        yield f"rejected: depth {depth:,}, {warmth}{times}: {reason}"


def _memory(report: "Report") -> Iterator[str]:
    tree, peaks = report.peaks.tree, report.peaks
    if tree is not None:
        parts = f"{memory(tree.anonymous_bytes)} anonymous, {memory(tree.file_bytes)} of mapped files"
        yield f"memory: process: {memory(tree.resident_bytes)} resident at peak ({parts})"
    if peaks.cgroup_bytes is not None:
        yield f"memory: control group: {memory(peaks.cgroup_bytes)} at peak since it began, page cache included"
    for name, columns in report.loaded:
        yield f"memory: buffers on {name.lower()}: {memory(columns.total_bytes)} by the engine's log"
    for index, device in enumerate(peaks.devices or ()):
        used, total = memory(device.used_bytes), memory(device.total_bytes)
        yield f"memory: gpu{index} {device.name}: {used} of {total} in use by all at peak"
