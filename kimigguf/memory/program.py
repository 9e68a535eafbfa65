"""A graph boiled down to what decides the size of its buffers, once for every placement that will be tried.

Views vanish: using a view is using the tensor that it looks at. Weights vanish from the sources: a node runs where its
weights lie.
"""

from dataclasses import dataclass
from typing import Final

from kimigguf.memory.graph import INPLACE_OPERATIONS, NO_VIEW, VIEW_OPERATIONS, Graph, Id

ALIGNMENT: Final = 32
"""Of CPU buffers, and of those behind an RPC server on a CPU. CUDA's 128 changes no size that matters here."""
NOTHING: Final = -1
ON_HOST: Final = -2


@dataclass(
    slots=True, eq=False
)  # not frozen: there are 11,000 of them, and freezing would double the time to make them
class Step:
    """A node that computes.

    ``uses`` are its sources but for weights, ``roots`` what those look at, and ``overwrites`` those whose memory it may
    take when it is their last user. ``size`` is None for a node that writes into memory of someone else's.
    """

    node: Id
    uses: tuple[Id, ...]
    roots: tuple[Id, ...]
    size: int | None
    overwrites: tuple[Id, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """``anchor`` says what ties each tensor to a place: a tensor with memory, ``ON_HOST`` for inputs, or ``NOTHING``.

    ``root`` is what each tensor is a view of, or itself; ``kept`` those that are never freed.
    """

    graph: Graph
    steps: tuple[Step, ...]
    root: tuple[Id, ...]
    anchor: tuple[Id, ...]
    inputs: tuple[Id, ...]
    kept: frozenset[Id]

    def size(self, tensor: Id) -> int:
        """Bytes that a buffer gives to a tensor."""
        return -(-self.graph.size(tensor) // ALIGNMENT) * ALIGNMENT

    def may_overwrite(self, node: Id, source: Id) -> bool:
        """Whether a node's operation and layout let it write over a source that it alone still needs."""
        graph = self.graph
        return graph.operation[node] in INPLACE_OPERATIONS and _same_layout(graph, node, source)


def compiled(graph: Graph) -> Program:
    """The program of a finished graph."""
    root = tuple(tensor if view == NO_VIEW else view for tensor, view in enumerate(graph.view_of))
    held = graph.weight.keys() | graph.cache.keys()
    used = {source for node in graph.nodes for source in graph.sources[node]}
    # A view without a user never lets go of what it looks at.
    forever = {root[node] for node in graph.nodes if root[node] != node and node not in used}
    return Program(
        graph=graph,
        steps=tuple(_step(graph, node, root) for node in graph.nodes if graph.operation[node] not in VIEW_OPERATIONS),
        root=root,
        anchor=tuple(looked if looked in held else _anchor(graph, tensor) for tensor, looked in enumerate(root)),
        inputs=tuple(leaf for leaf in graph.leafs if leaf in graph.is_input),
        kept=frozenset((forever - held) | graph.is_output),
    )


def _step(graph: Graph, node: Id, root: tuple[Id, ...]) -> Step:
    weight = graph.weight
    uses = tuple([source for source in graph.sources[node] if source not in weight])
    roots = tuple([root[source] for source in uses])
    overwrites: tuple[Id, ...] = ()
    if graph.operation[node] in INPLACE_OPERATIONS:
        overwrites = tuple(
            source
            for source in uses
            if root[source] == source and roots.count(source) == 1 and _same_layout(graph, node, source)
        )
    # What is no view is contiguous, so that its last stride tells its size.
    size = graph.stride[node][3] * graph.shape[node][3]
    return Step(node, uses, roots, -(-size // ALIGNMENT) * ALIGNMENT if root[node] == node else None, overwrites)


def _same_layout(graph: Graph, one: Id, other: Id) -> bool:
    return (
        graph.shape[one] == graph.shape[other]
        and graph.stride[one] == graph.stride[other]
        and graph.kind[one] == graph.kind[other]
    )


def _anchor(graph: Graph, tensor: Id) -> Id:
    """What decides where a tensor without memory lies: its weights; for attention nothing, its sinks are too small."""
    if tensor in graph.is_input:
        return ON_HOST
    if graph.operation[tensor] != "flash_attn":
        for source in graph.sources[tensor]:
            if source in graph.weight:
                return source
    return NOTHING
