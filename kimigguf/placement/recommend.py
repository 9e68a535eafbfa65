"""Which quant can this machine run? One verdict per quant, with its arithmetic in words, and one recommendation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kimigguf.catalogue.quants import MarginRule, ModelProfile, Quant
from kimigguf.hardware.snapshot import Disk
from kimigguf.memory.layout import Layout
from kimigguf.memory.ledger import Component, ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import Budget
from kimigguf.placement.streaming import can_stream
from kimigguf.units import memory, storage


class Fit(StrEnum):
    """The verdicts, from best to worst."""

    FITS_VRAM = "fits-vram"
    FITS = "fits"
    TIGHT = "tight"
    BELOW_MARGIN = "below-margin"
    STREAMS_FROM_DISK = "streams-from-disk"
    DOES_NOT_FIT = "does-not-fit"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


RECOMMENDABLE: Final = (Fit.FITS_VRAM, Fit.FITS, Fit.TIGHT)


_EVERY_TOKEN: Final = (
    Component.TRUNK,
    Component.HEAD,
    Component.KV_CACHE,
    Component.RECURRENT_STATE,
    Component.COMPUTE,
)
"""What every token reads or writes in full; of the experts and the embedding it reads a few rows."""


class Prefer(StrEnum):
    """What to put first among the quants that fit."""

    QUALITY = "quality"
    SPEED = "speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One quant's verdict. Bytes are None where the size is unknown; ``ledger_bytes`` is the exact need."""

    quant: str
    fit: Fit
    download_bytes: int | None
    need_low_bytes: int | None
    need_high_bytes: int | None
    ledger_bytes: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Verdicts in the catalogue's order, the recommended quant or None, and then the ways out."""

    verdicts: tuple[Verdict, ...]
    recommended: str | None
    ways_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What one quant needs by both rules. ``working_bytes`` is what every token touches: trunk, cache and buffers."""

    size_bytes: int
    low_bytes: int
    high_bytes: int
    ledger_bytes: int
    working_bytes: int


def need_by_margin(size_bytes: int, margin: MarginRule) -> tuple[int, int]:
    """Addressable memory needed by the margin rule, low and high, in bytes, rounded up."""
    # Per mille, so that 10 and 15 % of an integer stay exact.
    low, high = (-(-size_bytes * (1000 + round(share * 1000)) // 1000) for share in (margin.low, margin.high))
    return low, high


def recommend(
    profile: ModelProfile,
    budget: Budget,
    disks: Sequence[Disk] | None,
    settings: Settings,
    prefer: Prefer,
    *,
    here: Mapping[str, str] = MappingProxyType({}),
) -> Recommendation:
    """A verdict for every quant of ``profile`` on a machine with ``budget`` and ``disks``.

    Two rules must hold for `fits`: the margin rule (10 to 15 % on top of the download) and the exact ledger of
    ``settings``, which binds when the context is long. ``here`` maps the quants that are whole on this machine to
    their folders: those need no room to stream from.
    """
    if profile.unsupported_reason is not None or profile.margin is None:
        reason = profile.unsupported_reason or "nothing is known of its memory"
        verdict = _unknown_size(profile.title, Fit.UNSUPPORTED, reason)
        return Recommendation(verdicts=(verdict,), recommended=None, ways_out=_hosted(profile))
    verdicts = tuple(
        _judge(profile, quant, budget, settings, disks=disks, folder=here.get(quant.name)) for quant in profile.quants
    )
    chosen = _choose(profile.quants, verdicts, prefer)
    ways_out = () if chosen else tuple(_ways_out(profile, verdicts, budget))
    return Recommendation(verdicts=verdicts, recommended=chosen, ways_out=ways_out)


def _unknown_size(name: str, fit: Fit, reason: str) -> Verdict:
    return Verdict(
        quant=name,
        fit=fit,
        download_bytes=None,
        need_low_bytes=None,
        need_high_bytes=None,
        ledger_bytes=None,
        reasons=(reason,),
    )


def _need(profile: ModelProfile, quant: Quant, margin: MarginRule, settings: Settings) -> _Need:
    spec = ModelSpec.from_profile(profile, quant)
    exact = ledger(spec, settings, Layout.on_host(len(spec.layers)))
    total = exact.total_bytes(None)
    low, high = need_by_margin(quant.size_bytes, margin)
    return _Need(
        size_bytes=quant.size_bytes,
        low_bytes=low,
        high_bytes=high,
        ledger_bytes=total,
        working_bytes=sum(row.size_bytes or 0 for row in exact.rows if row.component in _EVERY_TOKEN),
    )


def _judge(
    profile: ModelProfile,
    quant: Quant,
    budget: Budget,
    settings: Settings,
    *,
    disks: Sequence[Disk] | None,
    folder: str | None,
) -> Verdict:
    if profile.margin is None:
        raise ValueError("recommend() handles profiles without a margin rule")
    need = _need(profile, quant, profile.margin, settings)
    verdict = Verdict(
        quant=quant.name,
        fit=Fit.UNKNOWN,
        download_bytes=need.size_bytes,
        need_low_bytes=need.low_bytes,
        need_high_bytes=need.high_bytes,
        ledger_bytes=need.ledger_bytes,
        reasons=(),
    )
    if quant.engine.min_build is None:
        reasons = [quant.engine.reason or "no mainline llama.cpp can read its tensors"]
        if quant.engine.alternative:
            reasons.append(f"use {quant.engine.alternative}")
        return replace(verdict, fit=Fit.UNSUPPORTED, reasons=tuple(reasons))
    fit, reasons_of_fit = _fit(need, budget, disks, folder)
    return replace(verdict, fit=fit, reasons=reasons_of_fit)


def _fit(need: _Need, budget: Budget, disks: Sequence[Disk] | None, folder: str | None) -> tuple[Fit, tuple[str, ...]]:
    vram, total = budget.vram_bytes, budget.total_bytes
    least, most = max(need.low_bytes, need.ledger_bytes), max(need.high_bytes, need.ledger_bytes)
    if vram >= most:
        return Fit.FITS_VRAM, (f"{memory(vram)} of VRAM hold all of it with the 15 % margin",)
    if total is not None and total >= most:
        return Fit.FITS, (f"has {storage(total)}, needs {storage(most)} at most",)
    if total is None or not budget.is_complete:
        return Fit.UNKNOWN, (f"the memory that is known ({storage(total)}) does not hold it, and some is unknown",)
    if total < need.size_bytes:
        return _from_disk(need, total, disks, folder)
    if total < least:
        return Fit.BELOW_MARGIN, (_below(need, total),)
    return Fit.TIGHT, (f"has {storage(total)}: above the 10 % margin, {storage(most - total)} short of 15 %",)


def _below(need: _Need, total: int) -> str:
    if need.ledger_bytes > need.low_bytes:
        lacks = storage(need.ledger_bytes - total)
        return f"{lacks} short of what this context needs (the exact ledger binds, not the margin); pages under load"
    return f"{storage(need.low_bytes - total)} short of the 10 % margin; runs, but pages under load"


def _from_disk(
    need: _Need, total: int, disks: Sequence[Disk] | None, folder: str | None
) -> tuple[Fit, tuple[str, ...]]:
    short = f"{storage(need.low_bytes - total)} of memory short"
    if total < need.working_bytes:
        part = memory(need.working_bytes)
        return Fit.DOES_NOT_FIT, (short, f"even the part that every token reads ({part}) does not fit in memory")
    if disks is None:
        return Fit.UNKNOWN, (short, "whether a local NVMe could stream the rest is unknown")
    if can_stream(disks, need.size_bytes, folder=folder):
        left = storage(need.size_bytes - total)
        return Fit.STREAMS_FROM_DISK, (f"{short}; at least {left} stay on NVMe and are read as tokens need them: slow",)
    if folder is not None:
        return Fit.DOES_NOT_FIT, (short, f"its files lie in {folder}, on no local NVMe to stream it from")
    return Fit.DOES_NOT_FIT, (short, f"no local NVMe has {storage(need.size_bytes)} free to stream it from")


def _choose(quants: Sequence[Quant], verdicts: Sequence[Verdict], prefer: Prefer) -> str | None:
    rank = {quant.name: quant.quality_rank for quant in quants}

    def quality(verdict: Verdict) -> int:
        return rank[verdict.quant]

    def fewest_bytes(verdict: Verdict) -> int:
        # Off the GPUs a token's time is the bytes it reads, and those grow with the quant's size.
        return -(verdict.download_bytes or 0)

    def best(fits: tuple[Fit, ...], key: Callable[[Verdict], int]) -> str | None:
        candidates = [verdict for verdict in verdicts if verdict.fit in fits]
        return max(candidates, key=key).quant if candidates else None

    if prefer is Prefer.QUALITY:
        return best(RECOMMENDABLE, quality)
    return best((Fit.FITS_VRAM,), quality) or best((Fit.FITS,), fewest_bytes) or best((Fit.TIGHT,), fewest_bytes)


def _ways_out(profile: ModelProfile, verdicts: Sequence[Verdict], budget: Budget) -> Iterator[str]:
    runnable = [v for v in verdicts if v.fit is not Fit.UNSUPPORTED and v.need_low_bytes is not None]
    for fit, words in (
        (Fit.BELOW_MARGIN, "runs below the margin and pages under load: try it with a short context"),
        (Fit.STREAMS_FROM_DISK, "streams from disk: it answers, slowly"),
    ):
        if candidates := [v for v in runnable if v.fit is fit]:
            yield f"{min(candidates, key=lambda v: v.download_bytes or 0).quant} {words}"
            break
    if runnable and budget.total_bytes is not None and budget.is_complete:
        smallest = min(runnable, key=lambda v: v.need_low_bytes or 0)
        missing = max(smallest.need_low_bytes or 0, smallest.ledger_bytes or 0) - budget.total_bytes
        yield f"{storage(missing)} more memory would run {smallest.quant}, the smallest that mainline llama.cpp loads"
    yield from _hosted(profile)


def _hosted(profile: ModelProfile) -> tuple[str, ...]:
    return (f"a hosted API exists: {profile.hosted_api}",) if profile.hosted_api else ()
