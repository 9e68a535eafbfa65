"""A plan as a systemd unit: limits that fit a process of a terabyte, and hardening that leaves it its GPUs.

Source of the directives and of the quoting: systemd.service(5), systemd.exec(5), systemd.resource-control(5) of
systemd 252. Left out on purpose, as each takes the GPU away: PrivateDevices= and ProtectClock= (both restrict
devices), MemoryDenyWriteExecute= (drivers compile kernels), ProcSubset= (NVIDIA's driver is read in /proc).
"""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from kimigguf.engines.command import is_loopback, locks_memory
from kimigguf.engines.export import NAME, Export, Option, Service, heading, one_line
from kimigguf.engines.passthrough import WRITTEN

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=,+@^-]+")
_CREDENTIAL: Final = "api-key"
_NVIDIA_CONTROL: Final = 255
"""The number of /dev/nvidiactl among NVIDIA's devices."""
_MOST_GPUS: Final = 16
"""How many devices are made: CUDA numbers them in another order, and more than there are do no harm."""
_PRIVILEGED: Final = 1024
"""Ports below it are root's, or need a capability."""


def systemd_unit(service: Service) -> Export:
    """The unit, to be put into /etc/systemd/system.

    Raises:
        UsageError: ``not-expressible``.
    """
    return Export(
        text="\n".join((*heading(service, "#"), *_unit(service), *_service(service), *_install())) + "\n",
        notices=_notices(service),
    )


def quoted(word: str, *, dollars: bool = True) -> str:
    """A word as a unit's lines take it; ``dollars``: in ExecStart=, where variables are put in."""
    if _PLAIN.fullmatch(one_line(word, "a unit")):
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if dollars else text}"'


def _unit(service: Service) -> list[str]:
    after = "network.target" if is_loopback(service.host) else "network-online.target"
    folder = service.plan.model.folder or ""
    return [
        "",
        "[Unit]",
        f"Description={one_line(service.title, 'a unit').replace('%', '%%')} on llama-server",
        *([] if is_loopback(service.host) else ["Wants=network-online.target"]),
        f"After={after}",
        f"RequiresMountsFor={quoted(folder, dollars=False)}",
        "# A load reads the whole set: after five in six hours it stays down until somebody looks, and says",
        f"# systemctl reset-failed {NAME}.",
        "StartLimitIntervalSec=6h",
        "StartLimitBurst=5",
    ]


def _service(service: Service) -> list[str]:
    cuda = any(name.startswith("CUDA") for name in service.devices)
    minors = " ".join(f"-c {minor}" for minor in (_NVIDIA_CONTROL, *range(_MOST_GPUS)))
    modprobe = [
        "# What makes NVIDIA's devices after a boot needs rights that the engine itself does not get.",
        f"ExecStartPre=-+/usr/bin/nvidia-modprobe {minors}",
        "ExecStartPre=-+/usr/bin/nvidia-modprobe -u -c 0",
    ]
    return [
        "",
        "[Service]",
        "Type=exec",
        *([f"User={service.user_name}"] if service.user_name else []),
        *([f"LoadCredential={_CREDENTIAL}:{_credential(service)}"] if service.api_key_file else []),
        *(f"Environment={quoted(f'{name}={value}', dollars=False)}" for name, value in service.environ.items()),
        f"CacheDirectory={NAME}",
        f"Environment=XDG_CACHE_HOME=%C/{NAME} CUDA_CACHE_PATH=%C/{NAME}",
        *(modprobe if cuda else []),
        _start(service),
        "",
        "# A load takes as long as the disk needs; requests in flight get two minutes to end.",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=2min",
        "KillMode=mixed",
        "# Only what can pass is tried again: killed for memory, or by a driver. A file that is not there, a flag or",
        "# an address that is wrong end with a status, and a processor without an instruction it needs with SIGILL.",
        "Restart=on-abnormal",
        "RestartSec=1min",
        "RestartPreventExitStatus=SIGILL",
        "OOMPolicy=stop",
        "# Where memory runs out after all, this goes first, and not the shell that somebody would mend it from.",
        "OOMScoreAdjust=500",
        "",
        *_limits(service),
        "",
        *_hardening(service),
    ]


def _credential(service: Service) -> str:
    return one_line(service.api_key_file or "", "a unit").replace("%", "%%")


def _start(service: Service) -> str:
    program = " ".join(quoted(word, dollars=index > 0) for index, word in enumerate(service.program))
    lines = [" ".join(_words(option)) for option in service.options]
    return "ExecStart=" + " \\\n    ".join((program, *lines))


def _words(option: Option) -> list[str]:
    if option.flag == "--api-key-file":
        # systemd keeps it where this service alone can read it, and puts the folder in.
        return [option.flag, f"${{CREDENTIALS_DIRECTORY}}/{_CREDENTIAL}"]
    return [quoted(word) for word in option.words]


def _limits(service: Service) -> list[str]:
    locks = locks_memory(service.command.argv)
    return [
        "# The plan counts no swap: a cache that is swapped out makes each token wait for a disk.",
        "MemorySwapMax=0",
        *(["# The model is locked in memory.", "LimitMEMLOCK=infinity"] if locks else []),
        "# A dump of this process would fill a disk.",
        "LimitCORE=0",
    ]


def _hardening(service: Service) -> list[str]:
    low = service.port < _PRIVILEGED
    bind = "CAP_NET_BIND_SERVICE" if low else ""
    is_root = not service.user
    return [
        "NoNewPrivileges=yes",
        # root without capabilities could not read what is another's
        *([] if is_root else [f"CapabilityBoundingSet={bind}", f"AmbientCapabilities={bind}"]),
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={quoted(folder, dollars=False)}" for folder in _written(service)),
        *([] if _in_tmp(service) else ["PrivateTmp=yes"]),
        "ProtectControlGroups=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectHostname=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        "RestrictNamespaces=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "SystemCallArchitectures=native",
        "UMask=0077",
        *(["IPAddressDeny=any", "IPAddressAllow=localhost"] if is_loopback(service.host) else []),
    ]


def _written(service: Service) -> Iterator[str]:
    """The folders that the engine is told to write to."""
    for option in service.options:
        if option.flag in WRITTEN and option.value is not None:
            yield (
                str(PurePath(option.value).parent)
                if option.flag in {"-lcd", "--lookup-cache-dynamic"}
                else option.value
            )


def _in_tmp(service: Service) -> bool:
    """Whether a file lies where the service would see a folder of its own instead."""
    return any(word.startswith(("/tmp/", "/var/tmp/")) for word in service.command.argv)  # noqa: S108 -- compared, not used


def _install() -> list[str]:
    return ["", "[Install]", "WantedBy=multi-user.target"]


def _notices(service: Service) -> tuple[str, ...]:
    # Not by a pipe into sudo tee: a plan that is refused would empty the unit that is there.
    install = f"sudo install -m 644 {NAME}.service /etc/systemd/system/"
    reload = f"sudo systemctl daemon-reload && sudo systemctl enable --now {NAME}"
    relative = not service.program[0].startswith("/")
    return (
        f"to install it: {service.remake} > {NAME}.service && {install} && {reload}",
        f"to see it load: journalctl -fu {NAME}",
        f"it answers at {service.url}/v1",
        *((f"{service.program[0]} is looked for in /usr/local/bin, /usr/bin and /bin",) if relative else ()),
        *(() if service.user else ("it runs as root: plan as the user that is to serve, and the unit names that one",)),
    )
