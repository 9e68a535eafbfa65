"""From what a user names to a plan on whole files: find or fetch the set, verify it, plan it for this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf.catalogue.quants import ModelProfile, Quant
from kimigguf.download import named
from kimigguf.download.named import CatalogueTarget, Target
from kimigguf.download.store import FileState, SetState, StoredSet, look
from kimigguf.errors import IntegrityError, KimiggufError, NetworkError, UsageError
from kimigguf.events import Listener, Notice, Step, ignore
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.placed import Shortfall
from kimigguf.placement.plan import (
    Plan,
    PlannedFile,
    PlannedModel,
    check_context,
    plan_for,
    planned_model,
    usual_context,
)

if TYPE_CHECKING:
    from kimigguf.download.obtain import Wish
    from kimigguf.gguf_file.shards import ShardSet

_CATALOGUE_ERROR: Final = 0.02
"""By more than this share of a need the catalogue's facts and the real headers do not differ."""


def target_of(text: str, environ: Mapping[str, str]) -> Target:
    """What the user means, if it can be served.

    Raises:
        UsageError: ``unknown-quant`` with the nearest names, ``model-unsupported``.
    """
    target = named.target_of(text, environ)
    if isinstance(target, CatalogueTarget) and (reason := target.profile.unsupported_reason):
        raise UsageError(f"{target.profile.title} cannot be served", code="model-unsupported", cause=reason)
    return target


def obtain(
    target: Target,
    models: Path,
    *,
    environ: Mapping[str, str],
    may_download: bool = True,
    told: bool = False,
    listen: Listener = ignore,
) -> StoredSet:
    """The set on disk, complete by name and size; fetched if it is not there. The hub is not asked if it is.

    ``told``: the user has named the folder; without that no network mount is filled.

    Raises:
        IntegrityError: ``missing-shard``, ``damaged-shard``, ``not-downloaded``.
        NetworkError: The hub cannot be reached; the hint says what works without it.
        UsageError, MachineError: As ``find_set`` and ``download`` have it.
    """
    match named.present(target, models):
        case StoredSet() as whole:
            return whole
        case CatalogueTarget(profile=profile, quant=quant) if may_download:
            return _fetch(profile, quant, models, environ, listen, told=told)
        case CatalogueTarget(quant=quant):
            if isinstance(part := named.look_for(target, models), StoredSet):
                return named.complete(part)
            forbidden = ", and --no-download forbids fetching it"
            raise named.not_here(quant.name, models, hint=f"kimigguf download {quant.name}", because=forbidden)


def _fetch(
    profile: ModelProfile,
    quant: Quant,
    models: Path,
    environ: Mapping[str, str],
    listen: Listener,
    *,
    told: bool,
) -> StoredSet:
    from kimigguf.download.obtain import obtain as fetch  # noqa: PLC0415 -- only where something is fetched

    with _hub_hints(CatalogueTarget(profile=profile, quant=quant), models):
        return fetch(_wish(profile, quant), models, environ=environ, listen=listen, told=told)


def _wish(profile: ModelProfile, quant: Quant) -> "Wish":
    from kimigguf.download.obtain import Wish  # noqa: PLC0415 -- only where something is fetched

    # Whether an engine reads these files was settled when the engine was chosen.
    return Wish(profile=profile, quant=quant, force=quant.engine.min_build is None)


@contextmanager
def _hub_hints(target: CatalogueTarget, models: Path) -> Iterator[None]:
    """Say of a hub that does not answer what works without it, and what becomes of a download that has begun."""
    try:
        yield
    except NetworkError as error:
        if error.code not in {"hub-unreachable", "offline"}:
            raise
        here = _whole_sets(models)
        offline = f"kimigguf serve {here[0]}" if here else "kimigguf recommend, and kimigguf serve PATH"
        later = "; the download goes on where it stopped once it is back" if _has_begun(target, models) else ""
        raise NetworkError(
            error.message,
            code=error.code,
            cause=error.cause,
            hint=f"without the hub this works: {offline}{later}",
        ) from error


def _has_begun(target: CatalogueTarget, models: Path) -> bool:
    """Whether any byte of the quant lies on this machine."""
    try:
        found = named.look_for(target, models)
    except KimiggufError:
        return False
    return isinstance(found, StoredSet) and any(file.done_bytes for file in found.files)


def _whole_sets(models: Path) -> list[str]:
    """Names of quants that could be served without a network."""
    from kimigguf.download.store import managed_sets  # noqa: PLC0415 -- only for a hint

    try:
        return [stored.quant for stored in managed_sets(models) if stored.quant and stored.state is SetState.WHOLE]
    except IntegrityError:
        return []


def verified(stored: StoredSet, listen: Listener = ignore) -> StoredSet:
    """The set, each file with the hash that the hub listed.

    A file is hashed unless its size, time stamp and inode are those of its last good hash: a second start reads
    nothing, and a file that anything has written to is read whole. What rots on the disk without being written is
    found by ``kimigguf verify`` alone.

    Raises:
        IntegrityError: ``damaged-shard``, naming it.
    """
    from kimigguf.download.verify import require_whole, verify  # noqa: PLC0415 -- only where files are served

    if stored.manifest is None:
        listen(
            Notice(text=f"nobody has said what the files in {stored.folder} should be: their hashes are not checked")
        )
        return stored
    changed = sum(file.state is FileState.UNVERIFIED for file in stored.files)
    if changed:
        listen(Step(text=f"hashing {changed} of {len(stored.files)} shards that are new or were touched"))
    require_whole(verify(stored, changed_only=True, listen=listen), stored)
    return look(stored.folder) or stored


def hopeless(
    target: CatalogueTarget, models: Path, machine: Machine, settings: Settings, *, context_tokens: int | None = None
) -> Shortfall | None:
    """What a quant that is not here misses on this machine for sure, by the catalogue alone: nothing is asked for it.

    None: it fits, or nearly, or the catalogue knows too little to say; the headers on the hub tell.

    Raises:
        UsageError: ``context-too-large``.
    """
    from kimigguf.download.store import folder_of  # noqa: PLC0415 -- only where something is fetched

    profile, quant, where = target.profile, target.quant, target.profile.repository
    try:
        spec = ModelSpec.from_profile(profile, quant)
    except UsageError:
        return None
    folder = models
    if where.id is not None and where.commit is not None:
        folder = folder_of(models, repository=where.id, quant=quant.name, commit=where.commit)
    model = PlannedModel(
        architecture=profile.architecture,
        quant=quant.name,
        repository=where.id,
        commit=where.commit,
        folder=str(folder.absolute()),
        files=(),
    )
    match _plan(spec, model, machine, settings, context_tokens):
        case Shortfall() as short if short.missing_bytes > _CATALOGUE_ERROR * short.need_bytes:
            return short
        case _:
            return None


def foreseen(
    target: CatalogueTarget,
    models: Path,
    machine: Machine,
    settings: Settings,
    *,
    context_tokens: int | None = None,
    environ: Mapping[str, str],
    listen: Listener = ignore,
) -> Plan | Shortfall:
    """The plan for a quant that is not here, from the headers on the hub alone: before half a terabyte is fetched.

    Raises:
        NetworkError: The hub cannot be reached; the hint says what works without it.
        IntegrityError, UsageError, MachineError: As ``obtain`` and ``plan_on``.
    """
    from kimigguf.download.obtain import check_set, listed  # noqa: PLC0415 -- only where something is fetched
    from kimigguf.download.store import set_folder  # noqa: PLC0415 -- likewise

    wish = _wish(target.profile, target.quant)
    with _hub_hints(target, models):
        remote = listed(wish, models, environ=environ, listen=listen)
        shards = check_set(remote, wish, environ=environ, listen=listen)
    model = planned_model(
        shards,
        folder=str(set_folder(models, remote).absolute()),
        quant=remote.quant,
        repository=remote.repository,
        commit=remote.commit,
        sha256={file.name: file.sha256 for file in remote.files},
    )
    return _plan(ModelSpec.from_shards(shards), model, machine, settings, context_tokens)


def plan_on(
    stored: StoredSet,
    machine: Machine,
    settings: Settings,
    *,
    context_tokens: int | None = None,
) -> Plan | Shortfall:
    """The plan for these files, a machine as the engine sees it, and these settings.

    ``context_tokens`` None takes 32,768 or, of a model made for fewer, what it was made for.

    Raises:
        IntegrityError: The shards do not belong together.
        UsageError: ``context-too-large`` with the model's own limit.
    """
    from kimigguf.gguf_file.shards import read_set  # noqa: PLC0415 -- reads files

    shards = read_set([file.path for file in stored.files])
    return _plan(ModelSpec.from_shards(shards), model_of(stored, shards), machine, settings, context_tokens)


def _plan(
    spec: ModelSpec, model: PlannedModel, machine: Machine, settings: Settings, context_tokens: int | None
) -> Plan | Shortfall:
    if context_tokens is None:
        context_tokens = usual_context(spec)
    wanted = replace(settings, context_tokens=context_tokens)
    return plan_for(spec, machine, wanted, model=model)


def model_of(stored: StoredSet, shards: "ShardSet") -> PlannedModel:
    """A set on disk, whose headers are ``shards``, as a plan names it."""
    manifest = stored.manifest
    return planned_model(
        shards,
        folder=str(stored.folder.absolute()),
        quant=stored.quant,
        repository=manifest.repository if manifest else None,
        commit=manifest.commit if manifest else None,
        sha256={file.name: file.sha256 for file in stored.files},
    )


def planned_files(stored: StoredSet) -> tuple[PlannedFile, ...]:
    """The set as it lies on disk, in the words of a plan."""
    return tuple(PlannedFile(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in stored.files)


def check_wish(target: Target, context_tokens: int | None) -> None:
    """Refuse a context that the model was never made for, before anything is fetched.

    Raises:
        UsageError: ``bad-context`` or ``context-too-large``.
    """
    if context_tokens is not None:
        limit = target.profile.context_max_tokens if isinstance(target, CatalogueTarget) else None
        check_context(context_tokens, limit)
