"""How llama.cpp deals a graph out to its devices (``ggml/src/ggml-backend.cpp``): who runs what, and what is copied.

A node runs where its weights or its cache lie; nodes with neither follow their neighbours, devices before the host.
Where a node needs a tensor of another backend, a copy is made in its own, once, at the start of the run of nodes that
first needs it. With pipelining every copy and every input exists four times and is never reused.

llama.cpp also pins a few nodes (norms, and attention without cache offload), but forgets the pins before it reserves
memory, so they are left out here.

A GPU's backend (not an RPC server's) offers to run operations on large batches although their weights lie on the host:
the first device then gets them, and a copy of each weight in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kimigguf.memory.allocator import Buffer
from kimigguf.memory.graph import Id
from kimigguf.memory.program import Program, Step

PIPELINE_COPIES: Final = 4
"""``GGML_SCHED_MAX_COPIES``."""
_NOWHERE: Final = -1
_OFFLOAD_TOKENS: Final = 32
"""The smallest batch that CUDA's backend takes over (``GGML_OP_OFFLOAD_MIN_BATCH``)."""


def compute_bytes(
    program: Program,
    *,
    devices: int,
    where: Callable[[Id], int | None],
    pipelined: bool,
    offloaded_bytes: Callable[[Id], int] | None = None,
) -> tuple[int, ...]:
    """Bytes of the compute buffer of each device and, last, of the host.

    ``where`` gives the device of a tensor that has memory (weights, caches), None for the host's. With
    ``offloaded_bytes``, which gives the size of a weight, the first device takes over operations on large batches.
    """
    backend = _backends(program, devices, where)
    taken = _take_over(program, backend, devices) if offloaded_bytes is not None and devices else frozenset()
    _spread(program, backend, devices)
    split = _Split(program, backend, taken)
    copies = PIPELINE_COPIES if pipelined else 1
    return _Allocation(program, split, devices, copies, offloaded_bytes or program.size).peaks()


def _backends(program: Program, host: int, where: Callable[[Id], int | None]) -> list[int]:
    """The backend of every tensor that is no view; the host comes after the devices."""
    graph = program.graph
    held = [_NOWHERE] * (len(program.root) + 2)
    held[-2] = host  # answers for ON_HOST, which is -2, as the last entry does for NOTHING, which is -1
    for tensor in (*graph.weight, *graph.cache):
        device = where(tensor)
        held[tensor] = host if device is None else device
    return [held[anchor] for anchor in program.anchor]


def _take_over(program: Program, backend: list[int], host: int) -> frozenset[Id]:
    """Give the first device the nodes that it takes from the host, and say which."""
    graph, taken = program.graph, set()
    for step in program.steps:
        node, weight = step.node, program.anchor[step.node]
        if weight in graph.weight and backend[node] == host and _batch(program, node) >= _OFFLOAD_TOKENS:
            backend[node] = 0
            taken.add(node)
    return frozenset(taken)


def _batch(program: Program, node: Id) -> int:
    """The batch size of an operation as CUDA's backend counts it (``get_op_batch_size``)."""
    _, rows, second, third = program.graph.shape[node]
    match program.graph.operation[node]:
        case "get_rows":
            return 0
        case "mul_mat":
            return rows
        case "mul_mat_id":
            return second
        case _:
            return rows * second * third


def _spread(program: Program, backend: list[int], host: int) -> None:
    """Nodes that nothing ties down follow their neighbours."""
    nodes = [step.node for step in program.steps]
    # First those of devices spread, then those of the host.
    for stop_at_host in (True, False):
        for walk in (nodes, nodes[::-1]):
            current = _NOWHERE
            for node in walk:
                place = backend[node]
                if place != _NOWHERE:
                    current = _NOWHERE if stop_at_host and place == host else place
                elif current != _NOWHERE:
                    backend[node] = current


@dataclass(slots=True)
class _Run:
    """Steps of one backend in a row, and the tensors of others that are copied at its start."""

    backend: int
    steps: list[Step] = field(default_factory=list)
    copies: list[tuple[Id, Id]] = field(default_factory=list)
    """Source and copy."""


class _Split:
    """The program cut into runs. Copies are tensors of their own, numbered after the graph's."""

    def __init__(self, program: Program, backend: list[int], taken: frozenset[Id]) -> None:
        self.runs: list[_Run] = []
        self.last: list[Step | tuple[int, Id] | None] = [None] * len(program.root)
        """The last user of each tensor: a step, or the copy of it (or of a view of it) into a run."""
        self._program = program
        self._backend = backend
        self._copied: dict[tuple[Id, int], Id] = {}
        last = self.last
        current = _NOWHERE
        steps: list[Step] = []
        for given in program.steps:
            step, place = given, backend[given.node]
            if given.node in taken:
                step = _with_weights(program, given)
            # A weight that is copied begins a new run, so that the room of the one before it is free again.
            if place != current or (given.node in taken and self.runs[-1].copies):
                current = place
                self.runs.append(_Run(backend=current))
                steps = self.runs[-1].steps
            for used in step.roots:
                if backend[used] != current:
                    step = self._with_copies(step, self.runs[-1])
                    break
            for used in step.roots:
                last[used] = step
            steps.append(step)

    def _with_copies(self, step: Step, run: _Run) -> Step:
        """The step with copies in the place of what lies elsewhere."""
        program = self._program
        uses, roots = list(step.uses), list(step.roots)
        for position, (used, root) in enumerate(zip(step.uses, step.roots, strict=True)):
            if self._backend[root] == run.backend:
                continue
            copy = self._copied.get((used, run.backend))
            if copy is None:
                copy = self._copied[used, run.backend] = len(self.last)
                self.last.append(None)
                self.last[root] = (len(self.runs), copy)
                run.copies.append((used, copy))
            uses[position] = roots[position] = copy
        # A copy is no view, so it may be written over even where what it was made from may not.
        overwrites = tuple(
            used
            for used, root, source in zip(uses, roots, step.uses, strict=True)
            if used == root and roots.count(root) == 1 and program.may_overwrite(step.node, source)
        )
        return Step(step.node, tuple(uses), tuple(roots), step.size, overwrites)


def _with_weights(program: Program, step: Step) -> Step:
    """The step with its weights among its sources, since they will have to come to it."""
    sources = program.graph.sources[step.node]
    return Step(step.node, sources, tuple(program.root[source] for source in sources), step.size, step.overwrites)


class _Allocation:
    """Gives every tensor its place in the order of the runs, and takes it back after its last user."""

    def __init__(
        self, program: Program, split: _Split, host: int, copies: int, weight_bytes: Callable[[Id], int]
    ) -> None:
        self.program = program
        self.weight_bytes = weight_bytes
        self.split = split
        self.host = host
        self.copies = copies
        self.buffers = [Buffer() for _ in range(host + 1)]
        self.kept = program.kept if copies == 1 else program.kept.union(program.inputs)
        self.place: list[tuple[Buffer, int, int] | None] = [None] * len(split.last)
        """Buffer, start and size of each tensor that is allocated and not freed."""

    def peaks(self) -> tuple[int, ...]:
        self._inputs()
        for number, run in enumerate(self.split.runs, start=1):
            self._copy(number, run)
            self._run(run)
        return tuple(buffer.peak for buffer in self.buffers)

    def _inputs(self) -> None:
        """Inputs are there from the start; when pipelined, so are all copies, in every generation."""
        program, host = self.program, self.buffers[self.host]
        for tensor in program.inputs:
            size = program.size(tensor)
            self.place[tensor] = host, host.take(size), size
            for _ in range(self.copies - 1):
                host.take(size)
        for run in self.split.runs if self.copies > 1 else ():
            for source, _ in run.copies:
                for _ in range(self.copies):
                    self.buffers[run.backend].take(program.size(source))

    def _copy(self, number: int, run: _Run) -> None:
        """Copy what a run needs from elsewhere; each source may go as soon as it is copied."""
        buffer = self.buffers[run.backend]
        for source, copy in run.copies:
            root = self.program.root[source]
            if self.split.last[root] == (number, copy):
                self._give(root)
            if self.copies == 1:
                weight = root in self.program.graph.weight
                size = self.weight_bytes(root) if weight else self.program.size(source)
                self.place[copy] = buffer, buffer.take(size), size

    def _run(self, run: _Run) -> None:
        last, place, kept, buffer = self.split.last, self.place, self.kept, self.buffers[run.backend]
        for step in run.steps:
            if step.size is not None:
                for source in step.overwrites:
                    if last[source] is step and place[source] is not None and source not in kept:
                        place[step.node], place[source] = place[source], None
                        break
                else:
                    place[step.node] = buffer, buffer.take(step.size), step.size
            for used in step.roots:
                if last[used] is step:
                    self._give(used)

    def _give(self, tensor: Id) -> None:
        placed = self.place[tensor]
        if placed is not None and tensor not in self.kept:
            buffer, start, size = placed
            buffer.give(start, size)
            self.place[tensor] = None
