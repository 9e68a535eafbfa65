"""Models that are not K3: their own cache rule, held against the engine where it is built."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from kimigguf.engines.report import parse_report
from kimigguf.gguf_file.shards import find_set, read_set
from kimigguf.memory.flags import parse
from kimigguf.memory.ledger import Column, Component, ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.units import MIB

WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS, VOCABULARY = 256, 4, 2, 64, 512, 3, 512
EXPERTS, EXPERT_INNER, LATENT, ROPE = 4, 128, 512, 64

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention(block: str) -> Shapes:
    yield f"{block}.attn_q.weight", (WIDTH, HEADS * HEAD)
    yield f"{block}.attn_k.weight", (WIDTH, KV_HEADS * HEAD)
    yield f"{block}.attn_v.weight", (WIDTH, KV_HEADS * HEAD)
    yield f"{block}.attn_output.weight", (HEADS * HEAD, WIDTH)


def latent(block: str) -> Shapes:
    yield f"{block}.attn_q_a_norm.weight", (128,)
    yield f"{block}.attn_kv_a_norm.weight", (LATENT,)
    yield f"{block}.attn_q_a.weight", (WIDTH, 128)
    yield f"{block}.attn_q_b.weight", (128, HEADS * 192)
    yield f"{block}.attn_kv_a_mqa.weight", (WIDTH, LATENT + ROPE)
    yield f"{block}.attn_k_b.weight", (128, LATENT, HEADS)
    yield f"{block}.attn_v_b.weight", (LATENT, 128, HEADS)
    yield f"{block}.attn_output.weight", (HEADS * 128, WIDTH)


def dense(block: str) -> Shapes:
    yield f"{block}.ffn_gate.weight", (WIDTH, INNER)
    yield f"{block}.ffn_up.weight", (WIDTH, INNER)
    yield f"{block}.ffn_down.weight", (INNER, WIDTH)


def moe(block: str) -> Shapes:
    yield f"{block}.ffn_gate_inp.weight", (WIDTH, EXPERTS)
    yield f"{block}.ffn_gate_exps.weight", (WIDTH, EXPERT_INNER, EXPERTS)
    yield f"{block}.ffn_up_exps.weight", (WIDTH, EXPERT_INNER, EXPERTS)
    yield f"{block}.ffn_down_exps.weight", (EXPERT_INNER, WIDTH, EXPERTS)


def tensors(architecture: str) -> Shapes:
    yield "token_embd.weight", (WIDTH, VOCABULARY)
    yield "output_norm.weight", (WIDTH,)
    if architecture != "qwen2":  # qwen2's small models tie the head to the embedding
        yield "output.weight", (WIDTH, VOCABULARY)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (WIDTH,)
        yield f"{block}.ffn_norm.weight", (WIDTH,)
        yield from latent(block) if architecture == "deepseek2" else attention(block)
        has_experts = architecture == "qwen3moe" or (architecture == "deepseek2" and layer == LAYERS - 1)
        yield from moe(block) if has_experts else dense(block)
        if has_experts and architecture == "deepseek2":
            yield f"{block}.ffn_gate_shexp.weight", (WIDTH, EXPERT_INNER)
            yield f"{block}.ffn_up_shexp.weight", (WIDTH, EXPERT_INNER)
            yield f"{block}.ffn_down_shexp.weight", (EXPERT_INNER, WIDTH)
        if architecture == "qwen3moe":
            yield f"{block}.attn_q_norm.weight", (HEAD,)
            yield f"{block}.attn_k_norm.weight", (HEAD,)
        if architecture == "qwen2":
            yield f"{block}.attn_q.bias", (HEADS * HEAD,)
            yield f"{block}.attn_k.bias", (KV_HEADS * HEAD,)
            yield f"{block}.attn_v.bias", (KV_HEADS * HEAD,)


def keys(architecture: str) -> dict[str, int | float]:
    common: dict[str, int | float] = {
        "vocab_size": VOCABULARY, "context_length": 131_072, "embedding_length": WIDTH, "block_count": LAYERS,
        "feed_forward_length": INNER, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5, "expert_feed_forward_length": EXPERT_INNER,
    }  # fmt: skip
    if architecture in {"qwen3moe", "deepseek2"}:
        common |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if architecture == "qwen3moe":
        common |= {"attention.key_length": HEAD, "attention.value_length": HEAD}
    if architecture == "deepseek2":
        common |= {
            "attention.head_count_kv": 1, "attention.key_length": LATENT + ROPE, "attention.value_length": LATENT,
            "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.q_lora_rank": 128,
            "attention.kv_lora_rank": LATENT, "rope.dimension_count": ROPE, "leading_dense_block_count": LAYERS - 1,
            "expert_shared_count": 1, "expert_gating_func": 2,
        }  # fmt: skip
    return common


def write(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("tokenizer.ggml.model", "none")
    for key, value in keys(architecture).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, shape in tensors(architecture):
        writer.add_tensor(name, np.zeros(shape[::-1], dtype=np.float16 if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.native
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3moe", "deepseek2"])
@pytest.mark.parametrize("line", ["-c 65536 -np 2", "-c 131072 -np 1 -ctk q8_0 -ctv q8_0"])
def test_the_engine_agrees_on_weights_and_cache(native_bin: Path, tmp_path: Path, architecture: str, line: str) -> None:
    path = write(tmp_path / "m.gguf", architecture)
    arguments = [*line.split(), "-fit", "off", "--no-repack"]
    done = subprocess.run(
        [native_bin / "llama-fit-params", "-m", path, "-fitp", "on", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    engine = parse_report(done.stdout)["Host"]
    spec = ModelSpec.from_shards(read_set(find_set(path)))
    parsed = parse(arguments, spec)
    counted = ledger(spec, parsed.settings, parsed.layout)
    assert counted.total_bytes(None, column=Column.MODEL) // MIB == engine.model_bytes // MIB
    assert counted.total_bytes(None, column=Column.CONTEXT) // MIB == engine.context_bytes // MIB
    assert {row.component for row in counted.unknown} == {Component.COMPUTE}
