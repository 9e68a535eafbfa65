"""The allocator model: the gaps it leaves are the engine's, and no two live tensors share a byte."""

from hypothesis import given
from hypothesis import strategies as st

from kimigguf.memory.allocator import Buffer
from kimigguf.memory.graph import Graph
from kimigguf.memory.program import compiled
from kimigguf.memory.scheduler import compute_bytes


def test_a_block_goes_into_the_smallest_gap_that_holds_it_not_the_first() -> None:
    buffer = Buffer()
    wide, _, narrow, _ = (buffer.take(size) for size in (320, 32, 64, 32))
    buffer.give(wide, 320)
    buffer.give(narrow, 64)
    assert buffer.take(64) == narrow
    assert buffer.take(96) == wide
    assert buffer.peak == 448


def test_neighbouring_gaps_become_one() -> None:
    buffer = Buffer()
    first, second, _ = (buffer.take(size) for size in (64, 64, 32))
    buffer.give(first, 64)
    buffer.give(second, 64)
    assert buffer.take(128) == first


def test_a_block_of_no_bytes_neither_grows_the_buffer_nor_blocks_a_gap() -> None:
    buffer = Buffer()
    first = buffer.take(64)
    empty = buffer.take(0)
    buffer.give(empty, 0)
    buffer.give(first, 64)
    assert buffer.take(64) == 0
    assert buffer.peak == 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30)), max_size=120))
def test_live_blocks_never_overlap(steps: list[tuple[bool, int, int]]) -> None:
    buffer = Buffer()
    live: list[tuple[int, int]] = []
    for give, size, which in steps:
        if give and live:
            buffer.give(*live.pop(which % len(live)))
        else:
            live.append((buffer.take(size * 32), size * 32))
        ends = 0
        for start, taken in sorted(live):
            assert start >= ends
            ends = start + taken
        assert ends <= buffer.peak


def run(graph: Graph, *, devices: int = 0, pipelined: bool = False) -> tuple[int, ...]:
    """Peaks of the devices and, last, the host; weights lie on the device that their name says, or on the host."""
    program = compiled(graph)

    def where(tensor: int) -> int | None:
        return int(graph.weight[tensor]) if graph.weight[tensor].isdigit() else None

    return compute_bytes(program, devices=devices, where=where, pipelined=pipelined)


def matrix(graph: Graph, name: str = "host") -> int:
    return graph.weights(name, (1024, 1024, 1, 1))


def test_the_last_user_of_a_tensor_writes_over_it_and_an_earlier_one_does_not() -> None:
    graph = Graph()
    first = graph.matmul(matrix(graph), graph.weights("host", (1024, 1, 1, 1)))
    graph.expand(graph.like("add", graph.like("scale", first), first))
    assert run(graph) == (2 * 4096,)


def test_a_result_is_never_written_over() -> None:
    graph = Graph()
    first = graph.matmul(matrix(graph), graph.weights("host", (1024, 1, 1, 1)))
    graph.is_output.add(first)
    graph.expand(graph.like("scale", graph.like("scale", first)))
    assert run(graph) == (2 * 4096,)


def test_a_view_keeps_what_it_looks_at() -> None:
    graph = Graph()
    source = graph.matmul(matrix(graph), graph.weights("host", (1024, 1, 1, 1)))
    view = graph.reshape(source, (32, 32, 1, 1))
    graph.expand(graph.new("mul_mat", (graph.contiguous(view), view), (32, 32, 1, 1)))
    assert run(graph) == (3 * 4096,)


def test_what_another_device_made_is_copied_once_and_freed_where_it_came_from() -> None:
    graph = Graph()
    made = graph.matmul(matrix(graph, "0"), graph.weights("0", (1024, 1, 1, 1)))
    used = graph.matmul(matrix(graph, "1"), made)
    again = graph.matmul(matrix(graph, "1"), made)
    graph.expand(graph.like("add", used, again))
    # Device 1 holds one copy and two products; the sum takes the place of one of them.
    assert run(graph, devices=2) == (4096, 3 * 4096, 0)


def test_pipelining_holds_four_of_every_input_and_copy() -> None:
    graph = Graph()
    given = graph.input((1024, 1, 1, 1), "f32")
    graph.expand(graph.matmul(matrix(graph, "0"), given))
    assert run(graph, devices=1) == (2 * 4096, 4096)
    assert run(graph, devices=1, pipelined=True) == (5 * 4096, 4 * 4096)
