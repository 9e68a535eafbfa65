"""Which bytes of a file are there: a set of half-open ranges ``[start, end)``, merged as they grow."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """Disjoint ranges in ascending order; neighbours that touch are one."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Take in ``[start, end)``; bytes that are there already are not counted twice."""
        if start < 0 or end < start:
            raise ValueError(f"[{start}, {end}) is no range")
        if start == end:
            return
        first = bisect_left(self._ends, start)  # the first range that touches or lies behind
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take ``[start, end)`` out, whether it was there or not."""
        kept = [(s, min(e, start)) for s, e in self if s < start] + [(max(s, end), e) for s, e in self if e > end]
        self._starts, self._ends = [s for s, _ in kept], [e for _, e in kept]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def total_bytes(self) -> int:
        """How many bytes are there."""
        return sum(self._ends) - sum(self._starts)

    @property
    def prefix_bytes(self) -> int:
        """How many bytes are there from the start of the file without a gap."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def gaps(self, size_bytes: int, at_most_bytes: int) -> Iterator[tuple[int, int]]:
        """What is missing of a file of ``size_bytes``, cut at multiples of ``at_most_bytes``."""
        at = 0
        for start, end in [*self, (size_bytes, size_bytes)]:
            while at < min(start, size_bytes):
                stop = min(start, size_bytes, (at // at_most_bytes + 1) * at_most_bytes)
                yield at, stop
                at = stop
            at = max(at, end)

    def clipped(self, size_bytes: int) -> "Ranges":
        """The same without anything at or beyond ``size_bytes``."""
        return Ranges((start, min(end, size_bytes)) for start, end in self if start < size_bytes)
