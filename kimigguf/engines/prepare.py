"""From what a user names to a plan on whole files: find or fetch the set, verify it, plan it for this machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.catalogue.quants import EngineNeed, ModelProfile, Quant
from kimigguf.download.store import FileState, SetState, StoredSet, locate, look, stored_at
from kimigguf.errors import IntegrityError, NetworkError, UsageError
from kimigguf.events import Listener, Notice, Step, ignore
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.place import Shortfall
from kimigguf.placement.plan import Plan, PlannedFile, check_context, plan_for, planned_model

DEFAULT_CONTEXT_TOKENS: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueTarget:
    """A quant of the catalogue."""

    profile: ModelProfile
    quant: Quant

    @property
    def need(self) -> EngineNeed:
        return self.quant.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTarget:
    """Files on this machine: any shard of a set, a single file, or a folder."""

    path: Path

    @property
    def need(self) -> None:
        return None


Target = CatalogueTarget | PathTarget


def target_of(text: str, environ: Mapping[str, str]) -> Target:
    """What the user means: a path if it looks like one or nothing else fits, else a quant's name.

    Raises:
        UsageError: ``unknown-quant`` with the nearest names, ``model-unsupported``.
    """
    if text.endswith(".gguf") or os.sep in text or text.startswith(("~", ".")):
        return PathTarget(path=Path(text).expanduser())
    profile = load_model(environ=environ)
    try:
        quant = find_quant(profile, text)
    except UsageError:
        if Path(text).exists():
            return PathTarget(path=Path(text))
        raise
    if profile.unsupported_reason:
        raise UsageError(
            f"{profile.title} cannot be served", code="model-unsupported", cause=profile.unsupported_reason
        )
    return CatalogueTarget(profile=profile, quant=quant)


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
    match target:
        case PathTarget(path=path):
            return complete(stored_at(path))
        case CatalogueTarget(profile=profile, quant=quant):
            stored = locate(models, quant, repository=profile.repository.id)
            if stored is not None and stored.state is not SetState.PARTIAL:
                return complete(stored)
            if may_download:
                return _fetch(profile, quant, models, environ, listen, told=told)
            if stored is None:
                raise IntegrityError(
                    f"{quant.name} is not on this machine",
                    code="not-downloaded",
                    cause=f"nothing of it lies in {models}, and --no-download forbids fetching it",
                    hint=f"kimigguf download {quant.name}",
                )
            return complete(stored)


def complete(stored: StoredSet) -> StoredSet:
    """The set if no shard is missing or of the wrong size: what a look can tell, before anything is hashed."""
    bad = [file for file in stored.files if file.state not in {FileState.VERIFIED, FileState.UNVERIFIED}]
    if not bad:
        return stored
    first = bad[0]
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    fix = f"kimigguf download {stored.quant}" if stored.quant else "fetch it again from where the others came from"
    if first.state is FileState.WRONG_SIZE:
        raise IntegrityError(
            f"{first.name} is damaged{others}",
            code="damaged-shard",
            cause=f"it should have {first.size_bytes:,} bytes",
            hint=fix,
        )
    raise IntegrityError(
        f"{first.name} is missing{others}",
        code="missing-shard",
        cause=f"{first.done_bytes:,} of {first.size_bytes:,} bytes are in {stored.folder}",
        hint=fix,
    )


def _fetch(
    profile: ModelProfile,
    quant: Quant,
    models: Path,
    environ: Mapping[str, str],
    listen: Listener,
    *,
    told: bool,
) -> StoredSet:
    from kimigguf.download.obtain import Wish  # noqa: PLC0415 -- only where something is fetched
    from kimigguf.download.obtain import obtain as fetch  # noqa: PLC0415 -- likewise

    # Whether an engine reads these files was settled when the engine was chosen.
    wish = Wish(profile=profile, quant=quant, force=quant.engine.min_build is None)
    try:
        return fetch(wish, models, environ=environ, listen=listen, told=told)
    except NetworkError as error:
        if error.code not in {"hub-unreachable", "offline"}:
            raise
        here = _whole_sets(models)
        offline = f"kimigguf serve {here[0]}" if here else "kimigguf recommend, and kimigguf serve PATH"
        raise NetworkError(
            error.message,
            code=error.code,
            cause=error.cause,
            hint=f"without the hub this works: {offline}; the download goes on where it stopped once it is back",
        ) from error


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
    spec = ModelSpec.from_shards(shards)
    if context_tokens is None:
        context_tokens = min(DEFAULT_CONTEXT_TOKENS, spec.context_max_tokens or DEFAULT_CONTEXT_TOKENS)
    manifest = stored.manifest
    model = planned_model(
        shards,
        folder=str(stored.folder.absolute()),
        quant=stored.quant,
        repository=manifest.repository if manifest else None,
        commit=manifest.commit if manifest else None,
        sha256={file.name: file.sha256 for file in stored.files},
    )
    wanted = replace(settings, context_tokens=context_tokens)
    return plan_for(spec, machine, wanted, model=model)


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
