"""How llama.cpp deals a graph out to its devices (``ggml/src/ggml-backend.cpp``): who runs what, and what is copied.

A node runs where its weights or its cache lie; nodes with neither follow their neighbours, devices before the host.
Where a node needs a tensor of another backend, a copy is made in its own, once. With pipelining every copy and every
input exists four times and is never reused.

llama.cpp also pins a few nodes (norms, and attention without cache offload), but forgets the pins before it reserves
memory, so they are left out here.
"""

from collections.abc import Callable
from typing import Final

from kimigguf.memory import allocator
from kimigguf.memory.graph import NO_VIEW, VIEW_OPERATIONS, Graph, Id

PIPELINE_COPIES: Final = 4
"""``GGML_SCHED_MAX_COPIES``."""
_NOWHERE: Final = -1


def compute_bytes(graph: Graph, *, devices: int, where: Callable[[Id], int | None], pipelined: bool) -> tuple[int, ...]:
    """Bytes of the compute buffer of each device and, last, of the host.

    ``where`` gives the device of a tensor that has memory (weights, caches), None for the host's.
    """
    return _Schedule(graph, devices, where, PIPELINE_COPIES if pipelined else 1).compute_bytes()


class _Schedule:
    def __init__(self, graph: Graph, devices: int, where: Callable[[Id], int | None], copies: int) -> None:
        self.graph = graph
        self.host = devices
        self.copies = copies
        self.backend: list[int] = []
        self.held = [_NOWHERE] * len(graph.operation)
        for tensor in (*graph.weight, *graph.cache):
            device = where(tensor)
            self.held[tensor] = self.host if device is None else device

    def compute_bytes(self) -> tuple[int, ...]:
        self._assign_from_memory()
        self._spread()
        self._assign_views()
        return self._split()

    def _assign_from_memory(self) -> None:
        held = [*self.held, self.host, _NOWHERE]  # the last two answer for ON_HOST and NOTHING, which are -2 and -1
        self.backend = [held[anchor] for anchor in self.graph.anchor]

    def _spread(self) -> None:
        """Nodes that nothing ties down follow their neighbours: first devices' nodes spread, then the host's."""
        backend, host = self.backend, self.host
        nodes = self.graph.running
        for stop_at_host in (True, False):
            for walk in (nodes, nodes[::-1]):
                current = _NOWHERE
                for node in walk:
                    if backend[node] != _NOWHERE:
                        current = _NOWHERE if stop_at_host and backend[node] == host else backend[node]
                    elif current != _NOWHERE:
                        backend[node] = current

    def _assign_views(self) -> None:
        graph, backend = self.graph, self.backend
        for node in graph.nodes:
            for tensor in (node, *graph.sources[node]):
                if backend[tensor] == _NOWHERE:
                    root = graph.view_of[tensor]
                    backend[tensor] = backend[node] if root == NO_VIEW else backend[root]

    def _split(self) -> tuple[int, ...]:
        """Cut the nodes into runs of one backend, copy what each run needs from elsewhere, and allocate."""
        original, backend = self.graph, self.backend
        graph = original.extensible()
        sources = graph.sources
        copied: dict[tuple[Id, int], tuple[Id, ...]] = {}
        order: list[tuple[Id, int]] = []
        copies: list[tuple[Id, int]] = []
        run: list[tuple[Id, int]] = []
        current = _NOWHERE
        for node in original.nodes:
            if original.operation[node] not in VIEW_OPERATIONS:
                if backend[node] != current:
                    order += run
                    run = []
                    current = backend[node]
                for position, source in enumerate(original.sources[node]):
                    if backend[source] == current:
                        continue
                    if (source, current) not in copied:
                        new = tuple(graph.duplicate(source, kept=self.copies > 1) for _ in range(self.copies))
                        copied[source, current] = new
                        # The source must live until the copy is made; both happen at the start of the run.
                        order.append((graph.dependency(source), backend[source]))
                        order.append((new[0], current))
                        copies += [(copy, current) for copy in new]
                    replaced = list(sources[node])
                    replaced[position] = copied[source, current][0]
                    sources[node] = tuple(replaced)
            run.append((node, backend[node]))
        order += run
        leafs = [(leaf, backend[leaf]) for leaf in original.leafs]
        if self.copies > 1:
            inputs = [leaf for leaf in original.leafs if leaf in original.is_input]
            graph.is_output.update(inputs)
            spare = [
                (tensor, self.host)
                for leaf in inputs
                for tensor in (leaf, *(graph.duplicate(leaf, kept=True) for _ in range(self.copies - 1)))
            ]
            leafs = [*spare, *copies, *leafs]
        held = [memory != _NOWHERE for memory in self.held] + [False] * (len(graph.operation) - len(self.held))
        return allocator.peaks(graph, order, leafs, held, self.host + 1)
