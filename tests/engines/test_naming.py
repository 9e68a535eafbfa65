"""What a model without a profile is called: a server of a small Llama was ``kimi-k3-8080``, and its model ``llama``."""

from pathlib import Path

import pytest
from fakes.gguf_bytes import STRING, header, key, tensor, write_shards
from fakes.plans import make_plan

from kimigguf.engines.naming import with_alias
from kimigguf.engines.registry import check_name
from kimigguf.engines.request import Request
from kimigguf.placement.plan import PlannedFile
from kimigguf.placement.plan_file import write_plan


def model(path: Path, name: str | None, *, architecture: str = "llama") -> Path:
    keys = [key("general.architecture", STRING, architecture)]
    keys += [] if name is None else [key("general.name", STRING, name)]
    path.write_bytes(header(keys, [tensor("t", (8,), 0, 0)]) + bytes(32))
    return path


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("SmolLM2 135M Instruct", "smollm2-135m-instruct"),
        ("Qwen2.5 7B (Instruct) / v2", "qwen2.5-7b-instruct-v2"),
        ("../../etc/passwd", "etc-passwd"),
        ("モデル", "some-model.q4-1"),
        ("", "some-model.q4-1"),
        (None, "some-model.q4-1"),
    ],
)
def test_a_model_is_called_by_its_header_or_its_file_in_a_word_that_can_be_typed(
    tmp_path: Path, name: str | None, alias: str
) -> None:
    path = model(tmp_path / "Some-Model.Q4_1.gguf", name)
    assert with_alias(Request(target=str(path)), {}).alias == alias
    assert with_alias(Request(target=str(path), alias="mine"), {}).alias == "mine"


def test_the_longest_name_leaves_room_for_a_port(tmp_path: Path) -> None:
    named = with_alias(Request(target=str(model(tmp_path / "m.gguf", "word " * 40))), {})
    check_name(f"{named.alias}-65535")


def test_shards_are_called_by_what_they_share(tmp_path: Path) -> None:
    write_shards(tmp_path, [[tensor("a", (8,), 0, 0)], [tensor("b", (8,), 0, 0)]], sizes=(32, 32), name="Big_One")
    for target in (tmp_path, tmp_path / "Big_One-00002-of-00002.gguf"):
        assert with_alias(Request(target=str(target)), {}).alias == "big-one"


def test_a_replayed_plan_calls_the_model_as_its_files_do(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf", "My Model")
    files = (PlannedFile(name=path.name, size_bytes=path.stat().st_size),)
    write_plan(make_plan(architecture="llama", folder=tmp_path, files=files), tmp_path / "plan.json")
    assert with_alias(Request(plan_path=tmp_path / "plan.json"), {}).alias == "my-model"


def test_kimi_k3_keeps_the_name_of_its_profile(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf", "Kimi K3 by somebody", architecture="kimi-k3")
    assert with_alias(Request(target=str(path)), {}).alias is None
    assert with_alias(Request(target="UD-IQ1_M"), {}).alias is None


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_files_that_cannot_be_read_are_left_to_what_needs_them(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    for request in (Request(target=str(path)), Request(plan_path=path)):
        assert with_alias(request, {}) == request
