"""Reads the end of an engine's log and says why it died, with the line that matters and what to do. Pure."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Symptom:
    pattern: re.Pattern[str]
    code: str
    message: str
    hint: str
    may_pass: bool = False


def _symptom(pattern: str, code: str, message: str, hint: str, *, may_pass: bool = False) -> _Symptom:
    return _Symptom(
        pattern=re.compile(pattern, re.IGNORECASE), code=code, message=message, hint=hint, may_pass=may_pass
    )


_LESS_MEMORY: Final = (
    "free memory on that device, or plan again with a smaller --context or --ubatch: kimigguf plan QUANT"
)
_SYMPTOMS: Final = (
    _symptom(
        r"illegal split file idx",
        "not-first-shard",
        "the engine was given a shard that is not the first",
        "name any shard or the folder to kimigguf serve: it finds the first one itself",
    ),
    _symptom(
        r"failed to open GGUF file .*No such file",
        "shard-missing",
        "a shard of the set is missing",
        "run: kimigguf verify QUANT, then kimigguf download QUANT",
    ),
    _symptom(
        r"data is not within the file bounds|model is corrupted or incomplete|failed to read|invalid magic",
        "shard-damaged",
        "a shard is cut short or is no GGUF",
        "run: kimigguf verify QUANT - it names the shard - then kimigguf download QUANT",
    ),
    _symptom(
        r"unknown model architecture",
        "engine-too-old",
        "the engine does not know this model's architecture",
        "use llama.cpp build 10448 or later, or --engine embedded",
    ),
    _symptom(
        r"has invalid ggml type|invalid ggml type|unknown (?:ggml )?type",
        "tensor-type-unknown",
        "the files hold a tensor type that this engine cannot read",
        "choose another quant (kimigguf recommend), or the fork of llama.cpp that made this one",
    ),
    _symptom(
        r"tensors expected|wrong number of tensors|missing tensor|check_tensor_dims|has wrong shape",
        "layout-mismatch",
        "the files do not have the tensors that the engine expects for this architecture",
        "they may come from before the final layout: run kimigguf download QUANT again, and update the engine",
    ),
    _symptom(
        r"different K .* and V .* cache types|V cache quantization requires flash",
        "cache-types-differ",
        "the engine refuses this combination of KV cache types",
        "leave the cache types to the plan: --kv-type sets both",
    ),
    _symptom(
        r"couldn't bind|address already in use|bind HTTP server socket",
        "port-in-use",
        "the port is taken by another program",
        "choose another with --port",
    ),
    _symptom(
        r"invalid argument: |error while handling argument|unknown argument",
        "engine-flag-unknown",
        "the engine does not know one of the options it was given",
        "update the engine, or use --engine embedded",
    ),
    _symptom(
        r"out of memory|OutOfDeviceMemory|failed to allocate|unable to allocate|bad_alloc|cannot allocate memory",
        "out-of-memory",
        "the engine could not get the memory it needs",
        _LESS_MEMORY,
    ),
    _symptom(
        r"failed to fit params",
        "not-fitted",
        "the engine could not fit the model and would have gone on without",
        _LESS_MEMORY,
    ),
    _symptom(
        r"error while loading shared libraries|symbol lookup error|version `GLIBC|no kernel image|cannot open shared",
        "engine-unusable",
        "the engine does not run on this machine: a library or a kernel for this hardware is missing",
        "install its libraries, or use --engine embedded",
    ),
    _symptom(
        r"CUDA error|ROCm error|ggml_cuda_error|hipError|vk::\w+Error|device lost",
        "device-error",
        "the accelerator's driver reported an error",
        "see the log; a restart helps where another program disturbed the device",
        may_pass=True,
    ),
    _symptom(
        r"failed to create.?context",
        "no-context",
        "the engine loaded the model but could not create its context",
        _LESS_MEMORY,
    ),
    _symptom(
        r"the embedded engine did not start|failed to load model|error loading model",
        "load-failed",
        "the engine could not load the model",
        "run: kimigguf verify QUANT; if the set is whole, see the log",
    ),
)
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
    for symptom in _SYMPTOMS:
        for line in lines:
            if symptom.pattern.search(line):
                return Diagnosis(
                    code=symptom.code,
                    message=symptom.message,
                    hint=symptom.hint,
                    line=_bare(line),
                    may_pass=symptom.may_pass,
                )
    if how.signal_number is not None and (known := _SIGNALS.get(how.signal_number)):
        return known
    errors = [line for line in lines if re.search(r"\bE\b|error|fail|abort|assert", line, re.IGNORECASE)]
    return Diagnosis(
        code="server-died",
        message=f"the engine ended ({how})",
        hint="see the log for what came before",
        line=_bare((errors or lines)[-1]) if lines else None,
        may_pass=how.signal_number is not None,
    )


def _bare(line: str) -> str:
    """The line without llama.cpp's time stamp and level (``0.00.003.582 E ``), cut to a readable length."""
    return re.sub(r"^[\d.]+ [A-Z] +", "", line)[:400]


class EngineDiedError(ServerError):
    """The engine's process ended by itself. ``may_pass``: another try could succeed."""

    may_pass = False


def server_error(
    log: str, how: Exit, *, log_path: str | None, while_doing: str, evidence: str | None = None
) -> EngineDiedError:
    """The failure as a user meets it: what happened, the line that matters, what to do, where the log is.

    ``evidence`` is what is known besides the log, such as the kernel's count of kills.
    """
    found = diagnose(log, how)
    where = f"; the log: {log_path}" if log_path else ""
    error = EngineDiedError(
        f"{found.message} (while {while_doing}; {how})",
        code=found.code,
        cause="; ".join(filter(None, (evidence, found.line))) or None,
        hint=found.hint + where,
    )
    error.may_pass = found.may_pass
    return error
