"""What lies on the hub: a quant's shards at one commit, and their headers without their weights."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf.catalogue.access import endpoint, token
from kimigguf.catalogue.header_cache import HeaderCache
from kimigguf.catalogue.hub_ranges import RangeReader, refused
from kimigguf.catalogue.quants import Quant
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.errors import IntegrityError, KimiggufError, NetworkError, UsageError
from kimigguf.events import Advance, Listener, Step, ignore
from kimigguf.gguf_file.header import Header, HeaderReader, NeedMore
from kimigguf.gguf_file.names import is_projector, sets
from kimigguf.gguf_file.read import check_size
from kimigguf.gguf_file.shards import ShardFile, ShardSet, check

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_ANSWER_SECONDS: Final = 30.0
_WAITS_SECONDS: Final = (0.5, 1.5)
"""Before the second and the third try of a listing: a hub that is not there is told within seconds."""
_TOO_MANY, _SERVER_FAULT = 429, 500
_NAMED: Final = 4
_CONNECTIONS: Final = 8
_FIRST_BYTES: Final = 32 << 10
"""A shard of K3's weights has a header of some 10 KB; 33 of these stay far below its first shard's 7 MB."""
_GROWTH: Final = 7
_MOST_AT_ONCE_BYTES: Final = 2 << 20
_MOST_BYTES: Final = 64 << 20
"""For all headers of a set together."""


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether HF_HUB_OFFLINE forbids requests."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def list_set(
    repository: str, quant: Quant, *, revision: str, environ: Mapping[str, str], or_known: bool = False
) -> RemoteSet:
    """The shards of a quant at one commit, complete by their names.

    Args:
        repository: Such as ``unsloth/Kimi-K3-GGUF``.
        quant: Whose folder is looked into.
        revision: A commit, or a branch or tag that is resolved to one.
        environ: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE; with the last only what was listed before is known.
        or_known: Be content with what was listed before at this commit when the hub cannot be reached.

    Raises:
        NetworkError: ``offline``, ``hub-unreachable``, ``gated``, ``bad-answer``.
        UsageError: ``no-such-repository``, ``unknown-revision``, ``quant-not-there`` with what is, ``bad-endpoint``.
        IntegrityError: ``mixed-set``, ``several-sets``, ``missing-shard``, ``bad-listing``.
    """
    cache = HeaderCache(repository, revision, environ=environ) if _COMMIT.fullmatch(revision) else None
    known = cache.listing(quant.name) if cache and (or_known or is_offline(environ)) else None
    if is_offline(environ) and known is not None:
        return known
    try:
        info = _ask(repository, revision, environ)
    except NetworkError as error:
        if known is not None and error.code == "hub-unreachable":
            return known
        raise
    commit = _commit_of(info, repository, revision)
    listed = _files_in(info, quant.folder)
    if not listed:
        raise _not_there(info, repository, commit, quant)
    wanted = _complete([file.name for file in listed], f"{repository}/{quant.folder} at {commit[:12]}")
    by_name = {file.name: file for file in listed}
    remote = RemoteSet(
        repository=repository, commit=commit, quant=quant.name, files=tuple(by_name[name] for name in wanted)
    )
    HeaderCache(repository, commit, environ=environ).keep_listing(remote)
    return remote


def resolve(repository: str, *, revision: str, environ: Mapping[str, str]) -> str:
    """The commit, in 40 hex digits, that a branch or tag stands for now.

    Raises:
        NetworkError, UsageError: As ``list_set``.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    return _commit_of(_ask(repository, revision, environ), repository, revision)


def list_projectors(repository: str, *, revision: str, environ: Mapping[str, str]) -> RemoteSet:
    """The vision projectors (``mmproj-*.gguf``) at the root of a repository at one commit; files of their own, no set.

    Raises:
        NetworkError, UsageError: As ``list_set``; ``no-projector`` where there is none.
    """
    info = _ask(repository, revision, environ)
    commit = _commit_of(info, repository, revision)
    files = tuple(file for file in _files_in(info, "") if is_projector(file.name))
    if not files:
        raise UsageError(f"{repository} at {commit[:12]} has no vision projector", code="no-projector")
    return RemoteSet(repository=repository, commit=commit, quant="mmproj", files=files)


# -- the listing ------------------------------------------------------------------------------------------------------


def _ask(repository: str, revision: str, environ: Mapping[str, str]) -> "ModelInfo":
    """What the hub says of a repository at a revision: its commit and all its files, in one answer."""
    import httpx2  # noqa: PLC0415 -- heavy; the client's HTTP library, whose errors come through it
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 -- heavy

    where = endpoint(environ)
    if is_offline(environ):
        raise _offline(f"the list of {repository} at {revision[:12]} is not on this machine")
    api = HfApi(endpoint=where, token=token(environ) or False)
    last: Exception | None = None
    for wait in (0.0, *_WAITS_SECONDS):
        time.sleep(wait)
        try:
            return api.model_info(repository, revision=revision, files_metadata=True, timeout=_ANSWER_SECONDS)
        except errors.OfflineModeIsEnabled as error:
            raise _offline(f"{repository} cannot be listed") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status != _TOO_MANY and status < _SERVER_FAULT:
                raise _told(error, status, repository, revision, environ) from error
            last = error
        except errors.HFValidationError as error:
            raise UsageError(f"{repository!r} is no repository's name", code="no-such-repository") from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            last = error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # Raised by the client over an answer that is not the hub's, such as a hotel's sign-in page.
            raise NetworkError(
                f"{where} does not answer as the hub does",
                code="bad-answer",
                cause=f"{type(error).__name__} over the list of {repository}",
                hint="open it in a browser: is there a sign-in page? If HF_ENDPOINT names a mirror, unset it",
            ) from error
    raise _unreachable(where, last) from last


def _unreachable(where: str, last: Exception | None) -> NetworkError:
    import httpx2  # noqa: PLC0415 -- as above
    from huggingface_hub import errors  # noqa: PLC0415 -- as above

    reason = "the connection was cut"
    if isinstance(last, httpx2.TimeoutException):
        reason = "no answer in time"
    elif isinstance(last, httpx2.ConnectError):
        reason = str(last) or "no connection"
    elif isinstance(last, errors.HfHubHTTPError):
        reason = f"it answers HTTP {last.response.status_code}"
    return NetworkError(
        f"the hub at {where} cannot be reached",
        code="hub-unreachable",
        cause=reason,
        hint="check the network, or name a mirror with HF_ENDPOINT; without a hub these work: "
        "kimigguf list, recommend, plan, and serve of what is downloaded",
    )


def _offline(message: str) -> NetworkError:
    return NetworkError(
        message,
        code="offline",
        cause="HF_HUB_OFFLINE is set",
        hint="unset HF_HUB_OFFLINE; without a hub these work: kimigguf list, recommend, plan, verify",
    )


def _told(error: Exception, status: int, repository: str, revision: str, environ: Mapping[str, str]) -> KimiggufError:
    from huggingface_hub import errors  # noqa: PLC0415 -- as above

    if isinstance(error, errors.GatedRepoError):
        return refused(repository, has_token=token(environ) is not None)
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(
            f"{repository} has no revision {revision}",
            code="unknown-revision",
            hint=f"its commits: https://huggingface.co/{repository}/commits/main",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"the hub at {endpoint(environ)} has no repository {repository}, or does not show it to you",
            code="no-such-repository",
            hint="for a private one: export HF_TOKEN=hf_...; if HF_ENDPOINT names a mirror, it may lack it",
        )
    if status in {401, 403}:
        return refused(repository, has_token=token(environ) is not None)
    return NetworkError(
        f"{endpoint(environ)} does not list {repository}", code="bad-answer", cause=f"the answer was HTTP {status}"
    )


def _commit_of(info: "ModelInfo", repository: str, revision: str) -> str:
    commit = info.sha
    if commit is None or not _COMMIT.fullmatch(commit) or (_COMMIT.fullmatch(revision) and commit != revision):
        raise NetworkError(
            f"the hub does not say which commit of {repository} it lists",
            code="bad-answer",
            cause=f"asked for {revision}, it answered with commit {commit!r}",
            hint="if HF_ENDPOINT names a mirror, unset it",
        )
    return commit


def _files_in(info: "ModelInfo", folder: str) -> list[RemoteFile]:
    """The files right in a folder, as far as they could be shards."""
    files = []
    for sibling in info.siblings or ():
        where, _, name = sibling.rfilename.rpartition("/")
        if where == folder and name.endswith(".gguf"):
            files.append(_file(sibling))
    return files


def _file(sibling: "RepoSibling") -> RemoteFile:
    size, digest = sibling.size, sibling.lfs.sha256 if sibling.lfs else None
    problem = None
    if not sibling.rfilename.isprintable():
        problem = "its name holds control characters"
    elif type(size) is not int or size < 0 or (sibling.lfs and sibling.lfs.size != size):
        problem = f"its size is {size!r}"
    elif digest is not None and not _SHA256.fullmatch(digest):
        problem = f"its SHA-256 is {digest!r}"
    if problem is not None or size is None:
        raise IntegrityError(
            f"the hub's list has an impossible entry {sibling.rfilename!r}", code="bad-listing", cause=problem
        )
    return RemoteFile(path=sibling.rfilename, size_bytes=size, sha256=digest)


def _not_there(info: "ModelInfo", repository: str, commit: str, quant: Quant) -> UsageError:
    paths = (sibling.rfilename for sibling in info.siblings or ())
    there = sorted({path.partition("/")[0] for path in paths if "/" in path and path.endswith(".gguf")})
    return UsageError(
        f"{repository} at {commit[:12]} has no {quant.name}",
        code="quant-not-there",
        cause=f"no GGUF file lies in {quant.folder}/",
        hint=f"at this commit there are {', '.join(there)}" if there else None,
    )


def _complete(names: Iterable[str], where: str) -> tuple[str, ...]:
    """The names of the one set among these, if it is one and whole."""
    present = set(names)
    found = sets(present)
    if len(found) != 1:
        prefixes = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", group[0]) for group in found}
        mixed = len(found) > 1 and len(prefixes) == 1
        raise IntegrityError(
            f"{where} holds {'no model' if not found else f'{len(found)} sets of shards'}",
            code="mixed-set" if mixed else "several-sets" if found else "no-gguf",
            cause=f"sets of {' and '.join(str(len(group)) for group in found)} shards" if mixed else None,
            hint="an upload may be under way; ask for another commit with --revision",
        )
    if missing := [name for name in found[0] if name not in present]:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise IntegrityError(
            f"{where} is incomplete: {len(missing)} of {len(found[0])} shards are missing",
            code="missing-shard",
            cause=", ".join(missing[:_NAMED]) + more,
            hint="an upload may be under way; ask for another commit with --revision",
        )
    return found[0]


# -- the headers ------------------------------------------------------------------------------------------------------


def remote_headers(remote: RemoteSet, *, environ: Mapping[str, str], listen: Listener = ignore) -> ShardSet:
    """The headers of a set, read from the hub as far as they were not read before, and held against each other.

    Raises:
        NetworkError: ``offline``, ``hub-unreachable``, ``gated``, ``bad-answer``.
        IntegrityError: What ``HeaderReader.feed``, ``check_size`` and ``shards.check`` find; ``changed-on-hub``,
            ``missing-on-hub``, ``header-too-large``.
        MachineError: ``cannot-write`` for the folder where headers are kept.
    """
    cache = HeaderCache(remote.repository, remote.commit, environ=environ)
    found = {file.path: kept for file in remote.files if (kept := _kept(cache, remote, file)) is not None}
    missing = tuple(file for file in remote.files if file.path not in found)
    if missing and is_offline(environ):
        raise _offline(f"the headers of {remote.quant} at {remote.commit[:12]} are not on this machine")
    if missing:
        listen(Step(text=f"reading the headers of {len(missing)} files of {remote.quant}, not their weights"))
        found |= _fetch_all(remote, missing, cache, environ=environ, listen=listen)
    files = tuple(
        ShardFile(name=file.name, size_bytes=file.size_bytes, header=header, header_path=path)
        for file in remote.files
        for header, path in (found[file.path],)
    )
    check(files)
    return ShardSet(files=files)


def _kept(cache: HeaderCache, remote: RemoteSet, file: RemoteFile) -> tuple[Header, Path] | None:
    data = cache.header(file)
    if data is None:
        return None
    answer = HeaderReader(_title(remote, file), size_bytes=file.size_bytes).feed(data)
    return None if isinstance(answer, NeedMore) else (answer, cache.header_path(file))


def _title(remote: RemoteSet, file: RemoteFile) -> str:
    return f"{file.path} at {remote.commit[:12]}"


def _fetch_all(
    remote: RemoteSet,
    missing: tuple[RemoteFile, ...],
    cache: HeaderCache,
    *,
    environ: Mapping[str, str],
    listen: Listener,
) -> dict[str, tuple[Header, Path]]:
    found: dict[str, tuple[Header, Path]] = {}
    with closing(RangeReader(remote, environ=environ, most_bytes=_MOST_BYTES)) as reader:
        workers = ThreadPoolExecutor(max_workers=min(_CONNECTIONS, len(missing)), thread_name_prefix="headers")
        try:
            futures = {workers.submit(_fetch, reader.read, remote, file): file for file in missing}
            for future in as_completed(futures):
                file = futures[future]
                header, data = future.result()
                found[file.path] = header, cache.keep_header(file, data)
                listen(Advance(activity="read", item="headers", done_bytes=reader.read_bytes, total_bytes=None))
        finally:
            # After an error or Ctrl-C nothing new starts, and what is under way ends at its next piece.
            reader.stop()
            workers.shutdown(wait=True, cancel_futures=True)
    return found


def _fetch(read: Callable[[RemoteFile, int, int], bytes], remote: RemoteSet, file: RemoteFile) -> tuple[Header, bytes]:
    """The header of one file and the bytes up to its weights, in few requests and little more than these bytes."""
    title = _title(remote, file)
    if file.size_bytes == 0:
        raise IntegrityError(f"{title} is empty", code="empty-file")
    reader = HeaderReader(title, size_bytes=file.size_bytes)
    answer = reader.feed(b"")
    while isinstance(answer, NeedMore):
        have = len(reader.data)
        step = min(max(have * _GROWTH, _FIRST_BYTES), _MOST_AT_ONCE_BYTES)
        end = min(max(have + step, answer.size_bytes), file.size_bytes)
        answer = reader.feed(read(file, have, end - have))
    check_size(answer, file.size_bytes, name=title)
    return answer, bytes(reader.data[: answer.data_offset])
