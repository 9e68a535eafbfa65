"""How much disk a registration takes in Ollama's models folder, now and later. Pure.

Ollama copies what it is sent into its blobs. Before 0.35.0 it then merges a split set: into one temporary file, and
that into a second one that becomes the blob, while the shards still lie there; they go when Ollama starts again.
From 0.35.0 on it keeps the shards and merges nothing. A blob younger than an hour outlives the start.
Source: https://github.com/ollama/ollama/blob/main/server/create_split_gguf.go (`mergeSplitGGUFToLayer` until 0.34,
`splitGGUFMinOllamaVersion` since), manifest/layer.go (`NewLayer`) and images.go (`layerPruneGracePeriod`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kimigguf.ollama.server import version_numbers

KEEPS_SHARDS: Final = (0, 35, 0)
KEEPS_SHARDS_TEXT: Final = ".".join(map(str, KEEPS_SHARDS))
SMALL_BYTES: Final = 1 << 20
"""Kept free for parameters, licence, configuration and manifest, which are a few kB together and not counted."""


class Way(StrEnum):
    """What Ollama does with the shards that it is sent."""

    KEEP = "keep"
    """They become the model as they are."""
    MERGE = "merge"
    """They are merged into one more file of their size, through a temporary one."""
    SINGLE = "single"
    """It gets one file, and has nothing to merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes on top of what lies in Ollama's models folder now, and what the model holds there in the end.

    ``send_bytes`` have to be sent, ``present_bytes`` lie there already. ``peak_bytes`` is the most that is needed at
    any moment, ``after_bytes`` what is taken when the registration is done, ``settled_bytes`` what the model takes
    once Ollama has been started again. ``linked_bytes`` are put there without taking disk: they are our own files.
    All of these are of the file system of Ollama's models folder. ``work_bytes`` is the most that is taken on another
    one, where the set is merged before it is sent; nothing of it stays.
    """

    way: Way
    send_bytes: int
    present_bytes: int
    linked_bytes: int
    peak_bytes: int
    after_bytes: int
    settled_bytes: int
    work_bytes: int = 0


def way_for(version: str | None, files: int) -> Way:
    """What this version does with a set; one that does not tell its number is taken for the costlier kind."""
    if files == 1:
        return Way.SINGLE
    numbers = version_numbers(version)
    return Way.KEEP if numbers is not None and numbers >= KEEPS_SHARDS else Way.MERGE


def need(way: Way, sizes: Iterable[tuple[int, bool]], *, linked: bool = False) -> DiskNeed:
    """The disk need of a set, given as (size in bytes, whether Ollama has that blob already).

    ``linked``: the missing shards are put there as links to our own files instead of copies.
    """
    sizes = tuple(sizes)
    total = sum(size for size, _ in sizes)
    present = sum(size for size, there in sizes if there)
    missing = total - present
    copied = 0 if linked else missing
    merged = total if way is Way.MERGE else 0
    return DiskNeed(
        way=way,
        send_bytes=copied,
        present_bytes=present,
        linked_bytes=missing if linked else 0,
        peak_bytes=copied + 2 * merged,
        after_bytes=copied + merged,
        settled_bytes=merged or (0 if linked else total),
    )


def need_merged(size_bytes: int, *, begun_bytes: int, present: bool, linked: bool, apart: bool) -> DiskNeed:
    """The disk need of a set of ``size_bytes`` that is merged before Ollama gets it.

    ``begun_bytes`` of the merged file lie there from an earlier run; ``present``: Ollama has it already. ``linked``: it
    becomes a blob by its name and is only written once; else it is sent, and removed when that is done. ``apart``: it
    is merged on another file system than that of Ollama's models.
    """
    to_write = 0 if present else size_bytes - begun_bytes
    sent = 0 if present or linked else size_bytes
    here = 0 if apart else to_write
    kept = to_write if linked else sent - (0 if apart else begun_bytes)
    return DiskNeed(
        way=Way.SINGLE,
        send_bytes=sent,
        present_bytes=size_bytes if present else 0,
        linked_bytes=size_bytes if linked and not present else 0,
        peak_bytes=here + sent,
        after_bytes=-begun_bytes if present and not apart else kept,
        settled_bytes=size_bytes,
        work_bytes=to_write if apart and not linked else 0,
    )
