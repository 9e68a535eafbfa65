"""A plan as a script for sh, as an environment, and as a preset of llama-server's own router."""

import re
import shlex
from typing import Final

from kimigguf.engines.command import NOT_FOR_THE_ENGINE, OVERRIDING_PREFIX
from kimigguf.engines.export import NAME, Export, Option, Service, heading, one_line
from kimigguf.errors import UsageError

_ROUTER_S: Final = frozenset(
    {"--host", "--port", "--api-key-file", "--cors-origins", "--ssl-key-file", "--ssl-cert-file"}
)
"""What llama-server's router takes for itself, and unsets in a preset (``unset_reserved_args``, build 11434)."""
_NO_SECTION: Final = re.compile(r"[^\w.-]")


def shell_script(service: Service) -> Export:
    """A script that can be run by sh, or pasted: a subshell of its own keeps what it sets.

    Raises:
        UsageError: ``not-expressible``.
    """
    command = " \\\n  ".join((_line(service.program), *(_line(option.words) for option in service.options)))
    pattern = rf"s/^\({OVERRIDING_PREFIX}[A-Z0-9_]*\)=.*/\1/p"
    lines = [
        "#!/bin/sh",
        *heading(service, "#"),
        "(",
        "# Options that llama.cpp would take from the environment, and keys that are none of its business.",
        f"for name in $(env | sed -n '{pattern}'); do unset \"$name\"; done",
        f"unset {' '.join(sorted(NOT_FOR_THE_ENGINE))}",
        *(f"export {name}={shlex.quote(one_line(value, 'a script'))}" for name, value in service.environ.items()),
        f"exec {command}",
        ")",
    ]
    notices = (f"to start it: {service.remake} | sh", f"it answers at {service.url}/v1")
    return Export(text="\n".join(lines) + "\n", notices=notices)


def _line(words: tuple[str, ...]) -> str:
    return shlex.join(one_line(word, "a script") for word in words)


def environment(service: Service) -> Export:
    """Variables of llama-server, for ``set -a`` of a shell and for EnvironmentFile= of systemd.

    What no variable says is left for the command line, and told.

    Raises:
        UsageError: ``not-expressible``.
    """
    said: dict[str, str] = dict(service.environ)
    rest: list[Option] = []
    for option in service.options:
        variable = service.variables.get(option.flag)
        if variable is None or variable in said:
            rest.append(option)
        else:
            said[variable] = "1" if option.value is None else option.value
    command = shlex.join((*service.program, *(word for option in rest for word in option.words)))
    lines = [
        *heading(service, "#"),
        f"# Start, in a shell: (set -a; . ./{NAME}.env; exec {command})",
        *(f"{name}={shlex.quote(one_line(value, 'an environment'))}" for name, value in said.items()),
    ]
    told = (
        f"no variable says {shlex.join(word for option in rest for word in option.words)}: it stays on the command line"
    )
    return Export(
        text="\n".join(lines) + "\n",
        notices=(
            f"to start it: {service.remake} > {NAME}.env && (set -a; . ./{NAME}.env; exec {command})",
            f"it answers at {service.url}/v1",
            *((told,) if rest else ()),
            "its quotes are for shells and systemd's EnvironmentFile=; for Docker there is --format docker",
        ),
    )


def preset(service: Service) -> Export:
    """A preset for ``llama-server --models-preset``: a section named as clients call the model.

    The router's own options cannot stand in it (it would ignore them without a word): they are told as its command.

    Raises:
        UsageError: ``not-expressible``.
    """
    inside: dict[str, str] = {}
    router: list[Option] = []
    name = NAME
    for option in service.options:
        if option.flag == "--alias":
            name = option.value or NAME
        elif option.flag in _ROUTER_S:
            router.append(option)
        else:
            # A later flag replaces an earlier one, as on a command line.
            inside[option.flag.lstrip("-")] = _ini(option)
    if _NO_SECTION.search(name):
        raise UsageError(f"a preset cannot be called {name!r}", code="not-expressible", hint="letters, digits and dots")
    words = (word for option in router for word in option.words)
    command = shlex.join((*service.program, "--models-preset", f"{NAME}.ini", "--models-max", "1", *words))
    needs = "".join(f"{name}={shlex.quote(value)} " for name, value in service.environ.items())
    lines = [
        *heading(service, ";"),
        f"; Start: {needs}{command}",
        "",
        f"[{name}]",
        "load-on-startup = true",
        *(f"{key} = {value}" for key, value in inside.items()),
    ]
    return Export(
        text="\n".join(lines) + "\n",
        notices=(
            f"to start it: {service.remake} > {NAME}.ini && {needs}{command}",
            f"it answers at {service.url}/v1",
            f"a preset cannot say {shlex.join(option.flag for option in router)}: they stand on that command line",
            "--models-max 1 keeps the router from loading a second model into the same memory",
        ),
    )


def _ini(option: Option) -> str:
    if option.value is None:
        return "true"
    value = one_line(option.value, "a preset")
    if re.search("[;#]", value) or value != value.strip():
        raise UsageError(
            f"{value!r} cannot stand in a preset",
            code="not-expressible",
            cause="there, a ; or # begins a comment even inside a value, and blanks at its ends are dropped",
            hint="rename the folder, or use another --format",
        )
    return value
