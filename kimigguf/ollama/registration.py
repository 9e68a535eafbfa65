"""Plans a registration without writing anything, and carries the plan out."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.engines.serving import load_serving
from kimigguf.errors import ServerError, UsageError
from kimigguf.events import Listener, Step
from kimigguf.memory.settings import Settings
from kimigguf.ollama import checks as checking
from kimigguf.ollama import modelfile as writing
from kimigguf.ollama.disk import DiskNeed, need, way_for
from kimigguf.ollama.evidence import Check
from kimigguf.ollama.link import why_not
from kimigguf.ollama.server import PATIENT_SECONDS, OllamaServer, look
from kimigguf.ollama.session import Session, mapped, open_session
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder, ServerEnvironment, models_folder, server_environment
from kimigguf.ollama.transfer import Blob, bring_all

_DEFAULT_MODEL: Final = "kimi-k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Everything that would be done, and whether it may be. ``blocking`` is the first check that forbids it.

    ``link`` says whether the shards are linked into Ollama's folder, ``way_reason`` why or why not.
    """

    name: str
    source: Source
    server: OllamaServer
    settings: ServerEnvironment
    folder: ModelsFolder | None
    need: DiskNeed
    link: bool
    way_reason: str
    checks: tuple[Check, ...]
    parameters: Mapping[str, writing.Value]
    modelfile: str
    environment: tuple[writing.Variable, ...]
    licence: str | None

    @property
    def load_minutes(self) -> int:
        """How long a load may take."""
        return writing.load_timeout_minutes(self.source.size_bytes)

    @property
    def blocking(self) -> Check | None:
        return next((check for check in self.checks if check.blocks), None)


def default_name(source: Source) -> str:
    """``kimi-k3:<quant>``, in the lower case that Ollama's names are written in."""
    return f"{_DEFAULT_MODEL}:{source.label.lower()}"


def plan(
    source: Source,
    environ: Mapping[str, str],
    *,
    name: str | None = None,
    force: bool = False,
    copy: bool = False,
    settings: Settings | None = None,
    experts_on_host: bool | None = None,
    licence: str | None = None,
) -> Registration:
    """Look at everything and write nothing. Never raises for what a check can say.

    ``copy``: send copies even where the shards could be linked.
    """
    settings = settings or Settings()
    name = name or default_name(source)
    server = look(environ, deadline_seconds=PATIENT_SECONDS)
    inside = server_environment(environ) if server.local else ServerEnvironment(values={}, source=None)
    folder, taken, present = _ask(server, source, environ, inside)
    hindrance = "--copy was given" if copy else why_not(source, folder)
    link = hindrance is None and bool(source.files)
    disk = _need(source, server, present, link=link)
    parameters = writing.parameters(
        load_serving(source.architecture or _DEFAULT_MODEL, environ), settings.context_tokens
    )
    facts = checking.Facts(
        name=name,
        force=force,
        source=source,
        server=server,
        installed=_installed(environ),
        settings=inside,
        folder=folder,
        taken=taken,
        need=disk,
    )
    return Registration(
        name=name,
        source=source,
        server=server,
        settings=inside,
        folder=folder,
        need=disk,
        link=link,
        way_reason="the shards and Ollama's folder share a file system" if link else f"copied: {hindrance}",
        checks=checking.judge(facts),
        parameters=parameters,
        modelfile=writing.modelfile(_from_line(source), parameters, licence=licence),
        environment=writing.environment(settings, source.size_bytes, experts_on_host=experts_on_host),
        licence=licence,
    )


def _installed(environ: Mapping[str, str]) -> bool:
    return shutil.which("ollama", path=environ.get("PATH", "")) is not None


def _ask(
    server: OllamaServer, source: Source, environ: Mapping[str, str], inside: ServerEnvironment
) -> tuple[ModelsFolder | None, frozenset[str] | None, frozenset[str]]:
    """What only the server itself can tell: its folder, its models' names, and which of our files it has."""
    if not server.reachable:
        return None, None, frozenset()
    with open_session(server) as session:
        folder = models_folder(environ, inside, has_blob=session.has_blob) if server.local else None
        return folder, session.names(), _present(session, source)


def _from_line(source: Source) -> str:
    if not source.files:
        return f"./{source.label}"
    return str(source.folder if len(source.files) > 1 else source.files[0].path)


def _present(session: Session, source: Source) -> frozenset[str]:
    """The names of the files whose recorded hash the server has a blob for."""
    return frozenset(
        file.name for file in source.files if file.sha256 is not None and session.has_blob(f"sha256:{file.sha256}")
    )


def _need(source: Source, server: OllamaServer, present: frozenset[str], *, link: bool) -> DiskNeed:
    sizes = [(file.size_bytes, file.name in present) for file in source.files] or [(source.size_bytes, False)]
    # A quant that is not downloaded yet will come in shards, as all of them do.
    return need(way_for(server.version, len(source.files) or 2), sizes, linked=link)


def register(registration: Registration, listen: Listener) -> tuple[Blob, ...]:
    """Send the files and create the model; returns the blobs, in order.

    Raises:
        UsageError, MachineError, NetworkError: A check forbids it; nothing has been written.
        IntegrityError, MachineError, NetworkError, ServerError: It failed midway; there is no model of that name then
            (or, with ``force``, still the old one), and the next run sends only what is missing.
    """
    if registration.blocking is not None:
        raise checking.error_for(registration.blocking)
    source = registration.source
    with open_session(registration.server, load_minutes=registration.load_minutes) as session:
        listen(Step(text=f"giving {source.label} to Ollama at {registration.server.url}"))
        into = registration.folder if registration.link else None
        with _times_kept([file.path for file in source.files] if into else []):
            blobs = bring_all(session, source.files, listen, link_into=into)
            _create(session, registration, blobs, listen)
    return blobs


@contextlib.contextmanager
def _times_kept(paths: Iterable[Path]) -> Iterator[None]:
    """Ollama touches its blobs. Where those are our own files, that must not look like a change of their bytes."""
    before = {}
    for path in paths:
        with contextlib.suppress(OSError):  # a file that has gone is told by who reads it
            before[path] = path.stat()
    try:
        yield
    finally:
        for path, was in before.items():
            with contextlib.suppress(OSError):
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def _create(session: Session, registration: Registration, blobs: tuple[Blob, ...], listen: Listener) -> None:
    last = None
    with mapped(session.server):
        for reply in session.client.create(
            registration.name,
            files={blob.file.name: blob.digest for blob in blobs},
            parameters=registration.parameters,
            license=registration.licence,
            stream=True,
        ):
            if reply.status and reply.status != last:
                listen(Step(text=f"Ollama: {reply.status}"))
            last = reply.status
    if last != "success":
        raise ServerError(
            "Ollama ended the registration before it was done",
            code="ollama-cut-off",
            cause=f"the last it said was {last!r}",
            hint="run the same command again: what Ollama has is not sent twice",
        )


def reachable_server(environ: Mapping[str, str]) -> OllamaServer:
    """The server that ``OLLAMA_HOST`` names.

    Raises:
        MachineError, NetworkError: ``ollama-unreachable``.
    """
    server = look(environ, deadline_seconds=PATIENT_SECONDS)
    if not server.reachable:
        raise checking.error_for(checking.unreachable(server, installed=_installed(environ)))
    return server


def registered_bytes(server: OllamaServer, name: str) -> int:
    """The size of a registered model.

    Raises:
        UsageError: ``no-such-model``.
    """
    with open_session(server) as session, mapped(server):
        sizes = {model.model: int(model.size or 0) for model in session.client.list().models if model.model}
    full = checking.full_name(name)
    if full not in sizes:
        raise UsageError(
            f"Ollama has no model {name}", code="no-such-model", hint=f"it has: {', '.join(sorted(sizes)) or 'none'}"
        )
    return sizes[full]


def remove(server: OllamaServer, name: str) -> int:
    """Remove a model from Ollama; returns the bytes it held.

    Raises:
        UsageError: ``no-such-model``.
    """
    size = registered_bytes(server, name)
    with open_session(server) as session, mapped(server):
        session.client.delete(name)
    return size
