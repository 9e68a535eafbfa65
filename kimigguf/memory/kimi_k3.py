"""Kimi K3's tensors by its published shapes, so that a quant's memory is known before a header is at hand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kimigguf.errors import UsageError
from kimigguf.gguf_file.types import TENSOR_TYPES, tensor_bytes

ARCHITECTURE: Final = "kimi-k3"

_TYPES: Final = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_HEADER_BYTES: Final = 7_200_000
"""What a set holds beside tensors: the tokenizer in the first shard (6.9 MB) and the tensor tables of the others."""
_TOLERANCE_BYTES: Final = 160 << 20
"""Published expert sizes are rounded to 0.1 GiB; a sum by shapes that is nearer than this is taken as the exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor: ``shape`` has the fastest dimension first, ``size`` is in bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int | None
    size: int


def tensor_table(
    metadata: Mapping[str, object], *, trunk_type: str, expert_type: str | None, size_bytes: int, expert_bytes: int
) -> tuple[Row, ...]:
    """All tensors of a quant whose download is ``size_bytes``, of which experts are about ``expert_bytes``.

    The trunk's sizes follow from its shapes and type. Experts take what the download leaves, evenly over the layers;
    where that contradicts the published sum by more than its rounding, the published sum is believed.

    Raises:
        UsageError: ``no-facts`` for a trunk type or keys that are not known here.
    """
    try:
        shapes = tuple(_shapes(metadata, trunk_type))
        trunk = {name: _size(shape, kind) for name, shape, kind in shapes if kind is not None}
    except (KeyError, TypeError) as error:
        raise UsageError("the profile lacks facts about K3's tensors", code="no-facts", cause=f"{error}") from error
    experts = [name for name, _, kind in shapes if kind is None]
    rest = size_bytes - _HEADER_BYTES - sum(trunk.values())
    total = rest if abs(rest - expert_bytes) < _TOLERANCE_BYTES else expert_bytes
    number = _TYPES.get(expert_type or "")
    return tuple(
        Row(name=name, shape=shape, ggml_type=number, size=total // len(experts))
        if kind is None
        else Row(name=name, shape=shape, ggml_type=_TYPES[kind], size=trunk[name])
        for name, shape, kind in shapes
    )


def _size(shape: tuple[int, ...], kind: str) -> int:
    return tensor_bytes(_TYPES[kind], shape) or 0


def _shapes(metadata: Mapping[str, object], trunk: str) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
    """Name, shape and type of every tensor, in the files' order; type None marks routed experts."""

    def number(key: str) -> int:
        value = metadata[f"{ARCHITECTURE}.{key}"]
        if not isinstance(value, int):
            raise TypeError(f"{key} is {value!r}")
        return value

    kinds = metadata[f"{ARCHITECTURE}.attention.head_count_kv"]
    if not isinstance(kinds, tuple):
        raise TypeError(f"head_count_kv is {kinds!r}")
    width, vocabulary = number("embedding_length"), number("vocab_size")
    yield "token_embd.weight", (width, vocabulary), trunk
    yield "output_norm.weight", (width,), "F32"
    yield "output.weight", (width, vocabulary), trunk
    yield "output_res_score.weight", (width,), "F32"
    for index, heads_kv in enumerate(kinds):
        block = f"blk.{index}."
        for name in ("attn_norm", "ffn_norm", "attn_res_score", "ffn_res_score"):
            yield f"{block}{name}.weight", (width,), "F32"
        attention = _kda if heads_kv == 0 else _mla
        for name, shape, kind in (
            *attention(number, trunk),
            *(_dense if index < number("leading_dense_block_count") else _moe)(number, trunk),
        ):
            yield block + name, shape, kind


_Named: TypeAlias = tuple[str, tuple[int, ...], str | None]
Number: TypeAlias = Callable[[str], int]


def _kda(number: Number, trunk: str) -> Iterator[_Named]:
    width, heads, head = number("embedding_length"), number("attention.head_count"), number("kda.head_dim")
    inner = heads * head
    for which in "qkv":
        yield f"ssm_conv1d_{which}.weight", (number("ssm.conv_kernel"), 1, inner), "F32"
        yield f"attn_{which}.weight", (width, inner), trunk
    yield "ssm_f_a.weight", (width, head), trunk
    yield "ssm_f_b.weight", (head, inner), trunk
    yield "ssm_beta.weight", (width, heads), "F32" if trunk == "Q8_0" else trunk  # the publisher does not quantize it
    yield "ssm_a", (heads,), "F32"
    yield "ssm_dt.bias", (inner,), "F32"
    yield "ssm_g.weight", (width, inner), trunk
    yield "ssm_norm.weight", (head,), "F32"
    yield "attn_output.weight", (inner, width), trunk


def _mla(number: Number, trunk: str) -> Iterator[_Named]:
    width, heads = number("embedding_length"), number("attention.head_count")
    query, latent = number("attention.q_lora_rank"), number("attention.kv_lora_rank")
    key, value = number("attention.key_length_mla"), number("attention.value_length_mla")
    rope = number("rope.dimension_count")
    yield "attn_q_a_norm.weight", (query,), "F32"
    yield "attn_kv_a_norm.weight", (latent,), "F32"
    yield "attn_q_a.weight", (width, query), trunk
    yield "attn_q_b.weight", (query, heads * key), trunk
    yield "attn_kv_a_mqa.weight", (width, latent + rope), trunk
    yield "attn_k_b.weight", (key - rope, latent, heads), trunk
    yield "attn_v_b.weight", (latent, value, heads), trunk
    yield "attn_gate.weight", (width, heads * value), trunk
    yield "attn_output.weight", (heads * value, width), trunk


def _dense(number: Number, trunk: str) -> Iterator[_Named]:
    width, inner = number("embedding_length"), number("feed_forward_length")
    yield "ffn_gate.weight", (width, inner), trunk
    yield "ffn_up.weight", (width, inner), trunk
    yield "ffn_down.weight", (inner, width), trunk


def _moe(number: Number, trunk: str) -> Iterator[_Named]:
    width, latent = number("embedding_length"), number("expert_latent_length")
    experts, inner = number("expert_count"), number("expert_feed_forward_length")
    shared = inner * number("expert_shared_count")
    yield "ffn_gate_inp.weight", (width, experts), "F32"
    yield "exp_probs_b.bias", (experts,), "F32"
    yield "ffn_gate_exps.weight", (latent, inner, experts), None
    yield "ffn_up_exps.weight", (latent, inner, experts), None
    yield "ffn_down_exps.weight", (inner, latent, experts), None
    yield "ffn_routed_down.weight", (width, latent), trunk
    yield "ffn_routed_up.weight", (latent, width), trunk
    yield "ffn_routed_norm.weight", (latent,), "F32"
    yield "ffn_gate_shexp.weight", (width, shared), trunk
    yield "ffn_up_shexp.weight", (width, shared), trunk
    yield "ffn_down_shexp.weight", (shared, width), trunk
