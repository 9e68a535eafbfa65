"""Which files belong to a model, and which only look as if they did."""

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.gguf_bytes import STRING, U32, header, key, tensor, write_shards

from kimigguf.errors import IntegrityError, KimiggufError, UsageError
from kimigguf.gguf_file.header import Header, parse
from kimigguf.gguf_file.shards import ShardFile, check, find_set, read_set

NAME = "Kimi-K3-UD-IQ1_M-{:05d}-of-00005.gguf"


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A set of our own to spoil."""
    return Path(shutil.copytree(tiny("UD-IQ1_M"), tmp_path / "set"))


def code_of(call: Callable[[], object]) -> tuple[type[KimiggufError], str]:
    with pytest.raises(KimiggufError) as caught:
        call()
    return type(caught.value), caught.value.code


def test_any_shard_and_the_folder_resolve_to_the_whole_set_in_order(folder: Path) -> None:
    whole = tuple(folder / NAME.format(n) for n in range(1, 6))
    assert find_set(folder) == whole
    for path in whole:
        assert find_set(path) == whole


def test_a_set_reads_as_one_model(folder: Path) -> None:
    shards = read_set(find_set(folder))
    assert shards.architecture == "kimi-k3"
    assert [file.name for file in shards.files] == [NAME.format(n) for n in range(1, 6)]
    assert shards.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert shards.files[0].header.tensors == ()  # metadata only, as on the hub
    assert len(shards.tensors) == shards.metadata["split.tensors.count"] == 160


def test_the_current_folder_can_be_named_without_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(find_set(Path(NAME.format(3)))) == 5
    assert len(find_set(Path())) == 5


def test_links_into_a_cache_are_followed_by_their_own_names(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = tmp_path / f"blob{number}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(blob)
    assert len(read_set(find_set(snapshot / NAME.format(2))).files) == 5


def test_a_single_file_is_a_set_of_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header([key("general.architecture", STRING, "llama")], [tensor("t", (8,), 0, 0)]) + bytes(32))
    assert find_set(path) == (path,)
    assert find_set(tmp_path) == (path,)
    assert read_set((path,)).architecture == "llama"


def test_a_projector_beside_a_model_is_no_second_model(folder: Path) -> None:
    (folder / "mmproj-BF16.gguf").write_bytes(b"GGUF")
    assert len(find_set(folder)) == 5
    assert code_of(lambda: find_set(folder / "mmproj-BF16.gguf"))[0] is UsageError


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_missing_shard_is_named_with_what_to_do(folder: Path, number: int) -> None:
    (folder / NAME.format(number)).unlink()
    with pytest.raises(IntegrityError) as caught:
        find_set(folder / NAME.format(2))
    assert caught.value.code == "missing-shard"
    assert NAME.format(number) in caught.value.message
    assert "QUANT" not in str(caught.value.hint), "a placeholder cannot be pasted"
    assert "the same folder" in str(caught.value.hint)


def test_each_wrong_path_has_its_own_error(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "nothing").mkdir()
    codes = [
        code_of(lambda name=name: find_set(tmp_path / name))  # type: ignore[misc]  # the loop's value, bound at once
        for name in ("notes.txt", "empty.gguf", "nothing", "no-such-file.gguf")
    ]
    assert len(set(codes)) == 4
    assert all(kind in {UsageError, IntegrityError} for kind, _ in codes)


def test_a_folder_of_two_models_asks_which(tmp_path: Path, folder: Path, tiny: Callable[[str], Path]) -> None:
    shutil.copytree(tiny("UD-IQ2_XXS"), folder, dirs_exist_ok=True)
    with pytest.raises(UsageError) as caught:
        find_set(folder)
    assert caught.value.code == "several-sets"
    assert "UD-IQ1_M" in (caught.value.hint or "")
    assert "UD-IQ2_XXS" in (caught.value.hint or "")
    assert len(find_set(folder / NAME.format(1))) == 5


def test_the_models_to_choose_from_are_named_so_that_they_can_be_pasted(
    tmp_path: Path, folder: Path, tiny: Callable[[str], Path]
) -> None:
    """A bare name is looked for in the current folder, and a blank in a path cuts it in two."""
    place = tmp_path / "two models"
    shutil.copytree(folder, place)
    shutil.copytree(tiny("UD-IQ2_XXS"), place, dirs_exist_ok=True)
    (place / NAME.format(1)).unlink()  # what is named must be there
    with pytest.raises(UsageError) as caught:
        find_set(place)
    words = shlex.split(str(caught.value.hint).removeprefix("name one: ").replace(",", " "))
    assert len(words) == 2
    assert words[0] == str(place / NAME.format(2))
    assert all(Path(word).is_file() for word in words)
    with pytest.raises(UsageError) as caught:
        find_set(tmp_path)
    assert shlex.quote(str(place)) in str(caught.value.hint)


def test_two_uploads_of_a_set_in_one_folder_are_refused(folder: Path) -> None:
    (folder / "Kimi-K3-UD-IQ1_M-00001-of-00006.gguf").write_bytes(b"GGUF")
    assert code_of(lambda: find_set(folder)) == (IntegrityError, "mixed-set")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_a_name_that_counts_wrong_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF" + bytes(40))
    assert code_of(lambda: find_set(tmp_path / name))[1] == "bad-shard-name"


@pytest.mark.parametrize("number", [2, 3, 4, 5])
@pytest.mark.parametrize("other", ["UD-IQ1_S", "UD-IQ2_XXS", "UD-Q4_K_XL"])
def test_a_shard_of_another_quant_under_the_right_name_is_found(
    folder: Path, tiny: Callable[[str], Path], number: int, other: str
) -> None:
    foreign = tiny(other) / NAME.format(number).replace("UD-IQ1_M", other)
    if not foreign.exists():
        pytest.skip(f"{other} has other shards")
    shutil.copy(foreign, folder / NAME.format(number))
    with pytest.raises(IntegrityError) as caught:
        read_set(find_set(folder))
    assert caught.value.code == "foreign-shard"
    assert NAME.format(number) in caught.value.message


def test_shards_in_the_wrong_order_are_found(folder: Path) -> None:
    second, third = folder / NAME.format(2), folder / NAME.format(3)
    second.rename(folder / "x")
    third.rename(second)
    (folder / "x").rename(third)
    assert code_of(lambda: read_set(find_set(folder))) == (IntegrityError, "foreign-shard")


def test_a_truncated_shard_is_found_without_reading_its_weights(folder: Path) -> None:
    path = folder / NAME.format(4)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(IntegrityError) as caught:
        read_set(find_set(folder))
    assert caught.value.code == "file-cut"
    assert path.name in caught.value.message


def test_joined_shards_are_found(folder: Path) -> None:
    first, second = folder / NAME.format(1), folder / NAME.format(2)
    first.write_bytes(first.read_bytes() + second.read_bytes())
    assert code_of(lambda: read_set(find_set(folder))) == (IntegrityError, "trailing-data")
    joined = folder.parent / "joined.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in sorted(folder.iterdir())))
    assert code_of(lambda: read_set(find_set(joined)))[0] is IntegrityError


def test_one_renamed_shard_is_no_model_of_its_own(folder: Path) -> None:
    path = (folder / NAME.format(2)).rename(folder.parent / "alone.gguf")
    assert code_of(lambda: read_set(find_set(path))) == (IntegrityError, "incomplete-set")


def table(*names: str) -> list[bytes]:
    return [tensor(name, (8,), 0, 32 * i) for i, name in enumerate(names)]


def test_tensors_that_two_shards_hold_are_found(tmp_path: Path) -> None:
    write_shards(tmp_path, [[], table("a", "b"), table("b", "c")], sizes=[0, 64, 64])
    with pytest.raises(IntegrityError) as caught:
        read_set(find_set(tmp_path))
    assert caught.value.code == "duplicate-tensor"
    assert "'b'" in caught.value.message


def test_a_count_of_tensors_that_does_not_add_up_is_found(tmp_path: Path) -> None:
    write_shards(tmp_path, [[], table("a", "b"), table("c")], sizes=[0, 64, 32])
    files = read_set(find_set(tmp_path)).files
    fewer = replace(files[1].header, tensors=files[1].header.tensors[:1])
    short = replace(files[1], header=fewer, size_bytes=files[1].size_bytes - 32)
    assert code_of(lambda: check([files[0], short, files[2]])) == (IntegrityError, "tensor-count")


def test_a_shard_of_another_architecture_is_found(tmp_path: Path) -> None:
    write_shards(tmp_path, [[], table("a")], sizes=[0, 32])
    files = read_set(find_set(tmp_path)).files
    other = dict(files[1].header.metadata) | {"general.architecture": "qwen2"}
    foreign = replace(files[1], header=replace(files[1].header, metadata=other))
    assert code_of(lambda: check([files[0], foreign])) == (IntegrityError, "foreign-shard")


def test_files_of_an_unfinished_kimi_k3_layout_are_found(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(header([key("general.architecture", STRING, "kimi-k3"), key("kimi-k3.block_count", U32, 93)]))
    with pytest.raises(IntegrityError) as caught:
        read_set(find_set(path))
    assert caught.value.code == "outdated-layout"
    assert "kimi-k3.kda.head_dim" in (caught.value.cause or "")


def test_types_that_change_from_layer_to_layer_are_no_foreign_shard(tmp_path: Path) -> None:
    """Published sets are split by size; one of their shards may hold only layers of a higher type."""
    experts = [f"blk.{i}.ffn_up_exps.weight" for i in range(9)]
    kinds = [[19] * 3, [19] * 4, [29] * 2]
    files = []
    for number, types in enumerate(kinds):
        rows = [tensor(experts.pop(), (256,), kind, 64 * i) for i, kind in enumerate(types)]
        keys = [key("general.architecture", STRING, "llama"), key("split.no", 2, number), key("split.count", 2, 3)]
        found = parse(header(keys, rows))
        assert isinstance(found, Header)
        size = found.data_offset + 64 * len(rows)
        files.append(ShardFile(name=f"{number}", size_bytes=size, header=found, header_path=tmp_path))
    check(files)


def test_no_files_are_no_model() -> None:
    assert code_of(lambda: check([]))[0] is IntegrityError
