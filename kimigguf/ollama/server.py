"""Is an Ollama server there, which version is it, and can that version load Kimi K3?"""

import ipaddress
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

DEFAULT_PORT: Final = 11434
K3_VERSION: Final = (0, 32, 15)
"""The first Ollama whose llama.cpp (b10488) knows the architecture `kimi-k3`; 0.32.14 carries b10434."""
K3_VERSION_TEXT: Final = ".".join(map(str, K3_VERSION))

_DEADLINE_SECONDS: Final = 0.9
PATIENT_SECONDS: Final = 10.0
"""For a command that needs the server; a machine that is busy loading answers late."""
_MAX_ANSWER_BYTES: Final = 4096
_VERSION: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-[0-9A-Za-z.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaServer:
    """What one look at the server told.

    ``local``: the address belongs to this machine; None where that could not be told. ``supports_k3`` is judged by the
    version, None where it is unknown. ``reason`` is one sentence that says what was seen.
    """

    url: str
    reachable: bool
    version: str | None
    supports_k3: bool | None
    local: bool | None
    reason: str


def host_url(environ: Mapping[str, str]) -> str:
    """The server's address, read from ``OLLAMA_HOST`` by Ollama's own rules.

    Without a scheme the port defaults to 11434, with ``http://`` to 80, with ``https://`` to 443; a port that is no
    port falls back to that default; quotes and blanks around the value are dropped; a path is kept. The address a
    server binds to (``0.0.0.0``, ``::``) is no address to call, so the loopback is called instead. Never raises.
    Source: https://github.com/ollama/ollama/blob/main/envconfig/config.go (``Host``, ``ConnectableHost``).
    """
    text = environ.get("OLLAMA_HOST", "").strip().strip("\"'").strip()
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = ("https", "ollama.com:443") if text == "ollama.com" else ("http", text)
    default_port = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT) if found else DEFAULT_PORT
    host_port, _, path = rest.partition("/")
    host, port = _split(host_port, default_port)
    address = _ip(host)
    if address is not None:
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")  # noqa: PLR2004 -- IPv4
        host = f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else str(address)
    path = path.strip("/")
    return f"{scheme}://{host}:{port}" + (f"/{path}" if path else "")


def _split(host_port: str, default_port: int) -> tuple[str, int]:
    bare = host_port.strip("[]")
    if _ip(bare) is not None:
        return bare, default_port
    host, colon, port_text = host_port.rpartition(":")
    if not colon:
        host, port_text = host_port, ""
    port = int(port_text) if re.fullmatch(r"\d{1,5}", port_text) else default_port
    return host.strip("[]") or "127.0.0.1", port if port <= 65535 else default_port  # noqa: PLR2004 -- highest port


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def version_numbers(version: str | None) -> tuple[int, int, int] | None:
    """The three numbers of a release; None for no version, for one that is none, and for a build from source (0.0.0).

    A pre-release counts as the release before it: 0.32.15-rc1 may lack what 0.32.15 has.
    """
    match = _VERSION.fullmatch(version.strip()) if version else None
    if match is None:
        return None
    numbers = (int(match[1]), int(match[2]), int(match[3]))
    if numbers == (0, 0, 0):
        return None
    return numbers if match[4] is None else (numbers[0], numbers[1], numbers[2] - 1)


def supports_k3(version: str | None) -> bool | None:
    """Whether a version of Ollama can load K3; None for a development build, a pre-release of 0.32.15 or no version."""
    numbers = version_numbers(version)
    if numbers is None or (version is not None and version.strip().removeprefix("v").startswith(f"{K3_VERSION_TEXT}-")):
        return None
    return numbers >= K3_VERSION


def look(environ: Mapping[str, str], *, deadline_seconds: float = _DEADLINE_SECONDS) -> OllamaServer:
    """One look at the server that ``OLLAMA_HOST`` names; never raises and is back by the deadline, under a second.

    The question is asked on a thread, because neither a name lookup nor a server that drips bytes can be bounded by the
    HTTP library's own time-outs.
    """
    url = host_url(environ)
    silent = OllamaServer(
        url=url,
        reachable=False,
        version=None,
        supports_k3=None,
        local=None,
        reason=f"{url} did not answer within {deadline_seconds:g} s",
    )
    answers: list[OllamaServer] = []
    thread = threading.Thread(
        target=lambda: answers.append(_ask(silent, deadline_seconds)), daemon=True, name="ollama-look"
    )
    thread.start()
    thread.join(deadline_seconds)
    return answers[0] if answers else silent


def _ask(unknown: OllamaServer, seconds: float) -> OllamaServer:
    # The standard library's client: its import fits into the deadline on a slow machine too.
    from http.client import HTTPException  # noqa: PLC0415 -- kept out of `kimigguf --help`
    from urllib.error import HTTPError  # noqa: PLC0415 -- as above
    from urllib.request import ProxyHandler, build_opener  # noqa: PLC0415 -- as above

    seen = replace(unknown, local=is_local(unknown.url))
    # A proxy is for the world outside; asking one for a loopback address would name the wrong culprit.
    opener = build_opener(ProxyHandler({})) if seen.local else build_opener()
    try:
        with opener.open(f"{unknown.url}/api/version", timeout=seconds) as reply:
            status, text = reply.status, reply.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace")
    except HTTPError as error:
        with error:
            status, text = error.code, ""
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return replace(seen, reason=f"{unknown.url} does not answer: {str(reason) or type(error).__name__}")
    version = _version_in(text)
    if version is None:
        return replace(seen, reason=f"{unknown.url} answers (HTTP {status}), but not as Ollama does")
    verdict = supports_k3(version)
    told = {
        True: f"version {version}; K3 needs {K3_VERSION_TEXT} or later",
        False: f"version {version} is older than {K3_VERSION_TEXT}, the first that can load K3",
        None: f"version {version} does not say whether it is {K3_VERSION_TEXT} or later",
    }[verdict]
    return replace(seen, reachable=True, version=version, supports_k3=verdict, reason=told)


def _version_in(text: str) -> str | None:
    import json  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        answer = json.loads(text)
    except ValueError:
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and version else None


def is_local(url: str) -> bool | None:
    """Whether the host of ``url`` is this machine; None where its name is unknown.

    Told by binding to it: an address can only be bound to on the machine that it belongs to.
    """
    try:
        candidates = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # ValueError: brackets that hold no address, a name that no encoding allows
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
