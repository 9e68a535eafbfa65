"""From a quant's name to a whole, verified set on disk: list, check, make sure of the room, fetch, tidy up."""

import contextlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kimigguf import units
from kimigguf.catalogue.access import endpoint
from kimigguf.catalogue.quants import ModelProfile, Quant
from kimigguf.catalogue.remote import RemoteSet
from kimigguf.download import disk
from kimigguf.download.bring import bring, coming
from kimigguf.download.fetch import download
from kimigguf.download.lock import hold
from kimigguf.download.manifest import (
    INNER,
    MANIFEST,
    manifest_of,
    read_manifest,
    remote_of,
    with_verified,
    write_manifest,
)
from kimigguf.download.place import settle
from kimigguf.download.policy import Policy
from kimigguf.download.store import (
    PART,
    FileState,
    SetState,
    StoredSet,
    cannot_write,
    look,
    managed_sets,
    named_models_dir,
    set_folder,
)
from kimigguf.errors import IntegrityError, MachineError, NetworkError, UsageError
from kimigguf.events import Listener, Notice, Step, ignore

if TYPE_CHECKING:
    from kimigguf.gguf_file.shards import ShardSet

LICENCE_SHOWN: Final = "licence-shown.txt"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be on disk. ``revision`` None: the catalogue's pinned commit; ``force``: even what no engine reads."""

    profile: ModelProfile
    quant: Quant
    revision: str | None = None
    force: bool = False

    @property
    def repository(self) -> str:
        """The repository's name.

        Raises:
            UsageError: ``no-repository`` where the catalogue endorses none.
        """
        if self.profile.repository.id is None:
            raise UsageError(
                f"there is no repository to fetch {self.profile.title} from",
                code="no-repository",
                cause=self.profile.unsupported_reason or self.profile.note,
            )
        return self.profile.repository.id

    @property
    def wanted_revision(self) -> str:
        return self.revision or self.profile.repository.commit or "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a download would do. ``previous`` are the same quant's other commits; ``reusable`` files of theirs fit."""

    remote: RemoteSet
    folder: Path
    stored: StoredSet | None
    reusable: Mapping[str, Path]
    previous: tuple[StoredSet, ...]
    remaining_bytes: int
    free_bytes: int

    @property
    def need_bytes(self) -> int:
        """What must be free: the bytes to come, and some to spare."""
        return self.remaining_bytes + disk.slack_bytes(self.remaining_bytes) if self.remaining_bytes else 0

    @property
    def fits(self) -> bool:
        return self.free_bytes >= self.need_bytes


def obtain(
    wish: Wish,
    models: Path,
    *,
    environ: Mapping[str, str],
    listen: Listener = ignore,
    policy: Policy | None = None,
    keep_previous: bool = False,
    wait: bool = True,
    told: bool = False,
) -> StoredSet:
    """Have a quant whole and verified under ``models``; no request is made if it already is.

    A newer revision is fetched beside an older one, which is removed only when the new one is verified
    (``keep_previous``: not even then). Files that both share are linked, not fetched. ``told``: the user has named the
    folder; without that no network mount is filled, and an empty data folder may give way to a faster disk.

    Raises:
        UsageError: ``no-repository``, ``unknown-revision``.
        MachineError: ``unsupported-quant``, ``disk-gone``, ``network-mount``, ``disk-full``, ``cannot-write``,
            ``set-busy``.
        NetworkError: ``offline``, ``hub-unreachable``, ``gated``, ...
        IntegrityError: The set is not one, has changed, or arrives damaged.
    """
    from kimigguf.catalogue.hub import is_offline  # noqa: PLC0415 -- as below

    refuse_unreadable(wish)
    if (here := already_whole(wish, models)) is not None:
        return here
    told = told or models == named_models_dir(environ)
    if not told:
        models = settle(models, wish.quant.size_bytes, listen=listen)
    plan = make_plan(wish, models, environ=environ, listen=listen)
    if plan.remaining_bytes and is_offline(environ):
        raise NetworkError(
            f"{wish.quant.name} is not whole on this machine, and HF_HUB_OFFLINE is set",
            code="offline",
            hint="unset HF_HUB_OFFLINE; without a hub these work: kimigguf list, recommend, plan, verify",
        )
    if not told:
        disk.refuse_network(plan.folder)
    disk.require(plan.folder, plan.remaining_bytes)
    show_licence(wish.profile, plan.folder.parent.parent, listen)
    if plan.remaining_bytes:
        check_set(plan.remote, wish, environ=environ, listen=listen)
    _reuse(plan, endpoint(environ), wait=wait, listen=listen)
    stored = download(plan.remote, plan.folder, environ=environ, listen=listen, policy=policy, wait=wait)
    if not keep_previous:
        for old in plan.previous:
            if _leads_into(stored, old.folder):
                listen(Notice(text=f"kept the previous revision {_short(old)}: files of the new one are links into it"))
                continue
            remove(old, wait=False, listen=listen)
            listen(Notice(text=f"removed the previous revision {_short(old)} ({units.storage(old.done_bytes)})"))
    return stored


def _leads_into(stored: StoredSet, folder: Path) -> bool:
    """Whether a file of a set is a symlink (somebody's, never ours) to one in ``folder``."""
    return any(file.path.resolve().is_relative_to(folder.resolve()) for file in stored.files)


def obtain_projector(
    wish: Wish,
    kind: str,
    models: Path,
    *,
    environ: Mapping[str, str],
    listen: Listener = ignore,
    policy: Policy | None = None,
    wait: bool = True,
) -> StoredSet:
    """Have the vision projector of a type (BF16, F16, F32) in a folder of its own: shards must be alone in theirs.

    Raises:
        UsageError: ``no-projector`` with the types there are.
        MachineError, NetworkError, IntegrityError: As ``obtain``.
    """
    from kimigguf.catalogue.hub import list_projectors  # noqa: PLC0415 -- brings huggingface_hub: a second to import

    commit = wish.wanted_revision
    name = f"mmproj-{kind}"
    if _COMMIT.fullmatch(commit):
        here = look(set_folder(models, RemoteSet(repository=wish.repository, commit=commit, quant=name, files=())))
        if here is not None and here.state is SetState.WHOLE:
            return here
    found = list_projectors(wish.repository, revision=commit, environ=environ)
    files = tuple(file for file in found.files if file.name == f"{name}.gguf")
    if not files:
        raise UsageError(
            f"{wish.repository} at {found.commit[:12]} has no {name}.gguf",
            code="no-projector",
            hint=f"there are: {', '.join(file.name for file in found.files)}",
        )
    remote = RemoteSet(repository=found.repository, commit=found.commit, quant=name, files=files)
    return download(remote, set_folder(models, remote), environ=environ, listen=listen, policy=policy, wait=wait)


def refuse_unreadable(wish: Wish) -> None:
    """Say no before the download to files that no mainline engine reads.

    Raises:
        MachineError: ``unsupported-quant``.
    """
    need = wish.quant.engine
    if need.min_build is None and not wish.force:
        raise MachineError(
            f"no mainline llama.cpp can load {wish.quant.name}",
            code="unsupported-quant",
            cause=need.reason or wish.profile.unsupported_reason,
            hint=f"{need.alternative + '; ' if need.alternative else ''}to fetch it all the same: "
            f"kimigguf download {wish.quant.name} --force",
        )


def already_whole(wish: Wish, models: Path) -> StoredSet | None:
    """The set if it is on disk, verified and untouched, at the commit that is wished for (known without asking)."""
    commit = wish.wanted_revision
    if not _COMMIT.fullmatch(commit):
        return None
    where = RemoteSet(repository=wish.repository, commit=commit, quant=wish.quant.name, files=())
    stored = look(set_folder(models, where))
    return stored if stored is not None and stored.state is SetState.WHOLE else None


def make_plan(wish: Wish, models: Path, *, environ: Mapping[str, str], listen: Listener = ignore) -> FetchPlan:
    """Ask the hub for the set at one commit and hold it against what is here. Writes nothing.

    Raises:
        NetworkError, UsageError, IntegrityError, MachineError: As ``obtain``.
    """
    remote = listed(wish, models, environ=environ, listen=listen)
    folder = set_folder(models, remote)
    stored = look(folder)
    previous = tuple(
        other
        for other in managed_sets(models)
        if other.manifest is not None
        and (other.manifest.repository, other.manifest.quant) == (remote.repository, remote.quant)
        and other.folder != folder
    )
    there = _there(remote, stored)
    reusable = {name: path for name, path in _reusable(remote, previous).items() if not there.get(name)}
    remaining = sum(f.size_bytes - there.get(f.name, 0) for f in remote.files if f.name not in reusable)
    return FetchPlan(
        remote=remote,
        folder=folder,
        stored=stored,
        reusable=reusable,
        previous=previous,
        remaining_bytes=remaining,
        free_bytes=disk.free_bytes(folder),
    )


def listed(wish: Wish, models: Path, *, environ: Mapping[str, str], listen: Listener = ignore) -> RemoteSet:
    """The set as the hub lists it: from the manifest where one is here for that commit, else from the hub.

    Raises:
        NetworkError: ``offline``, ``hub-unreachable``, ...
        UsageError, IntegrityError: As ``catalogue.hub.list_set``.
    """
    commit = wish.wanted_revision
    if _COMMIT.fullmatch(commit):
        where = RemoteSet(repository=wish.repository, commit=commit, quant=wish.quant.name, files=())
        if (manifest := read_manifest(set_folder(models, where))) is not None and manifest.commit == commit:
            return remote_of(manifest)
    from kimigguf.catalogue.hub import list_set  # noqa: PLC0415 -- brings huggingface_hub: a second to import

    listen(Step(text=f"listing {wish.repository} at {commit}"))
    return list_set(wish.repository, wish.quant, revision=commit, environ=environ)


def _there(remote: RemoteSet, stored: StoredSet | None) -> dict[str, int]:
    """Bytes of each file that need not be fetched; a file of the wrong size counts nothing."""
    wanted = {file.name: file.sha256 for file in remote.files}
    return {
        file.name: file.done_bytes
        for file in (stored.files if stored else ())
        if wanted.get(file.name) == file.sha256 and file.state is not FileState.WRONG_SIZE
    }


def _reusable(remote: RemoteSet, others: tuple[StoredSet, ...]) -> dict[str, Path]:
    """Verified files of other commits with the very content that is wanted."""
    known = {file.sha256: file.path for other in others for file in other.files if file.state is FileState.VERIFIED}
    return {file.name: known[file.sha256] for file in remote.files if file.sha256 in known}


def _reuse(plan: FetchPlan, source: str, *, wait: bool, listen: Listener) -> None:
    """Link what another commit of the quant already has."""
    if not plan.reusable:
        return
    try:
        with hold(plan.folder / INNER / "lock", what=f"{plan.remote.quant} in {plan.folder}", wait=wait, listen=listen):
            manifest = read_manifest(plan.folder) or manifest_of(plan.remote, source)
            for name, path in plan.reusable.items():
                target = plan.folder / name
                if not target.exists():
                    how = bring(path, target)
                    manifest = with_verified(manifest, name, target.stat())
                    listen(Notice(text=f"{name} is unchanged since {path.parent.name}: {how}, not fetched"))
            write_manifest(plan.folder, manifest)
    except OSError as error:
        raise cannot_write(plan.folder, error) from error


def check_set(remote: RemoteSet, wish: Wish, *, environ: Mapping[str, str], listen: Listener = ignore) -> "ShardSet":
    """Read every shard's header over the net and hold the set against itself, before the first weight.

    Raises:
        IntegrityError: ``inconsistent-set`` and what ``gguf_file.shards.check`` finds.
        MachineError: ``unsupported-quant`` for tensor types that this version of mainline does not know.
    """
    from kimigguf.catalogue.hub import remote_headers  # noqa: PLC0415 -- as above

    listen(Step(text=f"checking the headers of {len(remote.files)} shards"))
    shards = remote_headers(remote, environ=environ, listen=listen)
    if shards.architecture != wish.profile.architecture:
        raise IntegrityError(
            f"{remote.quant} at {remote.commit[:12]} is no {wish.profile.title}",
            code="inconsistent-set",
            cause=f"its architecture is {shards.architecture}, not {wish.profile.architecture}",
        )
    strange = sorted({tensor.ggml_type for tensor in shards.tensors if tensor.size_bytes is None})
    if strange and not wish.force:
        raise MachineError(
            f"no mainline llama.cpp can load {remote.quant} at {remote.commit[:12]}",
            code="unsupported-quant",
            cause=f"it holds tensors of the unknown ggml types {', '.join(map(str, strange))}",
            hint=f"to fetch it all the same: kimigguf download {remote.quant} --force",
        )
    return shards


def show_licence(profile: ModelProfile, folder: Path, listen: Listener) -> None:
    """Name the model's licence before its first download into ``folder``, and never again there."""
    shown = folder / LICENCE_SHOWN
    if shown.exists():
        return
    licence = profile.licence
    if licence is None:
        return
    terms = f" {licence.note}" if licence.note else ""
    text = f"{profile.title} comes under the {licence.name} ({licence.url or 'see its page'}).{terms}"
    listen(Notice(text=text))
    with contextlib.suppress(OSError):  # then it is shown once more
        folder.mkdir(parents=True, exist_ok=True)
        shown.write_text(text + "\n", encoding="utf-8")


def remove(stored: StoredSet, *, wait: bool, listen: Listener = ignore) -> tuple[str, ...]:
    """Delete a set of ours: its files, parts, journals and manifest. Returns the names of what else lies there.

    Raises:
        UsageError: ``foreign-set``.
        MachineError: ``set-busy``, ``cannot-write``.
    """
    if stored.manifest is None:
        raise UsageError(
            f"{stored.folder} was not made by this program",
            code="foreign-set",
            hint=f"if you are sure: rm -r {stored.folder}",
        )
    folder = stored.folder
    with hold(folder / INNER / "lock", what=f"{stored.quant} in {folder}", wait=wait, listen=listen):
        try:
            # The manifest goes late: whatever interrupts this, the rest can be removed by name. The lock goes last.
            for file in stored.files:
                file.path.unlink(missing_ok=True)
                (folder / (file.name + PART)).unlink(missing_ok=True)
                coming(file.path).unlink(missing_ok=True)
            for path in (folder / INNER).iterdir():
                if path.name != "lock":
                    path.unlink()
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder / INNER)
        except OSError as error:
            raise cannot_write(folder, error) from error
    left = tuple(sorted(path.name for path in folder.iterdir()))
    for place in (folder, folder.parent):
        with contextlib.suppress(OSError):
            place.rmdir()
    return left


def _short(stored: StoredSet) -> str:
    return stored.manifest.commit[:12] if stored.manifest else stored.folder.name
