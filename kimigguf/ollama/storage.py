"""Where a local Ollama keeps its models, how much is free there, and the settings of its server that can be read."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_UNIT_SECONDS: Final = 3.0
_SERVICE_MODELS: Final = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama's Linux installer makes its service keep them."""
_READABLE: Final = (
    "OLLAMA_MODELS",
    "OLLAMA_LOAD_TIMEOUT",
    "OLLAMA_NUM_PARALLEL",
    "OLLAMA_CONTEXT_LENGTH",
    "OLLAMA_KV_CACHE_TYPE",
    "OLLAMA_KEEP_ALIVE",
    "OLLAMA_NOPRUNE",
    "HOME",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEnvironment:
    """The server's own environment as far as it could be read, and where from; None values could not be."""

    values: Mapping[str, str]
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFolder:
    """The folder with ``blobs`` and ``manifests``.

    ``confirmed``: the running server has a blob that was found there (or lacks it: False); None where nothing lies
    there that could be asked for. ``free_bytes`` and ``device`` are those of the file system that the folder is on.
    ``writable``: this user may put files into ``blobs``. ``owner`` is the number of the user that ``blobs`` belongs to,
    who is taken for the one that Ollama runs as.
    """

    path: Path
    source: str
    confirmed: bool | None
    free_bytes: int | None
    device: int | None
    writable: bool
    owner: int | None = None


def server_environment(environ: Mapping[str, str]) -> ServerEnvironment:
    """Read the settings of the Ollama that runs here: from its process, else its systemd unit, else our environment."""
    for source, read in (("the process ollama serve", _from_process), ("the systemd unit ollama", _from_unit)):
        values = read()
        if values is not None:
            return ServerEnvironment(values=_ours(values), source=source)
    values = _ours(environ)
    own = any(name.startswith("OLLAMA_") for name in values)
    return ServerEnvironment(values=values if own else {}, source="this shell's environment" if own else None)


def _ours(values: Mapping[str, str]) -> dict[str, str]:
    return {name: values[name] for name in _READABLE if values.get(name)}


def _from_process() -> dict[str, str] | None:
    """The environment of a running ``ollama serve``; None where there is none or it belongs to somebody else."""
    import psutil  # noqa: PLC0415 -- kept out of `kimigguf --help`

    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] in {"ollama", "ollama.exe"} and "serve" in (process.info["cmdline"] or ()):
            try:
                return dict(process.environ())
            except (psutil.Error, OSError):
                continue
    return None


def _from_unit() -> dict[str, str] | None:
    """What the systemd unit sets; None where there is no such unit or no systemd."""
    try:
        shown = subprocess.run(
            ["systemctl", "show", "ollama", "--property=Environment,LoadState"],
            capture_output=True,
            text=True,
            timeout=_UNIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_unit(shown.stdout) if shown.returncode == 0 else None


def parse_unit(text: str) -> dict[str, str] | None:
    """The variables in what ``systemctl show --property=Environment,LoadState`` printed; None: no such unit."""
    import shlex  # noqa: PLC0415 -- needed on this path only

    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if lines.get("LoadState") != "loaded":
        return None
    try:
        words = shlex.split(lines.get("Environment", ""))
    except ValueError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def models_folder(
    environ: Mapping[str, str], server: ServerEnvironment, *, has_blob: Callable[[str], bool | None]
) -> ModelsFolder | None:
    """The folder where the local server keeps its models; None where no candidate exists.

    Each candidate is held against the running server: a blob that lies there must be one that the server has.
    ``has_blob`` asks it for a digest, None when it does not answer.
    """
    found = [_look_at(path, source, has_blob) for path, source in _candidates(environ, server) if path.is_dir()]
    confirmed = [folder for folder in found if folder.confirmed]
    possible = [folder for folder in found if folder.confirmed is None]
    return next(iter([*confirmed, *possible]), None)


def _candidates(environ: Mapping[str, str], server: ServerEnvironment) -> list[tuple[Path, str]]:
    candidates = []
    if server.values.get("OLLAMA_MODELS"):
        candidates.append((Path(server.values["OLLAMA_MODELS"]), f"OLLAMA_MODELS of {server.source}"))
    if environ.get("OLLAMA_MODELS"):
        candidates.append((Path(environ["OLLAMA_MODELS"]), "OLLAMA_MODELS of this shell"))
    if server.values.get("HOME"):
        candidates.append((Path(server.values["HOME"], ".ollama", "models"), f"the home of {server.source}"))
    candidates.append((_SERVICE_MODELS, "the installer's default for the service"))
    if environ.get("HOME"):
        candidates.append((Path(environ["HOME"], ".ollama", "models"), "the default in this user's home"))
    return candidates


def _look_at(path: Path, source: str, has_blob: Callable[[str], bool | None]) -> ModelsFolder:
    blobs = path / "blobs"
    digest = _some_digest(blobs)
    free: int | None = None
    device: int | None = None
    owner: int | None = None
    with contextlib.suppress(OSError):  # what comes after stays unknown then
        free, device = shutil.disk_usage(path).free, path.stat().st_dev
        owner = blobs.stat().st_uid
    return ModelsFolder(
        path=path,
        source=source,
        confirmed=None if digest is None else has_blob(digest),
        free_bytes=free,
        device=device,
        writable=os.access(blobs, os.W_OK | os.X_OK),
        owner=owner,
    )


def _some_digest(blobs: Path) -> str | None:
    try:
        with os.scandir(blobs) as entries:
            for entry in entries:
                kind, _, digest = entry.name.partition("-")
                if kind == "sha256" and len(digest) == 64:  # noqa: PLR2004 -- hex digits of a SHA-256
                    return f"sha256:{digest}"
    except OSError:
        pass  # a folder that may not be read is no evidence either way
    return None
