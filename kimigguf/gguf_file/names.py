"""The names of shards, which is how llama.cpp finds the siblings of the first one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_SHARD: Final = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """``<prefix>-0000N-of-000MM.gguf``; ``number`` counts from 1."""

    prefix: str
    count: int
    number: int

    @classmethod
    def of(cls, file_name: str) -> "ShardName | None":
        """The parts of a shard's name; None for a name that is none."""
        match = _SHARD.fullmatch(file_name)
        return match and cls(match["prefix"], int(match["count"]), int(match["number"]))

    @property
    def siblings(self) -> tuple[str, ...]:
        """The names of the whole set in load order."""
        return tuple(f"{self.prefix}-{n:05d}-of-{self.count:05d}.gguf" for n in range(1, self.count + 1))


def is_projector(file_name: str) -> bool:
    """Whether the name is that of a vision projector, which is no model of its own."""
    return file_name.lower().startswith("mmproj") or "-mmproj" in file_name.lower()


def sets(file_names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The sets that these names belong to, each as the names it should have; single files are sets of one."""
    found: dict[tuple[str, ...], None] = {}
    for name in sorted(file_names):
        if name.endswith(".gguf") and not is_projector(name):
            shard = ShardName.of(name)
            found[shard.siblings if shard and shard.number <= shard.count else (name,)] = None
    return tuple(found)
