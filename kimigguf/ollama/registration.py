"""Plans a registration without writing anything, and carries the plan out."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kimigguf.download.hashing import hash_files
from kimigguf.engines.serving import load_serving
from kimigguf.errors import ServerError, UsageError
from kimigguf.events import Listener, Step
from kimigguf.memory.settings import Settings
from kimigguf.ollama import checks as checking
from kimigguf.ollama import modelfile as writing
from kimigguf.ollama.disk import DiskNeed
from kimigguf.ollama.evidence import Check
from kimigguf.ollama.link import hand_over
from kimigguf.ollama.listing import full_name
from kimigguf.ollama.merge import Job, merge
from kimigguf.ollama.registered import registered
from kimigguf.ollama.server import PATIENT_SECONDS, OllamaServer, look
from kimigguf.ollama.session import Session, mapped, open_session
from kimigguf.ollama.source import Source, SourceFile
from kimigguf.ollama.storage import ModelsFolder, ServerEnvironment, models_folder, server_environment
from kimigguf.ollama.survey import Survey, survey
from kimigguf.ollama.transfer import Blob, bring_all, damaged
from kimigguf.ollama.ways import Candidate, Route

_DEFAULT_MODEL: Final = "kimi-k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Everything that would be done, and whether it may be. ``blocking`` is the first check that forbids it.

    ``already``: Ollama has a model of that name with these very files, parameters and licence.
    """

    name: str
    source: Source
    server: OllamaServer
    settings: ServerEnvironment
    folder: ModelsFolder | None
    survey: Survey
    already: bool
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

    @property
    def chosen(self) -> Candidate:
        """The way that is taken."""
        return self.survey.chosen

    @property
    def need(self) -> DiskNeed:
        return self.chosen.need

    @property
    def link(self) -> bool:
        """Whether the files become blobs without a copy."""
        return self.chosen.link


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

    ``copy``: send copies even where files could be linked.
    """
    settings = settings or Settings()
    name = name or default_name(source)
    server = look(environ, deadline_seconds=PATIENT_SECONDS)
    inside = server_environment(environ) if server.local else ServerEnvironment(values={}, source=None)
    parameters = writing.parameters(
        load_serving(source.architecture or _DEFAULT_MODEL, environ), settings.context_tokens
    )
    folder, taken, found = _ask(server, source, environ, inside, copy=copy)
    already = _is_already(found, folder, _taken_name(name, taken), parameters, licence)
    facts = checking.Facts(
        name=name,
        force=force,
        source=source,
        server=server,
        installed=_installed(environ),
        settings=inside,
        folder=folder,
        taken=taken,
        already=already,
        chosen=found.chosen,
        hindrance=found.hindrance,
        work=found.work,
        context_tokens=settings.context_tokens,
    )
    return Registration(
        name=name,
        source=source,
        server=server,
        settings=inside,
        folder=folder,
        survey=found,
        already=already and not force,
        checks=checking.judge(facts),
        parameters=parameters,
        modelfile=writing.modelfile(_from_line(source), parameters, licence=licence),
        environment=writing.environment(settings, source.size_bytes, experts_on_host=experts_on_host),
        licence=licence,
    )


def _ask(
    server: OllamaServer, source: Source, environ: Mapping[str, str], inside: ServerEnvironment, *, copy: bool
) -> tuple[ModelsFolder | None, frozenset[str] | None, Survey]:
    """What only the server itself can tell: its folder, its models' names, and what the ways into it take."""
    if not server.reachable:
        return None, None, survey(source, server, None, environ, has_blob=_unknown, copy=copy)
    with open_session(server) as session:
        folder = models_folder(environ, inside, has_blob=session.has_blob) if server.local else None
        found = survey(source, server, folder, environ, has_blob=session.has_blob, copy=copy)
        return folder, session.names(), found


def _unknown(_digest: str) -> bool | None:
    return None


def _installed(environ: Mapping[str, str]) -> bool:
    return shutil.which("ollama", path=environ.get("PATH", "")) is not None


def _taken_name(name: str, taken: frozenset[str] | None) -> str | None:
    """The name as Ollama lists it, where it has a model of that name."""
    wanted = full_name(name).lower()
    return next((other for other in taken or () if other.lower() == wanted), None)


def _is_already(
    found: Survey,
    folder: ModelsFolder | None,
    name: str | None,
    parameters: Mapping[str, writing.Value],
    licence: str | None,
) -> bool:
    if folder is None or name is None or found.digests is None:
        return False
    there = registered(folder.path, name)
    return there is not None and there.is_this(found.digests, parameters, licence)


def _from_line(source: Source) -> str:
    if not source.files:
        return f"./{source.label}"
    return str(source.folder if len(source.files) > 1 else source.files[0].path)


def register(
    registration: Registration, listen: Listener, *, environ: Mapping[str, str] | None = None
) -> tuple[Blob, ...]:
    """Merge the files where that is the way, send them and create the model; returns the blobs, in order.

    ``environ`` is that of the program that merges. Where the model is there already, nothing is done.

    Raises:
        UsageError, MachineError, NetworkError: A check forbids it; nothing has been written.
        IntegrityError, MachineError, NetworkError, ServerError: It failed midway; there is no model of that name then
            (or, with ``force``, still the old one), and the next run goes on: it sends and merges only what is missing.
    """
    if registration.blocking is not None:
        raise checking.error_for(registration.blocking)
    source, job = registration.source, registration.survey.job
    blobs: tuple[Blob, ...] = ()
    if not registration.already:
        files = source.files
        if registration.chosen.route is Route.MERGED and job is not None:
            files = (_merged(registration, job, listen, environ if environ is not None else os.environ),)
        with open_session(registration.server, load_minutes=registration.load_minutes) as session:
            listen(Step(text=f"giving {source.label} to Ollama at {registration.server.url}"))
            with _times_kept([file.path for file in source.files] if registration.link else []):
                blobs = bring_all(session, files, listen, folder=registration.folder, link=registration.link)
                _create(session, registration, blobs, listen)
    if job is not None:
        job.clear()  # a step on the way, of this run or of an earlier one
    return blobs


def _merged(registration: Registration, job: Job, listen: Listener, environ: Mapping[str, str]) -> SourceFile:
    """The set as one file: as Ollama has it, or merged now."""
    record = job.record()
    if record is not None:
        with open_session(registration.server) as session:
            if session.has_blob(f"sha256:{record.sha256}"):
                return SourceFile(path=job.whole, size_bytes=record.size_bytes, sha256=record.sha256, verified=True)
    _verify(registration.source, listen)
    record = merge(job, environ, listen)
    if registration.link and registration.folder is not None:
        hand_over(job.whole, registration.folder)
    return SourceFile(path=job.whole, size_bytes=record.size_bytes, sha256=record.sha256, verified=True)


def _verify(source: Source, listen: Listener) -> None:
    """Hash the shards whose hash is on record and not known to be right still: nobody else would see their damage."""
    doubtful = {file.name: file for file in source.files if file.sha256 is not None and not file.verified}
    found = hash_files(
        {name: file.path for name, file in doubtful.items()},
        {name: file.sha256 for name, file in doubtful.items()},
        listen,
    )
    for name, file in doubtful.items():
        if found[name].sha256 != file.sha256:
            raise damaged(file, f"recorded {file.sha256}, found {found[name].sha256}")


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
    full = full_name(name)
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
