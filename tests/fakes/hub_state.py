"""What a loopback hub shows, and what it remembers of its visitors."""

import hashlib
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fakes.hub_faults import Faults, Request, none

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"
LFS: Final = (".gguf", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    path: str
    size: int
    oid: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass(slots=True, kw_only=True)
class Hub:
    """A running hub. ``commits`` maps a commit to the folder it shows; ``branches`` a branch to a commit."""

    url: str
    cdn_url: str
    commits: dict[str, Path]
    branches: dict[str, str]
    faults: Faults = none
    token: str | None = None
    """Set: every request must carry it, or is told 401 (a gated repository)."""
    redirect: bool = True
    signed_uses: int | None = None
    """How many requests one signed address serves before it answers 403."""
    signed_seconds: float | None = None
    bytes_per_second: float | None = None
    """Per connection."""
    send_buffer_bytes: int | None = None
    """Size of the sockets' send buffers: what a killed client never reads, but has been counted as sent."""
    lie_about_hash: dict[Path, str] = field(default_factory=dict)
    """Files that are named with this SHA-256 whatever they hold."""
    page_size: int = 1000
    requests: list[Request] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of file bodies sent, by file."""
    before: Callable[[Request], None] | None = None
    """Called before every answer: the place to change files midway."""
    _hashes: dict[tuple[str, int, int], File] = field(default_factory=dict)
    _addresses: dict[str, tuple[str, Path, float, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def add_commit(self, commit: str, root: Path, *, branch: str | None = "main") -> None:
        """Publish another state of all repositories, and move ``branch`` to it."""
        self.commits[commit] = root
        if branch is not None:
            self.branches[branch] = commit

    def gets(self, suffix: str = "") -> list[Request]:
        """The GET requests for file bytes whose file ends in ``suffix``, redirects left out."""
        return [
            request
            for request in list(self.requests)
            if request.body and request.method == "GET" and (request.file or "").endswith(suffix)
        ]

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def files(self, commit: str, repository: str) -> list[File]:
        folder = self.commits[commit] / repository
        paths = (path for path in folder.rglob("*") if path.is_file())
        return sorted((self.describe(folder, path) for path in paths), key=lambda file: file.path)

    def describe(self, folder: Path, path: Path) -> File:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if (known := self._hashes.get(key)) is None:
            lfs = path.name.endswith(LFS)
            digest = hashlib.sha256() if lfs else hashlib.sha1(b"blob %d\0" % stat.st_size, usedforsecurity=False)
            with path.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
            oid = digest.hexdigest()
            known = File(
                path=path.relative_to(folder).as_posix(),
                size=stat.st_size,
                oid=hashlib.sha1(oid.encode(), usedforsecurity=False).hexdigest() if lfs else oid,
                sha256=oid if lfs else None,
            )
            self._hashes[key] = known
        if path in self.lie_about_hash:
            return replace(known, sha256=self.lie_about_hash[path])
        return known

    def sign(self, file: str, path: Path) -> str:
        key = secrets.token_hex(8)
        with self.lock:
            until = time.monotonic() + (self.signed_seconds or 1e9)
            self._addresses[key] = (file, path, until, self.signed_uses or 1 << 60)
        return f"{self.cdn_url}/signed/{key}/{urllib.parse.quote(file)}?X-Signature={key}"

    def signed(self, key: str) -> tuple[str, Path] | None:
        with self.lock:
            file, path, until, uses = self._addresses.get(key, ("", Path(), 0.0, 0))
            if uses <= 0 or time.monotonic() > until:
                return None
            self._addresses[key] = (file, path, until, uses - 1)
        return file, path
