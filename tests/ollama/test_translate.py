"""Ollama's requests in the engine's words: every field is mapped, refused, or told."""

from typing import Any

import pytest
from ollama._types import ChatRequest, EmbedRequest, GenerateRequest, Options

from kimigguf.ollama.translate import (
    Untranslatable,
    chat_request,
    embed_request,
    embeddings,
    generate_request,
)

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**body: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    wanted = chat_request({"model": "k3", "messages": HELLO, **body}, "k3", 4096)
    return wanted.body, wanted.unheeded


@pytest.mark.parametrize(
    ("ours", "theirs", "value"),
    [
        *((name, name, 0.5) for name in ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty")),
        *((name, name, 0.5) for name in ("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta")),
        *((name, name, 3) for name in ("top_k", "seed", "repeat_last_n", "mirostat")),
        ("num_keep", "n_keep", 3),
        ("num_predict", "max_tokens", 3),
        ("stop", "stop", ["a"]),
    ],
)
def test_an_option_arrives_under_the_engines_name(ours: str, theirs: str, value: object) -> None:
    body, unheeded = chat(options={ours: value})
    assert body[theirs] == value
    assert unheeded == ()


def test_no_option_that_ollamas_client_knows_is_passed_over_in_silence() -> None:
    for name in Options.model_fields:
        plain, _ = chat()
        body, unheeded = chat(options={name: 8192})
        assert body != plain or any(phrase.startswith(f"options.{name}:") for phrase in unheeded), name


@pytest.mark.parametrize(
    ("request_type", "translate"),
    [(ChatRequest, chat_request), (GenerateRequest, generate_request)],
)
def test_no_field_that_ollamas_client_knows_is_taken_for_a_stranger(request_type: Any, translate: Any) -> None:
    images = {"width", "height", "steps"}  # of models that paint
    for name in request_type.model_fields.keys() - images - {"messages", "images", "suffix", "template", "context"}:
        value = {"options": {}, "format": "json", "tools": [{"type": "function"}]}.get(name, "x")
        wanted = translate({"messages": HELLO, "prompt": "x", name: value}, "k3", 4096)
        assert not any(phrase == f"{name}: not known here" for phrase in wanted.unheeded), name
    for name in images & request_type.model_fields.keys():
        wanted = translate({"messages": HELLO, "prompt": "x", name: 5}, "k3", 4096)
        assert f"{name}: not known here" in wanted.unheeded


def test_an_embedding_needs_no_field_beyond_those_of_ollamas_client() -> None:
    body = dict.fromkeys(EmbedRequest.model_fields) | {"input": "a", "truncate": True, "keep_alive": "5m"}
    assert embed_request(body, "k3").unheeded == ()


@pytest.mark.parametrize(("asked", "told"), [(4096, False), (1024, False), (4097, True)])
def test_a_context_is_told_of_only_where_the_engine_has_less(asked: int, told: bool) -> None:
    _, unheeded = chat(options={"num_ctx": asked})
    assert unheeded == ((f"options.num_ctx: {asked} asked, the engine was started with 4096",) if told else ())


def test_no_limit_is_no_limit() -> None:
    assert "max_tokens" not in chat(options={"num_predict": -1})[0]


def test_raw_text_goes_as_it_stands_and_keeps_to_a_schema() -> None:
    schema = {"type": "object", "properties": {}}
    wanted = generate_request({"prompt": "<s>1 2", "raw": True, "system": "x", "format": schema}, "k3", None)
    assert (wanted.path, wanted.body["prompt"], wanted.body["json_schema"]) == ("/v1/completions", "<s>1 2", schema)
    assert wanted.unheeded == ("system: raw text has none",)


@pytest.mark.parametrize(
    "body",
    [{"options": 5}, {"format": 5}, {"messages": ["Hello"]}, {"messages": [{"content": "x"}]}],
    ids=["options", "format", "text-for-message", "no-role"],
)
def test_what_has_the_wrong_shape_is_refused_in_words(body: dict[str, Any]) -> None:
    with pytest.raises(Untranslatable):
        chat_request({"messages": HELLO, **body}, "k3", None)


def test_vectors_keep_their_order_and_are_cut_to_length_one() -> None:
    found = {"data": [{"index": 1, "embedding": [1.0, 0.0]}, {"index": 0, "embedding": [3.0, 4.0, 12.0]}]}
    assert embeddings(found) == [[3.0, 4.0, 12.0], [1.0, 0.0]]
    assert embeddings(found, 2) == [[0.6, 0.8], [1.0, 0.0]]
    assert embeddings({"data": [{"index": 0, "embedding": [0.0, 0.0, 1.0]}]}, 2) == [[0.0, 0.0]]
