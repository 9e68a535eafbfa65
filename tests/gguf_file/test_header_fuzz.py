"""Mutated headers: the answer is always a header, a wish for more, or an IntegrityError, soon and in little memory."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.header import MAX_HEADER_BYTES, Header, HeaderReader, NeedMore, parse
from kimigguf.gguf_file.read import check_size, read_header

HUGE = [1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
MAGNITUDES = [0, 1, 2, 3, 31, 32, 64, 255, 1 << 16, *HUGE]
FUZZ = settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

Mutation = tuple[str, int, int]


@pytest.fixture(scope="module")
def seeds(tiny: Callable[[str], Path]) -> list[bytes]:
    """The headers of a metadata-only shard and of a shard of weights, as a real writer wrote them."""
    files = sorted(tiny("UD-IQ1_M").iterdir())[:2]
    return [path.read_bytes()[: read_header(path).data_offset] for path in files]


mutations = st.lists(
    st.tuples(
        st.sampled_from(["byte", "u32", "u64", "cut", "insert", "delete", "repeat"]),
        st.integers(min_value=0, max_value=1 << 20),
        st.integers(min_value=0, max_value=1 << 20),
    ),
    min_size=1,
    max_size=6,
)


def mutate(data: bytes, changes: list[Mutation]) -> bytes:
    """Apply changes; the numbers are taken modulo whatever they choose from."""
    buffer = bytearray(data)
    for how, where, what in changes:
        # Half of all changes hit the first kilobyte, where the counts and the first keys are.
        at = where % max(1, min(len(buffer), 1024 if where % 2 else len(buffer)))
        number = MAGNITUDES[what % len(MAGNITUDES)]
        match how:
            case "byte":
                buffer[at : at + 1] = bytes([what % 256])
            case "u32":
                buffer[at : at + 4] = struct.pack("<I", number % (1 << 32))
            case "u64":
                buffer[at : at + 8] = struct.pack("<Q", number)
            case "cut":
                del buffer[at:]
            case "insert":
                buffer[at:at] = bytes([what % 256]) * (what % 40)
            case "delete":
                del buffer[at : at + what % 40]
            case _:
                buffer[at:at] = buffer[at : at + what % 400]
    return bytes(buffer)


def outcome(data: bytes) -> Header | NeedMore | IntegrityError:
    try:
        answer = parse(data, name="fuzzed.gguf")
        if isinstance(answer, Header):
            check_size(answer, len(data) + (1 << 20), name="fuzzed.gguf")
    except IntegrityError as error:
        return error
    return answer


@FUZZ
@given(which=st.integers(0, 1), changes=mutations)
def test_a_mutated_header_is_answered_and_never_crashes(
    seeds: list[bytes], which: int, changes: list[Mutation]
) -> None:
    data = mutate(seeds[which], changes)
    answer = outcome(data)
    match answer:
        case NeedMore(size_bytes=size):
            assert len(data) < size <= MAX_HEADER_BYTES
        case Header():
            assert answer.data_offset >= 24
            assert all(tensor.name.isprintable() for tensor in answer.tensors)
        case IntegrityError():
            shown = f"{answer.message} {answer.cause} {answer.hint}"
            assert "fuzzed.gguf" in answer.message
            assert shown.isprintable()
            assert len(shown) < 1000


@FUZZ
@given(which=st.integers(0, 1), changes=mutations, step=st.integers(1, 5000))
def test_bytes_in_pieces_give_the_same_answer(
    seeds: list[bytes], which: int, changes: list[Mutation], step: int
) -> None:
    data = mutate(seeds[which], changes)
    try:
        at_once: object = parse(data)
    except IntegrityError as error:
        at_once = (error.code, error.message)
    reader = HeaderReader()
    in_pieces: object = reader.feed(b"")
    try:
        for start in range(0, len(data), step):
            in_pieces = reader.feed(data[start : start + step])
            if isinstance(in_pieces, Header):
                break
    except IntegrityError as error:
        in_pieces = (error.code, error.message)
    # repr: a mutated float may be NaN, which equals nothing.
    assert repr(in_pieces) == repr(at_once)


@FUZZ
@given(data=st.binary(max_size=300))
def test_anything_behind_the_magic_is_answered(data: bytes) -> None:
    outcome(b"GGUF" + data)
    outcome(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + data)


def test_huge_numbers_anywhere_take_no_memory(seeds: list[bytes]) -> None:
    tracemalloc.start()
    started = time.process_time()
    for data in seeds:
        for at in range(0, min(len(data), 3000), 7):
            for number in HUGE:
                outcome(data[:at] + struct.pack("<Q", number) + data[at + 8 :])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
    assert time.process_time() - started < 60


def test_the_longest_list_of_empty_strings_is_stepped_over_in_bounded_time() -> None:
    # A hostile maximum: every string costs 8 bytes, and nothing else is claimed.
    count = 1_000_000
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, count)
    started = time.process_time()
    answer = parse(data + bytes(8 * count))
    assert isinstance(answer, Header)
    assert time.process_time() - started < 5
