"""The Modelfile, the same as parameters for the API, and the environment that Ollama's llama-server inherits. Pure.

The sampling comes from the serving profile that ``serve`` uses. What Ollama has no parameter for (experts on the host,
context checkpoints, prompt cache) can only reach its llama-server as ``LLAMA_ARG_*`` in the environment of
``ollama serve``: that is inheritance, not an option of Ollama, and is said so wherever it is shown.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kimigguf.engines.serving import ServingProfile
from kimigguf.memory.settings import Settings
from kimigguf.units import MB, MIB

Value = int | float | str

_SAMPLING: Final[Mapping[str, str]] = {
    "sampling.temp": "temperature",
    "sampling.top_p": "top_p",
    "sampling.top_k": "top_k",
    "sampling.min_p": "min_p",
}
"""The serving profile's names of sampling settings, and Ollama's."""
_SLOW_DISK_BYTES_PER_SECOND: Final = 200 * MB
"""The slowest load that a time-out must allow for. An UD-IQ2_XXS of 711 GB has been seen to take 18 minutes."""
_LEAST_LOAD_MINUTES: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable for the environment of ``ollama serve``. ``inherited``: meant for the llama-server it starts."""

    name: str
    value: str
    reason: str
    inherited: bool


def parameters(serving: ServingProfile, context_tokens: int, *, agent: bool = False) -> dict[str, Value]:
    """The parameters of the model, in Ollama's names."""
    chosen: dict[str, Value] = {"num_ctx": context_tokens}
    for setting in serving.settings:
        name = _SAMPLING.get(setting.attribute)
        value = setting.agent if agent and setting.agent is not None else setting.value
        if name is not None and isinstance(value, int | float):
            chosen[name] = value
    if "temperature" in chosen:
        # Ollama's own default has been 1.1 for most of its life; any penalty is wrong where the sampling is pinned.
        chosen["repeat_penalty"] = 1.0
    return chosen


def modelfile(
    first_file: str, parameters: Mapping[str, Value], *, licence: str | None = None, system: str | None = None
) -> str:
    """The Modelfile that ``ollama create`` would take for the same model.

    ``first_file`` is the folder of a set or the one file. There is no TEMPLATE: the GGUF carries the model's own.
    """
    lines = [f"FROM {first_file}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    if system:
        lines.append(f'SYSTEM """{_quotable(system)}"""')
    if licence:
        lines.append(f'LICENSE """{_quotable(licence)}"""')
    return "\n".join(lines) + "\n"


def _quotable(text: str) -> str:
    # A Modelfile has no escape for its own closing quotes.
    return text.replace('"""', "'''")


def slow_load_seconds(size_bytes: int) -> float:
    """How long a load of that many bytes takes from a slow disk."""
    return max(1.0, size_bytes / _SLOW_DISK_BYTES_PER_SECOND)


def load_timeout_minutes(size_bytes: int) -> int:
    """How long a load may take before it counts as hung; Ollama's own default of 5 minutes is too short for K3."""
    return max(_LEAST_LOAD_MINUTES, math.ceil(slow_load_seconds(size_bytes) / 60))


def environment(settings: Settings, size_bytes: int, *, experts_on_host: bool | None) -> tuple[Variable, ...]:
    """What to set for ``ollama serve``; ``experts_on_host`` None where it is not known whether a GPU needs it."""
    own = (
        (
            "OLLAMA_LOAD_TIMEOUT",
            f"{load_timeout_minutes(size_bytes)}m",
            "the default of 5 minutes gives up on a long load",
        ),
        ("OLLAMA_NUM_PARALLEL", str(settings.slots), "every slot holds 443 MiB of KDA state and its own checkpoints"),
        ("OLLAMA_KEEP_ALIVE", "-1", "otherwise the model is dropped after 5 idle minutes and loaded from disk again"),
    )
    inherited = [
        ("LLAMA_ARG_CTX_CHECKPOINTS", str(settings.checkpoints), "the default of 32 is 14 GiB of host memory per slot"),
        ("LLAMA_ARG_CACHE_RAM", str(settings.prompt_cache_bytes // MIB), "MiB; the default is 8 GiB of host memory"),
        ("LLAMA_ARG_REPACK", "1" if settings.repack else "0", "repacked experts cannot be paged from disk"),
    ]
    if experts_on_host is not False:
        when = "" if experts_on_host else "; leave it out if the whole model fits on the GPUs"
        inherited.insert(
            0, ("LLAMA_ARG_CPU_MOE", "1", f"routed experts in host memory, everything else on the GPU{when}")
        )
    return (
        *(Variable(name=name, value=value, reason=reason, inherited=False) for name, value, reason in own),
        *(Variable(name=name, value=value, reason=reason, inherited=True) for name, value, reason in inherited),
    )


def systemd_drop_in(variables: Iterable[Variable]) -> str:
    """The text for ``systemctl edit ollama``."""
    return "[Service]\n" + "".join(f'Environment="{variable.name}={variable.value}"\n' for variable in variables)


def shell_lines(variables: Iterable[Variable]) -> str:
    """For ``ollama serve`` started by hand."""
    return " ".join(f"{variable.name}={variable.value}" for variable in variables) + " ollama serve\n"


def launchctl_lines(variables: Iterable[Variable]) -> str:
    """For the macOS application, which takes its environment from launchd; it must be started again afterwards."""
    return "".join(f"launchctl setenv {variable.name} {variable.value}\n" for variable in variables)
