"""What the hub has said about a commit, kept on disk: a commit never changes, so it never has to be asked again."""

import contextlib
import hashlib
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kimigguf.catalogue.access import endpoint
from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.errors import MachineError
from kimigguf.home import from_home
from kimigguf.whole_file import write_whole

_SEAL_BYTES: Final = 32
"""A SHA-256 follows each kept header: a torn or rotten one is read again instead of being believed."""
_MAX_LISTING_BYTES: Final = 4 << 20


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where this program keeps what it can ask for again: KIMIGGUF_CACHE, or the user's cache folder."""
    from platformdirs import user_cache_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    if chosen := environ.get("KIMIGGUF_CACHE"):
        return from_home(chosen).absolute()
    if (base := environ.get("XDG_CACHE_HOME")) and Path(base).is_absolute():
        return Path(base) / "kimigguf"
    return user_cache_path("kimigguf")


class HeaderCache:
    """Listings and headers of one repository at one commit, as one hub (or mirror) gave them."""

    def __init__(self, repository: str, commit: str, *, environ: Mapping[str, str]) -> None:
        hub = urllib.parse.urlsplit(endpoint(environ)).netloc.rpartition("@")[2]
        self.folder = cache_dir(environ) / "hub" / _plain(hub) / _plain(repository) / commit

    def listing(self, quant: str) -> RemoteSet | None:
        """The set as it was listed; None where it was not, or where that is unreadable."""
        from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

        path = self._listing(quant)
        with contextlib.suppress(OSError, ValidationError):
            if path.stat().st_size <= _MAX_LISTING_BYTES:
                return TypeAdapter(RemoteSet).validate_json(path.read_bytes())
        return None

    def keep_listing(self, remote: RemoteSet) -> None:
        """Remember a listing. Where that fails, the next one has to ask again, no more."""
        from pydantic import TypeAdapter  # noqa: PLC0415 -- as above

        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._listing(remote.quant), TypeAdapter(RemoteSet).dump_json(remote, indent=1), mode=0o600)

    def _listing(self, quant: str) -> Path:
        return self.folder / f"{_plain(quant)}.json"

    def header_path(self, file: RemoteFile) -> Path:
        """Where the header of a file is kept, by the hash of that file's content."""
        tag = (file.sha256 or "no-hash")[:16]
        return self.folder / f"{_plain(file.path)}.{file.size_bytes}.{tag}.header"

    def header(self, file: RemoteFile) -> bytes | None:
        """The bytes of a file up to its data section; None where they are not here whole."""
        with contextlib.suppress(OSError):
            data = self.header_path(file).read_bytes()
            if len(data) > _SEAL_BYTES and hashlib.sha256(data[:-_SEAL_BYTES]).digest() == data[-_SEAL_BYTES:]:
                return data[:-_SEAL_BYTES]
        return None

    def keep_header(self, file: RemoteFile, data: bytes) -> Path:
        """Remember the bytes of a file up to its data section, and say where.

        Raises:
            MachineError: ``cannot-write``.
        """
        path = self.header_path(file)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data + hashlib.sha256(data).digest(), mode=0o600)
        except OSError as error:
            raise MachineError(
                f"cannot keep the header of {file.name} in {self.folder}",
                code="cannot-write",
                cause=error.strerror,
                hint="set KIMIGGUF_CACHE to a folder that can be written",
            ) from error
        return path


def _plain(text: str) -> str:
    """A file's name for any text, readable and one to one."""
    return urllib.parse.quote(text, safe=" ")
