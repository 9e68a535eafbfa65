"""The ways a set can get into Ollama, what each takes of the disk, and which is taken and why. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kimigguf.ollama.disk import SMALL_BYTES, DiskNeed, Way
from kimigguf.units import storage


class Route(StrEnum):
    """What Ollama is given."""

    SHARDS = "shards"
    """The set as it is."""
    MERGED = "merged"
    """One file, merged before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way. ``link``: files become blobs without a copy. ``how`` says what happens, in a few words.

    ``short_bytes`` are missing on the file system of Ollama's models, None where its room is not known;
    ``work_short_bytes`` on that of the folder to merge in, where it is another one.
    """

    route: Route
    need: DiskNeed
    link: bool
    how: str
    short_bytes: int | None
    work_short_bytes: int = 0

    @property
    def fits(self) -> bool | None:
        """Whether there is room for it; None where that is not known."""
        if self.work_short_bytes:
            return False
        return None if self.short_bytes is None else self.short_bytes == 0


def shortage(need_bytes: int, free_bytes: int | None) -> int | None:
    """What is missing to write ``need_bytes`` and the few small files beside them."""
    return None if free_bytes is None else max(0, need_bytes + SMALL_BYTES - free_bytes)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The way that there is room for; of several the one that takes least at the peak, then afterwards."""
    return min(
        candidates,
        key=lambda one: (one.fits is False, one.need.peak_bytes + one.need.work_bytes, one.need.after_bytes),
    )


def shards_way(need: DiskNeed, *, hindrance: str | None, version: str | None, free_bytes: int | None) -> Candidate:
    """The set as it is; ``hindrance`` is why it cannot be linked."""
    given = "linked" if hindrance is None else "sent"
    then = {
        Way.KEEP: "kept as shards",
        Way.MERGE: f"merged by Ollama {version or 'of unknown version'} through a second copy",
        Way.SINGLE: "kept as it is",
    }[need.way]
    return Candidate(
        route=Route.SHARDS,
        need=need,
        link=hindrance is None,
        how=f"the files as they are, {given}, {then}",
        short_bytes=shortage(need.peak_bytes, free_bytes),
    )


def merged_way(
    need: DiskNeed, *, hindrance: str | None, tool: str, free_bytes: int | None, work_free_bytes: int
) -> Candidate:
    """The set merged first, by ``tool``; ``hindrance`` is why the merged file cannot be linked."""
    given = "linked" if hindrance is None else "sent and removed"
    how = f"merged first by {tool}, then {given}" if not need.present_bytes else "merged before, and Ollama has it"
    return Candidate(
        route=Route.MERGED,
        need=need,
        link=hindrance is None,
        how=how,
        short_bytes=shortage(need.peak_bytes, free_bytes),
        work_short_bytes=shortage(need.work_bytes, work_free_bytes) or 0 if need.work_bytes else 0,
    )


def why(chosen: Candidate, candidates: Sequence[Candidate], *, alone: str, hindrance: str | None) -> str:
    """Why a way is taken, in one sentence; ``alone`` says why there is no other, ``hindrance`` why it is no link."""
    others = [one for one in candidates if one is not chosen]
    if not others:
        reason = alone
    else:
        other = others[0]
        ours, theirs = (one.need.peak_bytes + one.need.work_bytes for one in (chosen, other))
        what = "the shards as they are" if other.route is Route.SHARDS else "merging first"
        reason = f"takes {storage(ours)} at the peak; {what} would take {storage(theirs)}"
        if other.fits is False and chosen.fits is not False:
            reason += ", for which there is no room"
    return f"{reason}; not linked: {hindrance}" if hindrance else reason
