"""What ails a server, dead or alive: every known symptom in its log, and what its own answers show. Pure.

No finding is no proof of health: it only says that none of the known symptoms is there.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kimigguf.engines.diagnose import bare, told_end
from kimigguf.engines.symptoms import FATAL, SERVING, SLOW, Symptom
from kimigguf.engines.timings import cut_off, generations, slow_start, weight_bytes
from kimigguf.units import memory

_K3_MARKERS: Final = ("<|open|>", "<|close|>", "<|end_of_msg|>")
_IS_K3: Final = re.compile(r"(?:general\.architecture|print_info: arch) .*= kimi-k3")
_LOG_LINE: Final = re.compile(
    r"^(?:[^\n]{0,80}?\b\d+\.\d\d\.\d{3}\.\d{3} [A-Z] "
    r"|(?:[^\n]{0,80}?\]: )?(?:(?:srv|slot|que|main|cmn)\b[^\n:]{0,40}: "
    r"|(?:llama|ggml|gguf|common|print_info|load_tensors|system_info|build)\w*: ))",
    re.MULTILINE,
)
"""A line as llama.cpp writes it, with its time stamp or by the function that speaks, behind a journal's prefix too."""
_NUMBER: Final = re.compile(r"\d+")
_MASKING: Final = frozenset({"aborted", "load-failed", "no-context"})
"""Symptoms that only repeat that something failed; they count where nothing says why."""


class Severity(StrEnum):
    """How bad it is."""

    FATAL = "fatal"
    """It ended the engine, or kept it from starting."""
    FAILING = "failing"
    """Requests fail or answers are wrong."""
    WORSE = "worse"
    """It works, and worse than it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found. ``evidence`` is the line or the value that shows it, ``times`` how often it stands there."""

    code: str
    severity: Severity
    message: str
    evidence: str
    hint: str
    times: int = 1


def examine_log(text: str) -> tuple[Finding, ...]:
    """Every symptom in a log, the gravest first; each once, with its first line."""
    lines = _kinds(text)
    tables = ((FATAL, Severity.FATAL), (SERVING, Severity.FAILING), (SLOW, Severity.WORSE))
    found = [
        finding
        for table, severity in tables
        for symptom in table
        if (finding := _seen(symptom, lines, severity)) is not None
    ]
    telling = [finding for finding in found if finding.severity is Severity.FATAL and finding.code not in _MASKING]
    told = [finding for finding in found if finding.code not in _MASKING or not telling]
    ended = () if any(finding.severity is Severity.FATAL for finding in told) else _end(text)
    return in_order((*told, *ended, *_parser(text), *_times(text)))


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, and of two that say the same only the first."""
    ranks = list(Severity)
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.code, finding)
    return tuple(sorted(first.values(), key=lambda finding: ranks.index(finding.severity)))


def _end(text: str) -> Iterator[Finding]:
    """An engine that died without a word of its own, by the line that its supervisor wrote."""
    if (end := told_end(text)) is not None:
        yield Finding(
            code=end.code, severity=Severity.FATAL, message=end.message, evidence=end.line or "", hint=end.hint
        )


def is_server_log(text: str) -> bool:
    """Whether any line is one of llama.cpp's; where none is, that no symptom was found says nothing."""
    return _LOG_LINE.search(text) is not None


def serves_k3(log: str) -> bool:
    """Whether the log is of an engine that loads Kimi K3."""
    return _IS_K3.search(log) is not None


def _parser(text: str) -> Iterator[Finding]:
    """An engine that knows K3's layers and not its format leaves thinking and calls in the text."""
    if serves_k3(text) and (line := re.search(r"chat format: Content-only", text)):
        yield Finding(
            code="no-parser",
            severity=Severity.FAILING,
            message="this engine does not parse Kimi K3's format: tool calls and thinking stay in the text",
            evidence=line[0],
            hint="use llama.cpp build 10448 or later with --jinja and the model's own template: kimigguf serve does",
        )


def _times(text: str) -> Iterator[Finding]:
    found = generations(text)
    if (evidence := cut_off(found)) is not None:
        yield Finding(
            code="cut-off",
            severity=Severity.WORSE,
            message="a limit of tokens ends the answers. Where thinking uses it up, the content is empty and the "
            "finish reason is length: the server is not broken",
            evidence=evidence,
            hint="raise max_tokens in the client, or have it think less: kimigguf serve QUANT --effort low",
        )
    if (slow := slow_start(found)) is not None:
        # No clock tells a disk from other programs, but of a small model reading it cannot take so long.
        size = weight_bytes(text)
        disk = slow.may_be_disk(size)
        too_small = "" if disk or size is None else f"; {memory(size)} of weights are read faster by any disk"
        yield Finding(
            code="slow-start",
            severity=Severity.WORSE,
            message="the first request was slow: weights still came from the disk, or something else was at work on "
            "the machine"
            if disk
            else "the first request was slow: something else was at work on the machine",
            evidence=f"{slow}{too_small}",
            hint="read them ahead: kimigguf serve QUANT --prefault; if it is slow again, see what else computes: top"
            if disk
            else "see what else computes: top",
        )


def _kinds(text: str) -> Mapping[str, int]:
    """The first line of each kind and how often its like stands there: a server of weeks says the same a million times.

    Two are alike that differ in their numbers alone: no symptom is a number.
    """
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for line in text.splitlines():
        if bared := line.strip():
            times[first.setdefault(_NUMBER.sub("0", bared), bared)] += 1
    return times


def _seen(symptom: Symptom, lines: Mapping[str, int], severity: Severity) -> Finding | None:
    matching = [line for line in lines if symptom.pattern.search(line)]
    if not matching:
        return None
    return Finding(
        code=symptom.code,
        severity=severity,
        message=symptom.message,
        evidence=bare(matching[0]),
        hint=symptom.hint,
        times=sum(lines[line] for line in matching),
    )


def examine_server(props: Mapping[str, Any], *, is_k3: bool) -> tuple[Finding, ...]:
    """What a running llama-server's ``/props`` show that does not suit Kimi K3; nothing for another model."""
    if not is_k3:
        return ()
    defaults = props.get("default_generation_settings")
    params = defaults.get("params") if isinstance(defaults, Mapping) else None
    return (*_sampling(params if isinstance(params, Mapping) else {}), *_template(props), *_slots(props))


def _sampling(params: Mapping[str, Any]) -> tuple[Finding, ...]:
    wrong = [
        f"{name} {found:g} (K3: {right:g})"
        for name, right in (("temperature", 1.0), ("top_k", 0), ("min_p", 0.0))
        if isinstance(found := params.get(name), int | float) and abs(found - right) > 1e-3  # noqa: PLR2004 -- single precision
    ]
    if not wrong:
        return ()
    return (
        Finding(
            code="sampling",
            severity=Severity.FAILING,
            message="the server's default sampling is llama.cpp's, not Kimi K3's",
            evidence=", ".join(wrong),
            hint="start it with kimigguf serve, or with --temp 1.0 --top-p 0.95 --top-k 0 --min-p 0",
        ),
    )


def missing_marker(template: str) -> str | None:
    """The first that is missing of the words by which llama.cpp takes a template for K3's; None: none is."""
    return next((marker for marker in _K3_MARKERS if marker not in template), None)


def _template(props: Mapping[str, Any]) -> tuple[Finding, ...]:
    template = props.get("chat_template")
    if not isinstance(template, str) or (missing := missing_marker(template)) is None:
        return ()
    return (
        Finding(
            code="template",
            severity=Severity.FAILING,
            message="the chat template is not Kimi K3's: thinking and tool calls are not parsed",
            evidence=f"no {missing} in it",
            hint="leave the template to the model's file: no --chat-template, and --jinja on",
        ),
    )


def _slots(props: Mapping[str, Any]) -> tuple[Finding, ...]:
    slots = props.get("total_slots")
    if not isinstance(slots, int) or slots < 4:  # noqa: PLR2004 -- llama.cpp's own default
        return ()
    return (
        Finding(
            code="slots",
            severity=Severity.WORSE,
            message="every slot holds 443 MiB of KDA state and its own checkpoints, and they share the context",
            evidence=f"{slots} slots",
            hint="serve with --slots 1 unless several requests must run at once",
        ),
    )
