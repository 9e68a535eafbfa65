"""The only parser and formatter of sizes and rates: bytes inside, GiB for memory, GB or TB for downloads and disks."""

import re
from typing import Final

from kimigguf.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
KB: Final = 10**3
MB: Final = 10**6
GB: Final = 10**9
TB: Final = 10**12

_FACTORS: Final = {
    "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": KB, "mb": MB, "gb": GB, "tb": TB,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*")


def parse_size(text: str) -> int:
    """Bytes meant by ``text``, such as ``900GB``, ``838.2 GiB`` or ``1073741824`` (bytes).

    Raises:
        UsageError: ``ambiguous-size`` for ``900G`` (both 900GB and 900GiB are in use and differ by 7 %) and for
            ``900``, ``bad-size`` for anything else that is no size.
    """
    match = _SIZE.fullmatch(text)
    number, unit = (match[1], match[2].lower()) if match else ("", "?")
    if unit in {"k", "m", "g", "t"}:
        big = unit.upper()
        raise UsageError(
            f"the size {text.strip()!r} is ambiguous",
            code="ambiguous-size",
            hint=f"write {number}{big}B for powers of 1000 or {number}{big}iB for powers of 1024",
        )
    factor = 1 if unit == "" else _FACTORS.get(unit)
    if factor is None:
        raise UsageError(f"{text!r} is no size", code="bad-size", hint="write for example 768GiB, 900GB or 1.5TiB")
    whole, _, fraction = number.partition(".")
    if unit == "" and (fraction or 0 < int(whole) < MIB):
        raise UsageError(
            f"the size {text.strip()!r} has no unit, and so few bytes can hardly be meant",
            code="ambiguous-size",
            hint=f"write {number}GiB, or {number}B if it is bytes",
        )
    # Integer arithmetic: a float would lose bytes above 2^53.
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def memory(size_bytes: int | None) -> str:
    """Memory in GiB (MiB below one), such as ``553.2 GiB``; ``unknown`` for None."""
    if size_bytes is None:
        return "unknown"
    if 0 < abs(size_bytes) < GIB:
        return f"{size_bytes / MIB:.1f} MiB"
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes else "0 GiB"


def storage(size_bytes: int | None) -> str:
    """A download or disk size in GB or TB (MB and kB below), such as ``594.0 GB``; ``unknown`` for None."""
    if size_bytes is None:
        return "unknown"
    size = abs(size_bytes)
    if 0 < size < MB:
        return f"{size_bytes / KB:.1f} kB"
    if 0 < size < GB:
        return f"{size_bytes / MB:.1f} MB"
    if size < TB:
        return f"{size_bytes / GB:.1f} GB" if size_bytes else "0 GB"
    return f"{size_bytes / TB:.2f} TB"


def rate(bytes_per_second: float | None) -> str:
    """A transfer rate such as ``118.3 MB/s``; ``unknown`` for None."""
    return "unknown" if bytes_per_second is None else f"{storage(round(bytes_per_second))}/s"


def duration(seconds: float | None) -> str:
    """A time span such as ``42 s``, ``1 h 20 min``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
