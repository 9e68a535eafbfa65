"""Looks at what each way into Ollama would take, and picks one. Writes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kimigguf.download.disk import existing
from kimigguf.ollama.disk import Way, need, need_merged, way_for
from kimigguf.ollama.link import why_not, why_not_new
from kimigguf.ollama.merge import Job, split_tool
from kimigguf.ollama.merged import merged
from kimigguf.ollama.server import OllamaServer
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder
from kimigguf.ollama.ways import Candidate, Route, choose, merged_way, shards_way, why
from kimigguf.ollama.workplace import Workplace, workplace

_ASKED = "--copy was given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The ways, the one that is taken, and ``reason`` why.

    ``hindrance`` is why the files of that way cannot be linked, None where they can. ``work`` is where the set would be
    merged and ``job`` the merging, None where there is no place or nothing to merge. ``digests`` are those of the blobs
    that Ollama would get, None where a hash is not known yet.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    reason: str
    hindrance: str | None
    work: Workplace | None
    job: Job | None
    digests: tuple[str, ...] | None


def survey(
    source: Source,
    server: OllamaServer,
    folder: ModelsFolder | None,
    environ: Mapping[str, str],
    *,
    has_blob: Callable[[str], bool | None],
    copy: bool,
) -> Survey:
    """Work out the ways for a set; ``has_blob`` asks the server for a digest, ``copy`` forbids links."""
    hindrance = _ASKED if copy else _hindrance(source, folder)
    free = folder.free_bytes if folder else None
    present = {
        file.name: file.sha256 is not None and has_blob(f"sha256:{file.sha256}") is True for file in source.files
    }
    sizes = [(file.size_bytes, present[file.name]) for file in source.files] or [(source.size_bytes, False)]
    # A quant that is not downloaded yet will come in shards, as all of them do.
    does = way_for(server.version, len(source.files) or 2)
    candidates = [
        shards_way(
            need(does, sizes, linked=hindrance is None), hindrance=hindrance, version=server.version, free_bytes=free
        )
    ]
    work = workplace(source, folder, link=not copy) if does is not Way.SINGLE and server.local else None
    job = _job(source, work, environ) if work is not None else None
    if does is Way.MERGE and work is not None and job is not None:
        candidates.append(_merged(source, work, job, free, has_blob=has_blob, copy=copy))
    chosen = choose(candidates)
    if chosen.route is Route.MERGED and work is not None and not copy:
        hindrance = work.hindrance
    return Survey(
        candidates=tuple(candidates),
        chosen=chosen,
        reason=why(
            chosen,
            candidates,
            alone=_alone(does, server, work),
            hindrance=hindrance,
        ),
        hindrance=hindrance,
        work=work if does is Way.MERGE else None,
        job=job,
        digests=_digests(source, chosen, job),
    )


def _hindrance(source: Source, folder: ModelsFolder | None) -> str | None:
    """Why the set cannot be linked; one that is not here yet is judged by where it would lie."""
    if source.files:
        return why_not(source, folder)
    return why_not_new(existing(source.folder).stat().st_dev, folder)


def _job(source: Source, work: Workplace, environ: Mapping[str, str]) -> Job:
    paths = tuple(file.path.absolute() for file in source.files)
    return Job(files=paths, folder=work.folder, name=source.label, tool=split_tool(environ))


def _merged(
    source: Source,
    work: Workplace,
    job: Job,
    free: int | None,
    *,
    has_blob: Callable[[str], bool | None],
    copy: bool,
) -> Candidate:
    record = job.record() if job.files else None
    size = source.size_bytes
    if record is not None:
        size = record.size_bytes
    elif job.files and not source.unreadable and not source.unread_tensors:
        size = merged(job.files).size_bytes
    hindrance = _ASKED if copy else work.hindrance
    disk = need_merged(
        size,
        begun_bytes=min(job.begun_bytes(), size),
        present=record is not None and has_blob(f"sha256:{record.sha256}") is True,
        linked=hindrance is None,
        apart=work.apart,
    )
    return merged_way(
        disk,
        hindrance=hindrance,
        tool=job.tool.name if job.tool else "kimigguf itself (no llama-gguf-split is here)",
        free_bytes=free,
        work_free_bytes=work.free_bytes,
    )


def _alone(does: Way, server: OllamaServer, work: Workplace | None) -> str:
    if does is Way.SINGLE:
        return "it is one file, and there is nothing to merge"
    if does is Way.KEEP:
        return f"Ollama {server.version} keeps the shards, so there is nothing to merge"
    if server.local and work is None:
        return "no folder to merge in can be written by this user"
    return "nothing can be merged for a server that is not on this machine"


def _digests(source: Source, chosen: Candidate, job: Job | None) -> tuple[str, ...] | None:
    if chosen.route is Route.MERGED and job is not None:
        record = job.record() if job.files else None
        return None if record is None else (f"sha256:{record.sha256}",)
    known = tuple(f"sha256:{file.sha256}" for file in source.files if file.sha256 is not None)
    return known if known and len(known) == len(source.files) else None
