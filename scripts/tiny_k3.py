"""Write a tiny Kimi K3 of random weights that real engines load and chat with.

The architecture is the real one (KDA and MLA layers, attention residuals, latent experts, the kimi-k2 tokenizer's
byte alphabet, K3's chat format), the names and the shards as on the hub: the first shard carries metadata only. What
it says is noise, always in printable ASCII.

usage: python scripts/tiny_k3.py FOLDER [--quant UD-IQ1_M] [--seed 7] [--tensors-per-shard 48]
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

ARCHITECTURE: Final = "kimi-k3"
LAYERS, EXPERTS, EXPERTS_USED = 6, 8, 2
WIDTH, HEADS, KDA_HEAD, KERNEL = 256, 4, 64, 4
Q_LORA, KV_LORA, NOPE, ROPE, V_HEAD = 64, 64, 48, 16, 64
DENSE_FF, EXPERT_FF, LATENT = 512, 256, 256
CONTEXT = 131_072
MLA_LAYERS: Final = frozenset(i for i in range(LAYERS) if i % 4 == 3 or i == LAYERS - 1)

EXPERT_TYPES: Final[Mapping[str, Type]] = {
    "UD-IQ1_S": Type.IQ1_S,
    "UD-IQ1_M": Type.IQ1_M,
    "UD-IQ2_XXS": Type.IQ2_XXS,
    "UD-Q2_K_XL": Type.IQ2_XXS,
    "UD-Q4_K_XL": Type.MXFP4,
    "UD-Q8_K_XL": Type.MXFP4,
}
"""The routed experts' type by quant; the real UD-Q2_K_XL mixes several and contains no Q2_K either."""

CONTROL_TOKENS: Final = (
    "[BOS]", "[EOS]", "[PAD]", "[UNK]", "[EOT]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>",
)  # fmt: skip
WORDS: Final = (
    " the", " of", " and", " to", " in", " is", " a", " model", " expert", " memory", " kimi", "hello", " world",
    "message", " role", "user", "assistant", "system", "think", "response", "tools", "call", "argument", "type",
)  # fmt: skip


class Vocabulary:
    """A byte-level vocabulary: 256 bytes, a few words, and K3's control tokens."""

    def __init__(self) -> None:
        alphabet = _byte_alphabet()
        words = ["".join(alphabet[byte] for byte in word.encode()) for word in WORDS]
        self.tokens = [*alphabet, *words, *CONTROL_TOKENS]
        self.types = [gguf.TokenType.NORMAL] * (256 + len(words)) + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
        # Only these may win, so that a terminal can show whatever is said.
        self.printable = [*range(32, 127), *range(256, 256 + len(words))]
        while len(self.tokens) % 32:
            self.tokens.append(f"[UNUSED{len(self.tokens)}]")
            self.types.append(gguf.TokenType.UNUSED)

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


class Tensors:
    """Draws tensors in the file's shapes (fastest dimension first) and hands them to the writer."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def random(self, name: str, *shape: int, kind: Type = Type.Q8_0, spread: float | None = None) -> None:
        spread = shape[0] ** -0.5 if spread is None else spread
        if kind in _RANDOM_BLOCKS:
            self._writer.add_tensor(name, self._blocks(shape, kind), raw_dtype=kind)
            return
        self.put(name, self._rng.normal(0, spread, size=shape[::-1]), kind)

    def back(self, name: str, inner: int) -> None:
        """A matrix back into the residual stream, whose first value (see ``embedding``) it leaves alone."""
        rows = self._rng.normal(0, inner**-0.5, size=(WIDTH, inner))
        rows[0] = 0
        self.put(name, rows, Type.Q8_0)

    def vector(self, name: str, size: int, *, spread: float) -> None:
        self.random(name, size, kind=Type.F32, spread=spread)

    def ones(self, name: str, size: int) -> None:
        self.put(name, np.ones(size), Type.F32)

    def decay(self, name: str, size: int) -> None:
        """-exp(x): a KDA layer's decay is always negative."""
        self.put(name, -np.exp(self._rng.normal(0, 0.3, size)), Type.F32)

    def embedding(self, name: str, vocabulary: Vocabulary) -> None:
        """Random rows that agree in their first value, which the head holds against unprintable tokens."""
        rows = self._rng.normal(0, 1, size=(len(vocabulary.tokens), WIDTH))
        rows[:, 0] = 8
        self.put(name, rows, Type.Q8_0)

    def head(self, name: str, vocabulary: Vocabulary) -> None:
        """Random rows for printable tokens; the others' logits are far below, so that sampling avoids them too."""
        rows = np.zeros((len(vocabulary.tokens), WIDTH))
        rows[:, 0] = -16
        rows[vocabulary.printable] = self._rng.normal(0, 2 * WIDTH**-0.5, size=(len(vocabulary.printable), WIDTH))
        rows[vocabulary.printable, 0] = 0
        self.put(name, rows, Type.Q8_0)

    def put(self, name: str, values: NDArray[np.floating[Any]], kind: Type) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        if kind is Type.F32:
            self._writer.add_tensor(name, values)
        else:
            self._writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def _blocks(self, shape: tuple[int, ...], kind: Type) -> NDArray[np.uint8]:
        """Random valid blocks of a type that numpy cannot quantize to, each with a small positive scale."""
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        *rows, width = shape[::-1]
        count = int(np.prod(rows)) * width // per_block
        blocks = self._rng.integers(0, 256, size=(count, block_bytes), dtype=np.uint8)
        _RANDOM_BLOCKS[kind](blocks)
        return blocks.reshape(*rows, width // per_block * block_bytes)


_SCALE: Final = np.array([0.002], dtype=np.float16).view(np.uint16)[0]


def _scale_first(blocks: NDArray[np.uint8]) -> None:
    blocks[:, :2] = np.array([_SCALE], dtype=np.uint16).view(np.uint8)


def _scale_in_nibbles(blocks: NDArray[np.uint8]) -> None:
    """IQ1_M has no scale of its own: its four 16-bit sub-scales carry it in their top four bits, lowest first."""
    scales = np.ascontiguousarray(blocks[:, -8:]).view(np.uint16)
    for i in range(4):
        scales[:, i] = (scales[:, i] & 0x0FFF) | (((int(_SCALE) >> (4 * i)) & 0xF) << 12)
    blocks[:, -8:] = scales.view(np.uint8)


_RANDOM_BLOCKS: Final = {Type.IQ1_S: _scale_first, Type.IQ2_XXS: _scale_first, Type.IQ1_M: _scale_in_nibbles}


def _metadata(writer: gguf.GGUFWriter, vocabulary: Vocabulary, quant: str) -> None:
    writer.add_type("model")
    writer.add_name(f"Kimi K3 tiny random {quant}")
    writer.add_quantization_version(2)
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(DENSE_FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([int(i in MLA_LAYERS) for i in range(LAYERS)])  # 0 marks a KDA layer
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_q_lora_rank(Q_LORA)
    writer.add_kv_lora_rank(KV_LORA)
    writer.add_key_length(KV_LORA + ROPE)
    writer.add_value_length(KV_LORA)
    writer.add_key_length_mla(NOPE + ROPE)
    writer.add_value_length_mla(V_HEAD)
    writer.add_rope_dimension_count(ROPE)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(EXPERT_FF)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(value=True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for key, number in {"kda.head_dim": KDA_HEAD, "expert_latent_length": LATENT, "attn_res.block_size": 2}.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    for key, real in {
        "kda.gate_lower_bound": -5.0,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 4.0,
    }.items():
        writer.add_float32(f"{ARCHITECTURE}.{key}", real)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(vocabulary.id_of("[BOS]"))
    writer.add_eos_token_id(vocabulary.id_of("<|end_of_msg|>"))
    writer.add_pad_token_id(vocabulary.id_of("[PAD]"))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8"))


def _kda(tensors: Tensors, block: str) -> None:
    inner = HEADS * KDA_HEAD
    for part in "qkv":
        tensors.random(f"{block}.ssm_conv1d_{part}.weight", KERNEL, 1, inner, 1, kind=Type.F32, spread=0.5)
        tensors.random(f"{block}.attn_{part}.weight", WIDTH, inner)
    tensors.random(f"{block}.ssm_f_a.weight", WIDTH, KDA_HEAD)
    tensors.random(f"{block}.ssm_f_b.weight", KDA_HEAD, inner)
    tensors.random(f"{block}.ssm_beta.weight", WIDTH, HEADS)
    tensors.decay(f"{block}.ssm_a", HEADS)
    tensors.vector(f"{block}.ssm_dt.bias", inner, spread=0.1)
    tensors.random(f"{block}.ssm_g.weight", WIDTH, inner)
    tensors.ones(f"{block}.ssm_norm.weight", KDA_HEAD)
    tensors.back(f"{block}.attn_output.weight", inner)


def _mla(tensors: Tensors, block: str) -> None:
    tensors.ones(f"{block}.attn_q_a_norm.weight", Q_LORA)
    tensors.ones(f"{block}.attn_kv_a_norm.weight", KV_LORA)
    tensors.random(f"{block}.attn_q_a.weight", WIDTH, Q_LORA)
    tensors.random(f"{block}.attn_q_b.weight", Q_LORA, HEADS * (NOPE + ROPE))
    tensors.random(f"{block}.attn_kv_a_mqa.weight", WIDTH, KV_LORA + ROPE)
    tensors.random(f"{block}.attn_k_b.weight", NOPE, KV_LORA, HEADS, kind=Type.F16)
    tensors.random(f"{block}.attn_v_b.weight", KV_LORA, V_HEAD, HEADS)
    tensors.random(f"{block}.attn_gate.weight", WIDTH, HEADS * V_HEAD)
    tensors.back(f"{block}.attn_output.weight", HEADS * V_HEAD)


def _feed_forward(tensors: Tensors, block: str, experts: Type) -> None:
    tensors.random(f"{block}.ffn_gate_inp.weight", WIDTH, EXPERTS, kind=Type.F32)
    tensors.vector(f"{block}.exp_probs_b.bias", EXPERTS, spread=0.01)
    tensors.random(f"{block}.ffn_gate_exps.weight", LATENT, EXPERT_FF, EXPERTS, kind=experts)
    tensors.random(f"{block}.ffn_up_exps.weight", LATENT, EXPERT_FF, EXPERTS, kind=experts)
    tensors.random(f"{block}.ffn_down_exps.weight", EXPERT_FF, LATENT, EXPERTS, kind=experts)
    tensors.random(f"{block}.ffn_routed_down.weight", WIDTH, LATENT)
    tensors.back(f"{block}.ffn_routed_up.weight", LATENT)
    tensors.ones(f"{block}.ffn_routed_norm.weight", LATENT)
    tensors.random(f"{block}.ffn_gate_shexp.weight", WIDTH, EXPERT_FF)
    tensors.random(f"{block}.ffn_up_shexp.weight", WIDTH, EXPERT_FF)
    tensors.back(f"{block}.ffn_down_shexp.weight", EXPERT_FF)


def write(folder: Path, *, quant: str = "UD-IQ1_M", seed: int = 7, tensors_per_shard: int = 48) -> list[Path]:
    """Write the shards of one tiny quant into ``folder`` and return them in load order.

    Names are the hub's, ``Kimi-K3-<quant>-0000N-of-000MM.gguf``. The same arguments write the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, experts = Vocabulary(), EXPERT_TYPES[quant]
    writer = gguf.GGUFWriter(
        folder / f"Kimi-K3-{quant}.gguf", ARCHITECTURE, split_max_tensors=tensors_per_shard, small_first_shard=True
    )
    _metadata(writer, vocabulary, quant)
    tensors = Tensors(writer, seed)
    tensors.embedding("token_embd.weight", vocabulary)
    tensors.ones("output_norm.weight", WIDTH)
    tensors.head("output.weight", vocabulary)
    tensors.vector("output_res_score.weight", WIDTH, spread=0.05)
    for i in range(LAYERS):
        block = f"blk.{i}"
        for part in ("attn", "ffn"):
            tensors.ones(f"{block}.{part}_norm.weight", WIDTH)
            tensors.vector(f"{block}.{part}_res_score.weight", WIDTH, spread=0.05)
        (_mla if i in MLA_LAYERS else _kda)(tensors, block)
        if i == 0:
            tensors.random(f"{block}.ffn_gate.weight", WIDTH, DENSE_FF)
            tensors.random(f"{block}.ffn_up.weight", WIDTH, DENSE_FF)
            tensors.back(f"{block}.ffn_down.weight", DENSE_FF)
        else:
            _feed_forward(tensors, block, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"Kimi-K3-{quant}-*-of-*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Kimi K3 of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="UD-IQ1_M", choices=EXPERT_TYPES)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tensors-per-shard", type=int, default=48)
    options = parser.parse_args()
    for path in write(
        options.folder, quant=options.quant, seed=options.seed, tensors_per_shard=options.tensors_per_shard
    ):
        print(f"{path.stat().st_size:>12,} B  {path.name}")


if __name__ == "__main__":
    main()
