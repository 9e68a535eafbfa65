"""The stand-in speaks Ollama's protocol: every reply here is parsed by the real client."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.ollama_store import Ollama
from ollama import Client, ResponseError


@pytest.fixture
def client(stand_in: Ollama) -> Iterator[Client]:
    with Client(host=stand_in.url, timeout=20) as opened:
        yield opened


def create(client: Client, shards: tuple[Path, ...], name: str = "kimi-k3:ud-iq1_s") -> list[str | None]:
    files = {path.name: client.create_blob(path) for path in shards}
    return [reply.status for reply in client.create(name, files=files, parameters={"num_ctx": 4096}, stream=True)]


def test_a_split_set_becomes_a_model_with_status_lines(client: Client, shards: tuple[Path, ...]) -> None:
    statuses = create(client, shards)
    assert statuses.count("parsing GGUF") == len(shards) == 4
    assert statuses[-2:] == ["writing manifest", "success"]
    listed = client.list().models[0]
    assert listed.model == "kimi-k3:ud-iq1_s"
    assert listed.size is not None
    assert listed.size >= sum(path.stat().st_size for path in shards)
    shown = client.show("kimi-k3:ud-iq1_s")
    assert shown.modelinfo == {"general.architecture": "kimi-k3"}
    assert shown.parameters is not None
    assert "num_ctx" in shown.parameters


def test_from_0_35_the_shards_are_kept_and_before_they_are_merged(
    client: Client, stand_in: Ollama, shards: tuple[Path, ...]
) -> None:
    size = sum(path.stat().st_size for path in shards)
    create(client, shards)
    assert size <= stand_in.peak_bytes < 1.01 * size + 2000
    stand_in.version = "0.34.2"
    create(client, shards, "kimi-k3:merged")
    assert 3 * size <= stand_in.peak_bytes < 3.01 * size + 2000
    client.delete("kimi-k3:ud-iq1_s")
    stand_in.restart()
    assert size <= stand_in.used_bytes() < 1.01 * size + 2000


def test_a_missing_shard_is_refused_in_ollamas_words(client: Client, shards: tuple[Path, ...]) -> None:
    with pytest.raises(ResponseError, match="has 3 shards, expected 4"):
        create(client, shards[:-1])
    assert client.list().models == []


def test_a_renamed_shard_is_refused_in_ollamas_words(client: Client, shards: tuple[Path, ...]) -> None:
    files = {path.name.replace("-of-", "_"): client.create_blob(path) for path in shards}
    with pytest.raises(ResponseError, match=r"must use llama\.cpp split filename pattern"):
        list(client.create("x", files=files, stream=True))


def test_a_blob_is_taken_once_and_only_with_its_own_digest(
    client: Client, stand_in: Ollama, shards: tuple[Path, ...]
) -> None:
    client.create_blob(shards[0])
    got = stand_in.received_bytes
    client.create_blob(shards[0])
    assert stand_in.received_bytes == got
    refused = httpx.post(f"{stand_in.url}/api/blobs/sha256:{'0' * 64}", content=b"something else")
    assert (refused.status_code, "digest mismatch" in refused.json()["error"]) == (400, True)
    assert [path.name for path in stand_in.blobs.iterdir()] == [client.create_blob(shards[0]).replace(":", "-")]


def test_a_full_disk_is_a_500_that_leaves_nothing(client: Client, stand_in: Ollama, shards: tuple[Path, ...]) -> None:
    stand_in.full_at_bytes = 10_000
    with pytest.raises((ResponseError, ConnectionError, httpx.HTTPError)):
        client.create_blob(shards[1])
    assert list(stand_in.blobs.iterdir()) == []


def test_a_chat_streams_thinking_before_content(client: Client, stand_in: Ollama, shards: tuple[Path, ...]) -> None:
    create(client, shards)
    parts = list(client.chat("kimi-k3:ud-iq1_s", [{"role": "user", "content": "Hi"}], stream=True, think=True))
    assert "".join(part.message.thinking or "" for part in parts) == stand_in.thinking
    assert "".join(part.message.content or "" for part in parts) == stand_in.content
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 40)
    assert client.ps().models[0].model == "kimi-k3:ud-iq1_s"


def test_errors_carry_their_status(client: Client, stand_in: Ollama, shards: tuple[Path, ...]) -> None:
    for call in (lambda: client.show("nobody"), lambda: client.delete("nobody"), lambda: client.chat("nobody", [])):
        with pytest.raises(ResponseError, match="not found") as error:
            call()
        assert error.value.status_code == 404
    create(client, shards)
    stand_in.capabilities = ("completion",)
    with pytest.raises(ResponseError, match="does not support thinking"):
        client.chat("kimi-k3:ud-iq1_s", [{"role": "user", "content": "Hi"}], think=True)


def test_a_copy_outlives_its_source(client: Client, shards: tuple[Path, ...]) -> None:
    create(client, shards)
    client.copy("kimi-k3:ud-iq1_s", "other")
    client.delete("kimi-k3:ud-iq1_s")
    assert [model.model for model in client.list().models] == ["other:latest"]
    assert client.chat("other", [{"role": "user", "content": "Hi"}]).message.content == "Hello."
