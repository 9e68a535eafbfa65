"""Several comparisons with one reference side by side: what a smaller quant costs in answers and gains in speed."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from kimigguf.catalogue.quants import ModelProfile
from kimigguf.errors import UsageError
from kimigguf.probe.barren import RIGHT
from kimigguf.probe.cost import usd
from kimigguf.probe.report import percent
from kimigguf.probe.teacher_forced import read as read_exact
from kimigguf.units import storage

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One finished run. Shares are 0 to 1.

    ``size_bytes`` is known where its file's, folder's or model's name holds a known quant's, or where the exact
    comparison lies beside it; ``divergence`` is that comparison's mean, in nats.
    """

    label: str
    model: str
    size_bytes: int | None
    right: float | None
    right_low: float | None
    right_high: float | None
    same: float | None
    tokens_per_second: float | None
    seconds: float | None
    divergence: float | None
    same_likeliest: float | None
    usd_per_solved_task: float | None
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs that asked the same questions and were judged by the same reference, best first."""

    suite: str
    items: int
    reference: str
    reference_right: float | None
    runs: tuple[Compared, ...]


def compare(folders: Sequence[Path], profile: ModelProfile) -> Comparison:
    """Read the reports of finished runs.

    Raises:
        UsageError: ``bad-run`` for a folder without a report, ``other-suite`` or ``other-reference`` for one that
            cannot stand beside the first, ``same-run`` for one that is there twice.
    """
    reports = [_report(folder) for folder in folders]
    _check_different(folders, reports)
    first = reports[0]
    for folder, report in zip(folders, reports, strict=True):
        if report["suite"]["sha256"] != first["suite"]["sha256"]:
            raise UsageError(
                f"the run in {folder} asked other questions than that in {folders[0]}",
                code="other-suite",
                hint="compare runs with the same --suite (and --seed)",
            )
        if report["reference"] != first["reference"]:
            raise UsageError(
                f"the run in {folder} was judged by another reference than that in {folders[0]}",
                code="other-reference",
                hint="compare runs with the same --reference; --reference-run reuses its answers",
            )
    runs = [_compared(folder, report, profile) for folder, report in zip(folders, reports, strict=True)]
    runs.sort(key=lambda run: (-(run.right or 0.0), run.label))
    reference = first["reference"]
    return Comparison(
        suite=first["suite"]["name"],
        items=first["suite"]["items"],
        reference=f"{reference['model']} at {reference['url']}",
        reference_right=_reference_right(reports),
        runs=tuple(runs),
    )


def _check_different(folders: Sequence[Path], reports: Sequence[Mapping[str, Any]]) -> None:
    """Times alone make any two runs differ."""
    for place, report in enumerate(reports):
        first = reports.index(report)
        if first != place:
            raise UsageError(
                f"{folders[place]} and {folders[first]} hold one and the same run",
                code="same-run",
                hint="name each run once; another --out DIR makes another one",
            )


def _reference_right(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over all times that the reference was asked, as each report has it of its own two."""
    shares = [
        metric["reference"]
        for report in reports
        for metric in report["metrics"]
        if metric["name"] == RIGHT and metric["reference"] is not None
    ]
    return statistics.fmean(shares) if shares else None


def _report(folder: Path) -> dict[str, Any]:
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_report(folder) from error
    if not isinstance(report, dict) or report.get("schema") != "kimigguf.quality-probe/1":
        raise _no_report(folder)
    return report


def _no_report(folder: Path) -> UsageError:
    return UsageError(
        f"{folder} holds no finished run", code="bad-run", hint=f"kimigguf quality-probe ... --out '{folder}'"
    )


def _share(arm: Mapping[str, Any]) -> float | None:
    return arm["right"] / arm["checked"] if arm["checked"] else None


def _compared(folder: Path, report: Mapping[str, Any], profile: ModelProfile) -> Compared:
    arm = report["arms"][0]
    low, high = arm["right_interval_95"] or (None, None)
    same = next((metric["candidate"] for metric in report["metrics"] if metric["name"].startswith("same answer")), None)
    model = report["candidate"]["model"]
    exact = read_exact(folder)
    cost = report.get("cost")
    file = (report.get("made_by") or {}).get("candidate_file")
    size = _size(file or "", profile) or _size(f"{folder.name} {model}", profile)
    return Compared(
        label=folder.name,
        model=model,
        size_bytes=exact["candidate"]["size_bytes"] if size is None and exact is not None else size,
        right=_share(arm),
        right_low=low,
        right_high=high,
        same=same,
        tokens_per_second=arm["tokens_per_second"],
        seconds=arm["seconds"],
        divergence=None if exact is None else exact["mean"]["mean"],
        same_likeliest=None if exact is None else exact["same_top"]["mean"],
        usd_per_solved_task=None if cost is None else cost["candidate"]["usd_per_solved_task"],
        verdict=report["verdict"],
    )


def _size(text: str, profile: ModelProfile) -> int | None:
    """The size of the quant that is named in ``text``; of several, the one with the longest name."""
    plain = text.upper().replace("-", "_")
    named = [quant for quant in profile.quants if quant.name.upper().replace("-", "_").removeprefix("UD_") in plain]
    return max(named, key=lambda quant: len(quant.name)).size_bytes if named else None


def record(comparison: Comparison) -> dict[str, Any]:
    """The answer as JSON."""
    return {"schema": "kimigguf.quality-compare/1", **asdict(comparison)}


def _rows(comparison: Comparison) -> list[list[str]]:
    def number(value: float | None, form: str) -> str:
        return "unknown" if value is None else form.format(value)

    return [
        [
            run.label,
            storage(run.size_bytes),
            f"{percent(run.right)} [{percent(run.right_low)}, {percent(run.right_high)}]",
            percent(run.same),
            number(run.tokens_per_second, "{:.1f}"),
            number(run.seconds, "{:.1f} s"),
            number(run.divergence, "{:.4f}"),
            usd(run.usd_per_solved_task),
            run.verdict.replace("-", " "),
        ]
        for run in comparison.runs
    ]


_HEADINGS = (
    "run", "size", "right answers", "same answer", "tokens/s", "whole answer", "divergence", "solved task",
    "verdict",
)  # fmt: skip


def _table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows, without the columns of which nothing is known of any run."""
    rows = _rows(comparison)
    known = [place for place, cells in enumerate(zip(*rows, strict=True)) if set(cells) != {"unknown"}]
    return [_HEADINGS[place] for place in known], [[row[place] for place in known] for row in rows]


def draw(console: "Console", comparison: Comparison) -> None:
    """Print the table."""
    from rich import box  # noqa: PLC0415 -- kept out of JSON runs
    from rich.table import Table  # noqa: PLC0415 -- as above

    console.print(f"{comparison.suite}, {comparison.items} items, judged by {comparison.reference}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    headings, rows = _table(comparison)
    table.add_column("")
    for row in rows:  # a column a run: they are few, and what there is to say of each is long
        table.add_column(row[0], justify="right", overflow="fold")
    for place, heading in enumerate(headings[1:], 1):
        table.add_row(heading, *(row[place] for row in rows))
    console.print(table)
    itself = f"the reference itself: {percent(comparison.reference_right)} right, the mean of all times it was asked"
    console.print(itself, markup=False)


def compare_page(comparison: Comparison) -> str:
    """The table and the picture as one HTML page that needs nothing else."""
    template = Template(files("kimigguf.probe").joinpath("compare.html").read_text(encoding="utf-8"))
    headings, rows = _table(comparison)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return template.substitute(
        title=escape(f"{len(comparison.runs)} run{'s'[: len(comparison.runs) > 1]} beside {comparison.reference}"),
        about=escape(f"{comparison.suite}, {comparison.items} items"),
        table=f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        size=_picture(comparison, "size", lambda run: run.size_bytes, lambda value: storage(round(value))),
        speed=_picture(comparison, "tokens/s", lambda run: run.tokens_per_second, "{:.1f}".format),
    )


def _picture(
    comparison: Comparison, what: str, value_of: Callable[[Compared], float | None], form: Callable[[float], str]
) -> str:
    """Right answers (with their 95 % intervals) over ``what``, as SVG; empty where nothing can be drawn."""
    known = [run for run in comparison.runs if run.right is not None]
    drawn = [(run, value) for run in known if (value := value_of(run)) is not None]
    if not drawn:
        return ""
    most = max(value for _, value in drawn) * 1.15 or 1.0
    parts = [f'<svg viewBox="0 0 400 240" role="img" aria-label="right answers over {escape(what)}">']
    parts.append('<path class="axis" d="M40 10 V200 H390" fill="none"/>')
    parts += [
        f'<text x="34" y="{204 - 190 * share:.0f}" text-anchor="end">{share:.0%}</text>' for share in (0.0, 0.5, 1.0)
    ]
    parts += [
        f'<text x="{40 + 350 * part:.0f}" y="216" text-anchor="{anchor}">{escape(form(most * part))}</text>'
        for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    ]
    parts.append(f'<text x="215" y="234" text-anchor="middle">{escape(what)}</text>')
    if comparison.reference_right is not None:
        y = 200 - 190 * comparison.reference_right
        parts.append(f'<path class="zero" d="M40 {y:.1f} H390"/>')
    for run, value in drawn:
        x, y = 40 + 350 * value / most, 200 - 190 * (run.right or 0.0)
        low, high = 200 - 190 * (run.right_low or 0.0), 200 - 190 * (run.right_high or 0.0)
        parts.append(f'<path class="bar" d="M{x:.1f} {low:.1f} V{high:.1f}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        anchor = "end" if x > 280 else "start"  # noqa: PLR2004 -- where a label would leave the picture
        parts.append(f'<text x="{x + (-7 if anchor == "end" else 7):.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">')
        parts.append(f"{escape(run.label)}</text>")
    return "".join([*parts, "</svg>"])
