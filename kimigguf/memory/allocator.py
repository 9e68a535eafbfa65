"""The graph allocator of ggml (``ggml/src/ggml-alloc.c``), worked through without allocating anything.

Every backend has one growing buffer. A tensor gets the smallest free gap that holds it, or the end of the buffer. The
peak of each buffer is what an engine reserves.
"""

from typing import Final

_ALIGNMENT: Final = 32
"""Of CPU buffers, and of those behind an RPC server on a CPU. CUDA's 128 changes no size that matters here."""
_ENDLESS: Final = 1 << 62


class Buffer:
    """One growing buffer with its free gaps, in the order of their addresses; the last gap has no end."""

    __slots__ = ("peak", "sizes", "starts")

    def __init__(self) -> None:
        self.starts = [0]
        self.sizes = [_ENDLESS]
        self.peak = 0

    def take(self, size: int) -> int:
        """The address of a new block: in the smallest gap that holds it (the last of equals), else at the end."""
        sizes = self.sizes
        best, best_size = len(sizes) - 1, _ENDLESS
        for index in range(best):
            gap = sizes[index]
            if size <= gap <= best_size:
                best, best_size = index, gap
        start = self.starts[best]
        if sizes[best] == size:
            del self.starts[best], sizes[best]
        else:
            self.starts[best] = start + size
            sizes[best] -= size
        self.peak = max(self.peak, start + size)
        return start

    def give(self, start: int, size: int) -> None:
        """Return a block, joining it with the gaps that touch it."""
        starts, sizes = self.starts, self.sizes
        for at in range(len(starts)):
            if starts[at] + sizes[at] == start:
                sizes[at] += size
                if at + 1 < len(starts) and starts[at] + sizes[at] == starts[at + 1]:
                    sizes[at] += sizes.pop(at + 1)
                    del starts[at + 1]
                return
            if start + size == starts[at]:
                starts[at] = start
                sizes[at] += size
                if at and starts[at - 1] + sizes[at - 1] == start:
                    sizes[at - 1] += sizes.pop(at)
                    del starts[at]
                return
        index = 0
        while index < len(starts) and starts[index] < start:
            index += 1
        starts.insert(index, start)
        sizes.insert(index, size)
