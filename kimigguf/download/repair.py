"""Fetch again only what is bad of a set: missing files, cut files, and of damaged files the chunks that differ."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from kimigguf.download.fetch import download
from kimigguf.download.manifest import remote_of
from kimigguf.download.policy import Policy
from kimigguf.download.store import StoredSet, look
from kimigguf.download.verify import Verification, verify
from kimigguf.errors import UsageError
from kimigguf.events import Listener, Step, ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was found, and the set after it was mended (or as it was, where nothing was bad)."""

    found: Verification
    stored: StoredSet


def repair(
    stored: StoredSet,
    *,
    environ: Mapping[str, str],
    listen: Listener = ignore,
    policy: Policy | None = None,
    wait: bool = True,
) -> Repair:
    """Hash every file of a set, and fetch what is bad from the hub, at the commit the set was fetched at.

    Raises:
        UsageError: ``foreign-set``: nobody has said what the files should be.
        MachineError, NetworkError, IntegrityError: As ``verify`` and ``download`` have it.
    """
    if stored.manifest is None:
        raise UsageError(
            f"nobody has said what the files in {stored.folder} should be",
            code="foreign-set",
            hint=f"take what is right of them over: kimigguf import {shlex.quote(str(stored.folder))}",
        )
    listen(Step(text=f"hashing {stored.quant}"))
    found = verify(stored, listen=listen)
    if found.bad:
        listen(Step(text=f"fetching what is bad of {', '.join(file.name for file in found.bad)}"))
        remote = remote_of(stored.manifest)
        stored = download(remote, stored.folder, environ=environ, listen=listen, policy=policy, wait=wait)
    return Repair(found=found, stored=look(stored.folder) or stored)
