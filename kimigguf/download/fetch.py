"""Fetch a set, whole: what is there stays, what is missing comes, and a name is given only when the hash is right."""

import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from kimigguf.catalogue import access
from kimigguf.catalogue.remote import RemoteSet
from kimigguf.download.lock import hold
from kimigguf.download.manifest import INNER, Manifest, manifest_of, read_manifest, write_manifest
from kimigguf.download.parts import Source
from kimigguf.download.policy import Policy
from kimigguf.download.store import StoredSet, cannot_write, look
from kimigguf.download.transfer import Transfer
from kimigguf.errors import MachineError
from kimigguf.events import Listener, ignore


def download(
    remote: RemoteSet,
    folder: Path,
    *,
    environ: Mapping[str, str],
    listen: Listener = ignore,
    policy: Policy | None = None,
    wait: bool = True,
) -> StoredSet:
    """Fetch what ``folder`` (see ``store.set_folder``) lacks of ``remote``; return the set, whole and verified.

    Files that are there and unchanged since they were verified are left alone; others are hashed first. Interrupted or
    failed at any point, the next call continues.

    Raises:
        MachineError: ``disk-full``, ``cannot-write``, ``set-busy``.
        NetworkError: ``hub-unreachable``, ``gated``, ``not-on-hub``, ``bad-certificate``.
        IntegrityError: ``changed-on-hub``, ``hash-mismatch``, ``no-hash``, ``bad-manifest``.
    """
    policy = policy or Policy()
    hub = access.endpoint(environ)
    manifest = manifest_of(remote, hub)
    with hold(folder / INNER / "lock", what=f"{remote.quant} in {folder}", wait=wait, listen=listen):
        known = read_manifest(folder)
        if known is not None and _same(known, manifest):
            manifest = known
        _write(folder, manifest)
        token = access.token(environ)
        sources = [
            Source(
                url=f"{hub}/{remote.repository}/resolve/{remote.commit}/{urllib.parse.quote(file.path)}",
                name=file.name,
                size_bytes=file.size_bytes,
                sha256=file.sha256 or "",
                commit=remote.commit,
                token=token,
            )
            for file in remote.files
        ]
        transfer = Transfer(sources, folder, manifest, policy=policy, environ=environ, listen=listen)
        transfer.run()
        stored = look(folder)
    if stored is None:
        raise MachineError(f"{folder} has vanished while it was written", code="cannot-write")
    return stored


def _same(one: Manifest, other: Manifest) -> bool:
    def content(manifest: Manifest) -> tuple[object, ...]:
        files = tuple((file.name, file.size_bytes, file.sha256) for file in manifest.files)
        return manifest.repository, manifest.commit, manifest.quant, files

    return content(one) == content(other)


def _write(folder: Path, manifest: Manifest) -> None:
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        raise cannot_write(folder, error) from error
