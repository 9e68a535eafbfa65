"""Reads the end of an engine's log and says why it died, with the line that matters and what to do. Pure."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kimigguf.engines.oom import SOMEBODY, Verdict
from kimigguf.engines.symptoms import FATAL, LESS_MEMORY
from kimigguf.errors import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: by an exit ``code`` or by the signal ``signal_number``; both None while it lives."""

    code: int | None = None
    signal_number: int | None = None

    @classmethod
    def from_return_code(cls, value: int) -> "Exit":
        """From Python's convention: a negative return code is a signal."""
        return cls(signal_number=-value) if value < 0 else cls(code=value)

    def __str__(self) -> str:
        if self.signal_number is not None:
            try:
                return f"killed by {signal.Signals(self.signal_number).name}"
            except ValueError:
                return f"killed by signal {self.signal_number}"
        return f"exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why an engine died. ``line`` is the log's line that shows it; ``may_pass`` whether another try could succeed."""

    code: str
    message: str
    hint: str
    line: str | None = None
    may_pass: bool = False


_SIGNALS: Final[Mapping[int, Diagnosis]] = {
    signal.SIGKILL: Diagnosis(
        code="killed",
        message="the engine was killed from outside; the system does that when memory runs out",
        hint="see the kernel's log (dmesg | grep -i 'out of memory'), then plan with less: kimigguf plan QUANT",
        may_pass=False,
    ),
    signal.SIGILL: Diagnosis(
        code="illegal-instruction",
        message="the engine uses instructions that this processor does not have",
        hint="use an engine built for this processor, or --engine embedded",
    ),
    # The engine ended itself, by a check of its own. What it checked is as it was at the next start.
    signal.SIGABRT: Diagnosis(
        code="aborted",
        message="the engine gave up: a check of its own failed, or an error that it does not handle",
        hint="see the log; another build of the engine may not have the fault: --engine-path DIR",
    ),
    signal.SIGBUS: Diagnosis(
        code="file-changed",
        message="a mapped shard could not be read: it was cut or its disk failed while it was in use",
        hint="run: kimigguf verify QUANT",
    ),
}


def diagnose(log: str, how: Exit) -> Diagnosis:
    """Why the engine died, from the last lines of its log and the way it ended.

    The first symptom in the order of the table wins, because the later lines of a failing load only repeat that it
    failed. Without any, the last error line is shown and the cause stays unknown.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for symptom in FATAL:
        for line in lines:
            if symptom.pattern.search(line):
                return Diagnosis(
                    code=symptom.code,
                    message=symptom.message,
                    hint=symptom.hint,
                    line=bare(line),
                    may_pass=symptom.may_pass,
                )
    errors = [line for line in lines if re.search(r"\bE\b|error|fail|abort|assert", line, re.IGNORECASE)]
    if how.signal_number is not None and (known := _SIGNALS.get(how.signal_number)):
        own = how.signal_number == signal.SIGABRT  # then its last words tell why; a kill from outside has none
        return replace(known, line=bare(errors[-1])) if own and errors else known
    return Diagnosis(
        code="server-died",
        message=f"the engine ended ({how})",
        hint="see the log for what came before",
        line=bare((errors or lines)[-1]) if lines else None,
        may_pass=how.signal_number is not None,
    )


def bare(line: str) -> str:
    """The line without llama.cpp's time stamp and level (``0.00.003.582 E ``), cut to a readable length."""
    return re.sub(r"^[\d.]+ [A-Z] +", "", line)[:400]


class EngineDiedError(ServerError):
    """The engine's process ended by itself. ``may_pass``: another try could succeed.

    ``ready_seconds`` is how long it had been ready, 0 if it never was; ``how`` the way it ended and who ended it.
    """

    may_pass = False
    ready_seconds = 0.0
    how = ""


_KILLED_FOR_MEMORY: Final = Diagnosis(
    code="oom-killed", message="the kernel killed the engine because memory ran out", hint=LESS_MEMORY
)
_KILLED_BY_SOMEBODY: Final = Diagnosis(
    code="killed",
    message="somebody killed the engine, and it was not the kernel for want of memory",
    hint="start it again as it was: kimigguf restart --name NAME",
)
ENDED: Final = "the engine ended while "
"""How the line begins that is added to the log of an engine that died."""
_END: Final = re.compile(
    rf"^kimigguf \S+: {ENDED}[^:\n]+: (?:killed by (?:signal )?(?P<signal>\w+)|exit code (?P<code>\d+))(?P<more>.*)$",
    re.MULTILINE,
)


def told_end(log: str) -> Diagnosis | None:
    """Why the engine died, by the line that was added to its log when it did; None where there is none.

    Of a log that says more than that, ``diagnose`` knows more.
    """
    found = list(_END.finditer(log))
    if not found:
        return None
    last = found[-1]
    name = last["signal"]
    number = int(name) if name and name.isdecimal() else signal.Signals.__members__.get(name or "")
    how = Exit(code=int(last["code"])) if last["code"] else Exit(signal_number=number)
    by_somebody = how.signal_number == signal.SIGKILL and SOMEBODY in last["more"]
    return replace(_KILLED_BY_SOMEBODY if by_somebody else diagnose("", how), line=last[0])


def naming(hint: str, name: str) -> str:
    """The hint for a server whose name is known."""
    return hint.replace("--name NAME", f"--name {name}")


def server_error(
    log: str, how: Exit, *, log_path: str | None, while_doing: str, killer: Verdict | None = None
) -> EngineDiedError:
    """The failure as a user meets it: what happened, the line that matters, what to do, where the log is.

    ``killer`` is what is known of who killed it.
    """
    found = _KILLED_FOR_MEMORY if killer and killer.by_kernel else diagnose(log, how)
    if killer and not killer.by_kernel and found is _SIGNALS[signal.SIGKILL]:
        found = _KILLED_BY_SOMEBODY
    where = f"; the log: {log_path}" if log_path else ""
    error = EngineDiedError(
        f"{found.message} (while {while_doing}; {how})",
        code=found.code,
        cause="; ".join(filter(None, (killer.words if killer else None, found.line))) or None,
        hint=found.hint + where,
    )
    error.may_pass = found.may_pass
    return error
