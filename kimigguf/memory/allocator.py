"""The graph allocator of ggml (``ggml/src/ggml-alloc.c``), worked through without allocating anything.

Every backend has one growing buffer. A tensor gets the smallest free gap that holds it, or the end of the buffer; it
is freed when its last user has run; an operation that may write over a source takes that source's place. The peak of
each buffer is what an engine reserves.
"""

from collections.abc import Sequence
from typing import Final

from kimigguf.memory.graph import INPLACE_OPERATIONS, NO_VIEW, Graph, Id

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


def peaks(
    graph: Graph,
    order: Sequence[tuple[Id, int]],
    leafs: Sequence[tuple[Id, int]],
    is_held: Sequence[bool],
    buffers: int,
) -> tuple[int, ...]:
    """Bytes that each of ``buffers`` backends reserves for running ``order``, a list of nodes with their backends.

    ``is_held`` says which tensors already have memory.
    """
    return _Run(graph, is_held, buffers).peaks(order, leafs)


class _Run:
    def __init__(self, graph: Graph, is_held: Sequence[bool], buffers: int) -> None:
        count = len(graph.operation)
        self.graph = graph
        self.sources = graph.sources
        self.fixed = [held or root != NO_VIEW for held, root in zip(is_held, graph.view_of, strict=True)]
        """Tensors that get no place of their own."""
        self.buffers = [Buffer() for _ in range(buffers)]
        self.children = [0] * count
        self.views = [0] * count
        self.place: list[tuple[Buffer, int, int] | None] = [None] * count
        """Buffer, start and size of each tensor that this run allocated and has not freed."""

    def peaks(self, order: Sequence[tuple[Id, int]], leafs: Sequence[tuple[Id, int]]) -> tuple[int, ...]:
        sources, children, views, place, fixed = self.sources, self.children, self.views, self.place, self.fixed
        for leaf, backend in leafs:
            if not fixed[leaf] and place[leaf] is None:
                self._allocate(leaf, backend)
        self._count(order)
        for node, backend in order:
            for source in sources[node]:
                if not fixed[source] and place[source] is None:
                    self._allocate(source, backend)
            if not fixed[node] and place[node] is None:
                self._allocate(node, backend)
            for source in sources[node]:
                children[source] -= 1
                if not children[source] and not views[source]:
                    self._release(source)
        return tuple(buffer.peak for buffer in self.buffers)

    def _count(self, order: Sequence[tuple[Id, int]]) -> None:
        """How often each tensor will be used, directly and through views."""
        graph = self.graph
        for node, _ in order:
            root = graph.view_of[node]
            if root != NO_VIEW and graph.operation[node] != "none":  # "none" only orders things, it views nothing
                self.views[root] += 1
            for source in self.sources[node]:
                self.children[source] += 1

    def _allocate(self, tensor: Id, backend: int) -> None:
        """Give a tensor its place: that of a source which it may overwrite as the last user, or a new one."""
        graph, place = self.graph, self.place
        if graph.operation[tensor] in INPLACE_OPERATIONS:
            shape, stride, kind = graph.shape[tensor], graph.stride[tensor], graph.kind[tensor]
            for source in self.sources[tensor]:
                if (
                    place[source] is not None
                    and self.children[source] == 1
                    and self.views[source] == 0
                    and source not in graph.is_output
                    and graph.shape[source] == shape
                    and graph.stride[source] == stride
                    and graph.kind[source] == kind
                ):
                    place[tensor], place[source] = place[source], None
                    return
        size = -(-graph.size(tensor) // _ALIGNMENT) * _ALIGNMENT
        buffer = self.buffers[backend]
        place[tensor] = buffer, buffer.take(size), size

    def _release(self, tensor: Id) -> None:
        """The last user of a tensor has run; free it, or what it is a view of when that has no other user."""
        root = self.graph.view_of[tensor]
        if root != NO_VIEW:
            self.views[root] -= 1
            if self.views[root] or self.children[root]:
                return
            tensor = root
        placed = self.place[tensor]
        if placed is not None and tensor not in self.graph.is_output:
            buffer, start, size = placed
            buffer.give(start, size)
            self.place[tensor] = None
