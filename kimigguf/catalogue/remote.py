"""A quant as the hub lists it at one commit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One shard. ``path`` is relative to the repository, ``sha256`` the hub's LFS object id (lower-case hex)."""

    path: str
    size_bytes: int
    sha256: str | None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSet:
    """The shards of one quant in load order, complete by name. ``commit`` is 40 hex digits, never a branch."""

    repository: str
    commit: str
    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)
