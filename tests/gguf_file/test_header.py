"""What a header says, and what it must not be believed."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from fakes.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, U64, array, header, key, tensor, text

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.header import (
    Header,
    HeaderReader,
    NeedMore,
    SkippedArray,
    TensorInfo,
    parse,
)
from kimigguf.gguf_file.read import check_size, read_from, read_header

ARCHITECTURE = key("general.architecture", STRING, "llama")


def whole(data: bytes) -> Header:
    answer = parse(data)
    assert isinstance(answer, Header)
    return answer


def refused(data: bytes) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught:
        parse(data, name="x.gguf")
    assert "x.gguf" in caught.value.message
    return caught.value


@pytest.mark.parametrize("quant", ["UD-IQ1_M", "UD-Q4_K_XL"])
def test_a_real_writers_files_read_as_its_own_reader_reads_them(tiny: Callable[[str], Path], quant: str) -> None:
    for path in sorted(tiny(quant).iterdir()):
        ours, theirs = read_header(path), gguf.GGUFReader(path)
        assert ours.data_offset == (theirs.data_offset if theirs.tensors else ours.data_offset)
        assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert mine.shape == tuple(other.shape.tolist())
            assert mine.ggml_type == other.tensor_type.value
            assert mine.size_bytes == other.n_bytes
            assert ours.data_offset + mine.offset == other.data_offset
        fields = {name for name in theirs.fields if not name.startswith("GGUF.")}
        assert set(ours.metadata) == fields
        for name, value in ours.metadata.items():
            contents = theirs.fields[name].contents()
            if isinstance(value, SkippedArray):
                assert value.length == len(contents)
            else:
                assert value == (tuple(contents) if isinstance(contents, list) else contents)


def test_every_kind_of_value_is_read() -> None:
    found = whole(
        header(
            [
                ARCHITECTURE,
                key("a", 0, 255),
                key("b", 1, -1),
                key("c", 2, 65535),
                key("d", 3, -2),
                key("e", U32, 4),
                key("f", I32, -4),
                key("g", F32, 0.5),
                key("h", BOOL, True),
                key("i", U64, 2**63),
                key("j", 11, -(2**63)),
                key("k", 12, 0.1),
                array("l", I32, [0, 1, 0]),
                array("m", STRING, ["x", "y"]),
                array("n", STRING, [str(i) for i in range(1000)]),
                array("o", F32, [0.0] * 5000),
                array("p", BOOL, [True, False]),
                array("q", U32, []),
            ]
        )
    )
    assert found.architecture == "llama"
    assert [found.metadata[letter] for letter in "abcdef"] == [255, -1, 65535, -2, 4, -4]
    assert [found.metadata[letter] for letter in "ghijk"] == [0.5, True, 2**63, -(2**63), 0.1]
    assert found.metadata["h"] is True
    assert found.metadata["l"] == (0, 1, 0)
    assert found.metadata["m"] == ("x", "y")
    assert found.metadata["n"] == SkippedArray(element_type=STRING, length=1000)
    assert found.metadata["o"] == SkippedArray(element_type=F32, length=5000)
    assert found.metadata["p"] == (True, False)
    assert found.metadata["q"] == ()


def test_version_2_reads_like_version_3() -> None:
    assert whole(header([ARCHITECTURE], version=2)).version == 2


def test_alignment_moves_the_data() -> None:
    data = header([ARCHITECTURE, key("general.alignment", U32, 4096)], [tensor("t", (4,), 0, 4096)], alignment=4096)
    found = whole(data)
    assert (found.alignment, found.data_offset) == (4096, len(data))


def test_a_header_cut_anywhere_asks_for_more_and_never_for_too_much() -> None:
    keys = [ARCHITECTURE, array("words", STRING, ["ab"] * 100), array("n", U32, list(range(9)))]
    data = header(keys, [tensor("t", (32, 2), 8, 0)])
    end = len(data.rstrip(b"\0")) + 8  # the last offset is 0, and its bytes belong to the header
    whole(data)
    for cut in range(end - 16):
        answer = parse(data[:cut])
        if isinstance(answer, Header):
            assert cut >= end - 16
            continue
        assert cut < answer.size_bytes <= len(data)


def test_bytes_that_come_one_by_one_give_the_same_header() -> None:
    data = header([ARCHITECTURE, array("words", STRING, ["word"] * 70)], [tensor("t", (32,), 8, 0)])
    reader = HeaderReader()
    answers = [reader.feed(data[i : i + 1]) for i in range(len(data))]
    assert isinstance(answers[-1], Header)
    assert answers[-1] == whole(data)
    assert isinstance(answers[0], NeedMore)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GGML" + bytes(60), "not-gguf"),
        (b"PK\3\4" + bytes(60), "not-gguf"),
        (header(version=1), "gguf-version"),
        (header(version=4), "gguf-version"),
        (header(version=0), "gguf-version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(key_count=2**63), "bad-header"),
        (header(key_count=2**64 - 1), "bad-header"),
        (header(tensor_count=2**63), "bad-header"),
        (header([text("k") + struct.pack("<I", 13)]), "bad-header"),
        (header([array("k", ARRAY, [])]), "bad-header"),
        (header([array("k", STRING, [], length=2**63)]), "bad-header"),
        (header([array("k", U32, [], length=2**62)]), "bad-header"),
        (header([struct.pack("<Q", 2**63) + b"x"]), "bad-header"),
        (header([text("k") + struct.pack("<IQ", STRING, 2**63)]), "bad-header"),
        (header([text("k") + struct.pack("<IIQQ", ARRAY, STRING, 100, 2**62) + bytes(900)]), "bad-header"),
        (header([key("", U32, 1)]), "bad-header"),
        (header([key("a\x1b[31m", U32, 1)]), "bad-header"),
        (header([key("a\u202eb", U32, 1)]), "bad-header"),
        (header([key(b"\xff\xfe", U32, 1)]), "bad-header"),
        (header([ARCHITECTURE, ARCHITECTURE]), "bad-header"),
        (header([key("general.alignment", U32, 0)]), "bad-header"),
        (header([key("general.alignment", U32, 48)]), "bad-header"),
        (header([key("general.alignment", U32, 2**31)]), "bad-header"),
        (header([key("general.alignment", BOOL, True)]), "bad-header"),
        (header(tensors=[tensor("a\nb", (4,), 0, 0)]), "bad-header"),
        (header(tensors=[tensor("a" * 64, (4,), 0, 0)]), "bad-header"),
        (header(tensors=[tensor("t", (1, 1, 1, 1, 1), 0, 0)]), "bad-tensor"),
        (header(tensors=[tensor("t", (2**63,), 0, 0)]), "bad-tensor"),
        (header(tensors=[tensor("t", (2**32, 2**32), 0, 0)]), "bad-tensor"),
        (header(tensors=[tensor("t", (33,), 8, 0)]), "bad-tensor"),
        (header(tensors=[tensor("t", (4,), 0, 7)]), "bad-tensor"),
        (header(tensors=[tensor("t", (4,), 0, 2**63)]), "bad-tensor"),
        (header(tensors=[tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)]), "bad-tensor"),
        (header(tensors=[tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32)]), "bad-tensor"),
        (header(tensors=[tensor("t", (256,), 66, 0), tensor("u", (4,), 0, 0)]), "bad-tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_header_can_say_is_refused_with_the_file_and_the_offset(data: bytes, code: str) -> None:
    error = refused(data)
    assert error.code == code
    assert "byte " in f"{error.message} {error.cause}"
    assert "\x1b" not in f"{error.message} {error.cause}"


def test_the_offset_is_that_of_the_fault() -> None:
    before = len(header([ARCHITECTURE], alignment=1))
    error = refused(header([ARCHITECTURE, key("a\tb", U32, 1)]))
    assert f"byte {before} " in error.message


def test_a_claim_of_a_gigabyte_takes_no_memory() -> None:
    data = header([array("k", U32, [], length=60_000_000)], alignment=1)
    tracemalloc.start()
    answer = parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(answer, NeedMore)
    assert answer.size_bytes == len(data) + 240_000_000
    assert peak < 1_000_000


def test_a_type_of_a_fork_is_kept_without_a_size() -> None:
    found = whole(header(tensors=[tensor("t", (256, 4), 66, 0)]))
    assert found.tensors == (TensorInfo(name="t", shape=(256, 4), ggml_type=66, offset=0, size_bytes=None),)


def test_broken_text_in_a_value_is_no_reason_to_refuse_a_model() -> None:
    assert whole(header([key("licence", STRING, b"caf\xe9")])).metadata["licence"] == "caf\ufffd"


def sized(offset: int, *, count: int = 8) -> Header:
    return whole(header(tensors=[tensor("t", (count,), 0, offset)]))


def test_a_tensor_beyond_the_end_is_found_before_an_engine_loads_it() -> None:
    found = sized(64)
    check_size(found, found.data_offset + 96, name="x.gguf")
    with pytest.raises(IntegrityError) as caught:
        check_size(found, found.data_offset + 95, name="x.gguf")
    assert caught.value.code == "file-cut"
    assert "t" in caught.value.message
    assert str(found.data_offset + 96) in (caught.value.cause or "")


def test_files_that_were_joined_are_found() -> None:
    found = sized(0)
    with pytest.raises(IntegrityError) as caught:
        check_size(found, found.data_offset + 32 + 500, name="x.gguf")
    assert caught.value.code == "trailing-data"


def test_a_metadata_only_file_may_end_without_padding() -> None:
    data = header([ARCHITECTURE, key("a", 0, 1)], alignment=1)
    assert len(data) % 32
    check_size(whole(data), len(data), name="x.gguf")


def test_a_file_is_read_no_further_than_its_header() -> None:
    data = header([ARCHITECTURE], [tensor("t", (1 << 20,), 0, 0)]) + bytes(4 << 20)
    asked: list[tuple[int, int]] = []

    def fetch(start: int, count: int) -> bytes:
        asked.append((start, count))
        return data[start : start + count]

    found = read_from(fetch, size_bytes=len(data), name="x", step_bytes=100)
    assert found == whole(data)
    assert [start for start, _ in asked] == [sum(count for _, count in asked[:i]) for i in range(len(asked))]
    assert sum(count for _, count in asked) <= found.data_offset + 100


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty-file"),
        (b"GGU", "header-cut"),
        (header([ARCHITECTURE])[:40], "header-cut"),
        (b"\0" * 64, "not-gguf"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        read_header(path)
    assert caught.value.code == code
    assert "x.gguf" in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        read_header(tmp_path / "x.gguf")
    assert caught.value.code == "missing-file"
    with pytest.raises(IntegrityError) as caught:
        read_header(tmp_path)
    assert caught.value.code == "unreadable"
