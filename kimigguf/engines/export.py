"""A plan as a file for another program to start llama-server by: what all formats share.

Every format is written from the same command line (``command.command``); what a format cannot say it names, and
nothing is left out in silence. Pure: the machine is asked by whoever calls.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kimigguf.engines.command import Command
from kimigguf.engines.llama_server import Address
from kimigguf.engines.tls import CERTIFICATE_FLAG
from kimigguf.errors import UsageError
from kimigguf.memory import server_flags
from kimigguf.memory.flags import spelled
from kimigguf.placement.plan import Plan

NAME: Final = "kimi-k3"
"""How the unit, the container and the files are called."""
CARRIED: Final = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "GGML_VK_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR",
    "LD_LIBRARY_PATH",
)  # fmt: skip
"""Variables that decide which accelerators the engine sees, in what order, and by which libraries: without them the
plan's first device could be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A flag of the command line with its value, None where it stands alone."""

    flag: str
    value: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        return (self.flag,) if self.value is None else (self.flag, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is to be started, and by whom.

    ``devices`` are the engine's names for the plan's accelerators, ``variables`` those flags that the environment can
    say, ``environ`` what the engine needs of it besides. ``user`` and ``group`` are numeric ids with ``user_name``;
    None where the files are for a system without them. ``remake`` writes the file again.
    """

    plan: Plan
    command: Command
    devices: tuple[str, ...]
    variables: Mapping[str, str]
    environ: Mapping[str, str]
    host: str
    port: int
    remake: str
    api_key_file: str | None = None
    user: int | None = None
    group: int | None = None
    user_name: str | None = None

    @property
    def title(self) -> str:
        model = self.plan.model
        return f"{model.architecture} {model.quant}" if model.quant else f"{model.architecture} in {model.folder}"

    @property
    def program(self) -> tuple[str, ...]:
        """The program, with its subcommand where it has one."""
        return self.command.argv[: self.command.argv.index("--model")]

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(options(self.command.argv[len(self.program) :]))

    @property
    def url(self) -> str:
        certificate = next((option.value for option in self.options if option.flag == CERTIFICATE_FLAG), None)
        return Address(host=self.host, port=self.port, certificate=certificate).url


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A file's whole text, and what its reader must know or do besides."""

    text: str
    notices: tuple[str, ...] = ()


def options(words: Sequence[str]) -> Iterator[Option]:
    """Flags with their values. A flag that this llama-server's list lacks takes the next word unless that is a flag.

    Raises:
        UsageError: ``not-expressible`` for a word that belongs to no flag.
    """
    rest = list(words)
    while rest:
        flag = spelled(rest.pop(0))
        if not re.match(r"--?[A-Za-z]", flag):
            raise UsageError(f"{flag!r} belongs to no flag", code="not-expressible", hint="leave it out")
        follows = bool(rest) and not re.match(r"--?[A-Za-z]", rest[0])
        if flag in server_flags.WITH_VALUE or (flag not in server_flags.BARE and follows):
            if not rest:
                raise UsageError(f"{flag} has no value", code="not-expressible", hint=f"{flag} VALUE")
            yield Option(flag=flag, value=rest.pop(0))
        else:
            yield Option(flag=flag)


def one_line(text: str, what: str) -> str:
    """The text, if it can stand in a file of lines.

    Raises:
        UsageError: ``not-expressible``.
    """
    if any(not character.isprintable() for character in text):
        raise UsageError(
            f"{text!r} cannot stand in {what}",
            code="not-expressible",
            cause="it has a line break or another control character in it",
            hint="take it out of the argument, or rename the folder or the file",
        )
    return text


def heading(service: Service, comment: str) -> list[str]:
    """The first lines of each file: what it is, and what writes it again."""
    lines = (f"{service.title}, as planned by kimigguf. Written by:", f"  {service.remake}")
    return [f"{comment} {one_line(line, 'a comment')}" for line in lines]
