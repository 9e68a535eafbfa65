"""A compute graph as an allocator sees it: tensors with shape, strides, sources and views, in llama.cpp's order.

Nothing is computed. The operations below only derive the shapes that ggml's operations of the same name derive
(``ggml/src/ggml.c``), because sizes, order, views and reuse in place are all that the size of a compute buffer
depends on.
"""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kimigguf.memory.settings import KV_BLOCKS

Shape: TypeAlias = tuple[int, int, int, int]
Id: TypeAlias = int
"""A tensor, by its index in the graph's lists."""

NO_VIEW: Final = -1
NOTHING: Final = -1
ON_HOST: Final = -2
VIEW_OPERATIONS: Final = frozenset({"view", "reshape", "permute", "transpose"})
INPLACE_OPERATIONS: Final = frozenset({"scale", "add", "mul", "div", "unary", "rms_norm", "clamp", "soft_max"})
"""Those of ggml's operations that may write over a source of the same layout (``ggml_op_can_inplace``)."""

_BLOCKS: Final = {**KV_BLOCKS, "i32": (1, 4), "i64": (1, 8)}


@dataclass(slots=True)
class Graph:
    """Tensors in parallel lists, nodes and leafs in the order in which ggml walks them.

    ``buffer`` maps tensors that already have memory to what holds it: a weight by name, or a layer's cache.
    """

    operation: list[str] = field(default_factory=list)
    sources: list[tuple[Id, ...]] = field(default_factory=list)
    shape: list[Shape] = field(default_factory=list)
    stride: list[Shape] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    view_of: list[Id] = field(default_factory=list)
    is_input: set[Id] = field(default_factory=set)
    is_output: set[Id] = field(default_factory=set)
    weight: dict[Id, str] = field(default_factory=dict)
    cache: dict[Id, int] = field(default_factory=dict)
    nodes: list[Id] = field(default_factory=list)
    leafs: list[Id] = field(default_factory=list)
    _seen: set[Id] = field(default_factory=set)

    def new(
        self,
        operation: str,
        sources: tuple[Id, ...],
        shape: Shape,
        *,
        kind: str = "f32",
        view_of: Id = NO_VIEW,
        stride: Shape | None = None,
    ) -> Id:
        """A tensor; contiguous unless strides are given. A view of a view is a view of the latter's root."""
        self.operation.append(operation)
        self.sources.append(sources)
        self.shape.append(shape)
        if stride is None:
            block, size = _BLOCKS[kind]
            second = size * (shape[0] // block)
            third = second * shape[1]
            stride = size, second, third, third * shape[2]
        self.stride.append(stride)
        self.kind.append(kind)
        root = self.view_of[view_of] if view_of != NO_VIEW else NO_VIEW
        self.view_of.append(view_of if root == NO_VIEW else root)
        return len(self.operation) - 1

    def size(self, tensor: Id) -> int:
        """Bytes from the first to the last number, gaps included (``ggml_nbytes``)."""
        shape, stride = self.shape[tensor], self.stride[tensor]
        if 0 in shape:
            return 0
        block, size = _BLOCKS[self.kind[tensor]]
        first = size + (shape[0] - 1) * stride[0] if block == 1 else shape[0] * stride[0] // block
        return first + sum((shape[i] - 1) * stride[i] for i in (1, 2, 3))

    def expand(self, tensor: Id) -> None:
        """Append a tensor and all that it needs, sources first, from left to right (``ggml_build_forward_expand``)."""
        seen = self._seen
        if tensor in seen:
            return
        seen.add(tensor)
        for source in self.sources[tensor]:
            if source not in seen:
                self.expand(source)
        (self.leafs if self.operation[tensor] == "none" else self.nodes).append(tensor)

    # Leafs

    def input(self, shape: Shape, kind: str) -> Id:
        tensor = self.new("none", (), shape, kind=kind)
        self.is_input.add(tensor)
        return tensor

    def weights(self, name: str, shape: Shape) -> Id:
        tensor = self.new("none", (), shape)
        self.weight[tensor] = name
        return tensor

    def cached(self, layer: int, shape: Shape, kind: str) -> Id:
        tensor = self.new("none", (), shape, kind=kind)
        self.cache[tensor] = layer
        return tensor

    # Views

    def reshape(self, source: Id, shape: Shape) -> Id:
        return self.new("reshape", (source,), shape, kind=self.kind[source], view_of=source)

    def view(self, source: Id, shape: Shape, stride: Shape) -> Id:
        return self.new("view", (source,), shape, kind=self.kind[source], view_of=source, stride=stride)

    def permute(self, source: Id) -> Id:
        """Swap the second and third dimension, the only permutation that attention uses."""
        a, b, c, d = self.shape[source]
        i, j, k, m = self.stride[source]
        return self.new("permute", (source,), (a, c, b, d), kind=self.kind[source], view_of=source, stride=(i, k, j, m))

    def transpose(self, source: Id) -> Id:
        a, b, c, d = self.shape[source]
        i, j, k, m = self.stride[source]
        return self.new(
            "transpose", (source,), (b, a, c, d), kind=self.kind[source], view_of=source, stride=(j, i, k, m)
        )

    # Operations

    def like(self, operation: str, *sources: Id) -> Id:
        """An operation whose result has the shape and type of its first source."""
        return self.new(operation, sources, self.shape[sources[0]], kind=self.kind[sources[0]])

    def contiguous(self, source: Id) -> Id:
        return self.new("cont", (source,), self.shape[source], kind=self.kind[source])

    def cast(self, source: Id, kind: str) -> Id:
        """A copy in another type; ggml makes it its own second source."""
        tensor = self.new("cpy", (source,), self.shape[source], kind=kind)
        self.sources[tensor] = (source, tensor)
        return tensor

    def copy(self, source: Id, target: Id) -> Id:
        return self.new(
            "cpy",
            (source, target),
            self.shape[target],
            kind=self.kind[target],
            view_of=target,
            stride=self.stride[target],
        )

    def matmul(self, weights: Id, other: Id) -> Id:
        _, c, d = self.shape[other][1:]
        return self.new("mul_mat", (weights, other), (self.shape[weights][1], self.shape[other][1], c, d))

    def sum_rows(self, source: Id) -> Id:
        return self.new("sum_rows", (source,), (1, *self.shape[source][1:]))

    def rows(self, source: Id, indices: Id) -> Id:
        a, b, c, _ = self.shape[indices]
        return self.new("get_rows", (source, indices), (self.shape[source][0], a, b, c))

    def concat(self, first: Id, second: Id, dimension: int) -> Id:
        shape = list(self.shape[first])
        shape[dimension] += self.shape[second][dimension]
        return self.new("concat", (first, second), (shape[0], shape[1], shape[2], shape[3]))
