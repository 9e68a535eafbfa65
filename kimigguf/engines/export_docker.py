"""A plan as a container of llama.cpp's official image: devices, mounts, and a port for this machine alone.

Sources: llama.cpp's docs/docker.md and .devops/*.Dockerfile, build 11434 (the image's program is llama-server, its
health check asks port 8080); AMD's and Docker's documentation for the devices.
"""

import csv
import io
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Final

from kimigguf.engines.command import locks_memory
from kimigguf.engines.export import NAME, Export, Option, Service, heading, one_line
from kimigguf.engines.passthrough import READ, WRITTEN
from kimigguf.errors import UsageError

IMAGE: Final = "ghcr.io/ggml-org/llama.cpp"
_PORT: Final = 8080
_IPV6: Final = 6
_MODELS: Final = "/models"
_SECRETS: Final = "/run/secrets"
_TAGS: Final = {
    "": "server", "CUDA": "server-cuda", "ROCm": "server-rocm", "Vulkan": "server-vulkan", "SYCL": "server-intel",
}  # fmt: skip
"""Which image drives devices of such names; without a device, the one for processors."""
_MOUNTED: Final = {"--api-key-file": "api-key", "--ssl-key-file": "key.pem", "--ssl-cert-file": "cert.pem"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    source: str
    target: str

    @property
    def argument(self) -> str:
        text = io.StringIO()
        fields = ("type=bind", f"src={one_line(self.source, 'a mount')}", f"dst={self.target}", "readonly")
        csv.writer(text, lineterminator="").writerow(fields)
        return text.getvalue()


def docker_script(service: Service) -> Export:
    """A script for sh that starts the container.

    Raises:
        UsageError: ``not-expressible``, ``no-image`` for accelerators that no official image drives.
    """
    tag = _TAGS[_kind(service)]
    mounts, arguments = _inside(service)
    run = [
        ("docker", "run"),
        ("--detach", "--init"),
        ("--name", NAME),
        ("--network", NAME),
        ("--publish", f"{_published(service.host)}:{service.port}:{_PORT}"),
        *(("--mount", mount.argument) for mount in mounts),
        *_devices(service),
        *(("--env", f"{name}={value}") for name, value in service.environ.items() if name != "LD_LIBRARY_PATH"),
        *_limits(service),
        (f"{IMAGE}:{tag}",),
        *(option.words for option in arguments),
    ]
    text = " \\\n  ".join(" ".join(map(_quoted, words)) for words in run)
    network = f"docker network inspect {NAME} >/dev/null 2>&1 || docker network create {NAME} >/dev/null"
    lines = [
        "#!/bin/sh",
        *heading(service, "#"),
        "# A network of its own: containers of others do not reach it.",
        f"{network} &&",
        text,
    ]
    return Export(text="\n".join(lines) + "\n", notices=_notices(service, tag))


def _kind(service: Service) -> str:
    kinds = {name.rstrip("0123456789") for name in service.devices} or {""}
    if len(kinds) > 1 or not kinds <= _TAGS.keys():
        raise UsageError(
            f"no official image of llama.cpp drives {', '.join(service.devices)}",
            code="no-image",
            cause=f"there are images for {', '.join(filter(None, _TAGS))}, one kind each, and for processors",
            hint="--format shell or --format systemd start a llama-server that is installed here",
        )
    return kinds.pop()


def _published(host: str) -> str:
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError as error:
        raise UsageError(
            f"a container is reached by an address, and {host} is a name",
            code="not-expressible",
            hint="--host with one of this machine's addresses: ip -brief address shows them",
        ) from error
    return f"[{address}]" if address.version == _IPV6 else str(address)


def _inside(service: Service) -> tuple[list[_Mount], list[Option]]:
    """The folders and files that the container is given, and the options as they are inside it."""
    mounts = [_Mount(source=service.plan.model.folder or "", target=_MODELS)]
    inside: list[Option] = []
    for option in service.options:
        value = option.value or ""
        match option.flag:
            case "--model":
                inside.append(Option(flag=option.flag, value=f"{_MODELS}/{PurePosixPath(value).name}"))
            case "--host":
                # On every address of the container, of which the one published port is all that is reached.
                inside.append(Option(flag=option.flag, value="0.0.0.0"))  # noqa: S104 -- inside the container
            case "--port":
                inside.append(Option(flag=option.flag, value=str(_PORT)))
            case flag if flag in _MOUNTED:
                target = f"{_SECRETS}/{_MOUNTED[flag]}"
                mounts.append(_Mount(source=value, target=target))
                inside.append(Option(flag=flag, value=target))
            case flag if flag in READ | WRITTEN:
                raise UsageError(
                    f"{flag} names a file that no container has",
                    code="not-expressible",
                    hint="leave it out, and add a --mount for it to the script by hand",
                )
            case _:
                inside.append(option)
    return mounts, inside


def _devices(service: Service) -> Iterator[tuple[str, ...]]:
    kind = _kind(service)
    nvidia = kind == "CUDA" or any("nvidia" in (name or "").lower() for name in service.plan.machine.device_names)
    if kind and nvidia:
        yield ("--gpus", "all")
        if kind == "Vulkan":
            yield ("--env", "NVIDIA_DRIVER_CAPABILITIES=all")
        return
    if kind == "ROCm":
        yield ("--device", "/dev/kfd")
        yield ("--ipc", "host")
    if kind:
        yield ("--device", "/dev/dri")
        if service.user:
            yield ("--group-add", _Verbatim('"$(stat -c %g /dev/dri/renderD128)"'))


def _limits(service: Service) -> Iterator[tuple[str, ...]]:
    if service.user:
        # The user that can read the files; it needs no rights beyond that.
        yield ("--user", f"{service.user}:{service.group}")
        yield ("--cap-drop", "ALL")
    yield ("--security-opt", "no-new-privileges")
    yield ("--ulimit", "core=0")
    if locks_memory(service.command.argv):
        yield ("--ulimit", "memlock=-1")
    yield ("--oom-score-adj", "500")
    yield ("--stop-timeout", "120")
    yield ("--log-driver", "local")
    # A load is no ill health; the image's own check knows http alone.
    if service.url.startswith("https"):
        yield ("--no-healthcheck",)
    else:
        yield ("--health-start-period", "2h")


class _Verbatim(str):
    """A word that the shell is to read as it stands."""

    __slots__ = ()


def _quoted(word: str) -> str:
    return word if isinstance(word, _Verbatim) else shlex.quote(one_line(word, "a script"))


def _notices(service: Service, tag: str) -> tuple[str, ...]:
    library = "LD_LIBRARY_PATH" in service.environ
    return (
        f"to start it: {service.remake} | sh",
        f"to see it load: docker logs -f {NAME}",
        f"to end it: docker stop {NAME} && docker rm {NAME}",
        f"it answers at {service.url}/v1",
        f"{IMAGE}:{tag} must be build 10448 or later: docker pull {IMAGE}:{tag}",
        "this neither keeps it out of swap nor starts it again after a crash: --format systemd does both",
        *(("LD_LIBRARY_PATH is this machine's, and the container goes without it",) if library else ()),
        *(("it runs as root in the container: plan as the user that is to serve",) if not service.user else ()),
    )
