"""Write Kimi K3 at its true size without its weights: real shapes and metadata, sparse files of a few MB on disk.

Engines that read headers only (llama-fit-params) answer for it as for the real model; it cannot generate. The types
are simplified to one expert type over one trunk type per quant.

usage: python scripts/k3_skeleton.py FOLDER [--quant UD-IQ1_S] [--shard-gb 48]
"""

import argparse
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
from gguf import GGMLQuantizationType as Type

from kimigguf.catalogue.profiles import load_model

ALIGNMENT: Final = 32
QUANTS: Final = {
    "UD-IQ1_S": (Type.IQ1_S, Type.Q8_0),
    "UD-IQ1_M": (Type.IQ1_M, Type.Q8_0),
    "UD-IQ2_XXS": (Type.IQ2_XXS, Type.Q8_0),
    "UD-Q2_K_XL": (Type.Q2_K, Type.Q8_0),
    "UD-Q4_K_XL": (Type.MXFP4, Type.Q8_0),
    "UD-Q8_K_XL": (Type.MXFP4, Type.BF16),
}
"""Quant: (type of the routed experts, type of the trunk's matrices)."""

# Shapes of the published model; the metadata comes from its profile.
LAYERS, WIDTH, HEADS, VOCABULARY = 93, 7168, 96, 163_840
KDA_HEAD, KERNEL, INNER = 128, 4, 96 * 128
Q_LORA, KV_LORA, NOPE, ROPE, V_HEAD = 1536, 512, 128, 64, 128
DENSE_FF, EXPERT_FF, LATENT, EXPERTS, SHARED = 33_792, 3072, 3584, 896, 2

Scalar = str | int | float | bool
Entry = tuple[str, Scalar | Sequence[str] | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Name, shape with the fastest dimension first, type."""

    name: str
    shape: tuple[int, ...]
    kind: Type

    @property
    def size_bytes(self) -> int:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // per_block * block_bytes


def tensors(quant: str) -> Iterator[Tensor]:
    """Every tensor of the model in file order."""
    experts, trunk = QUANTS[quant]
    yield Tensor("token_embd.weight", (WIDTH, VOCABULARY), trunk)
    yield Tensor("output_norm.weight", (WIDTH,), Type.F32)
    yield Tensor("output.weight", (WIDTH, VOCABULARY), trunk)
    yield Tensor("output_res_score.weight", (WIDTH,), Type.F32)
    for i in range(LAYERS):
        shapes = {f"{part}.weight": (WIDTH,) for part in ("attn_norm", "ffn_norm", "attn_res_score", "ffn_res_score")}
        floats: dict[str, tuple[int, ...]] = dict(shapes)
        is_mla = i % 4 == 3 or i == LAYERS - 1
        more_floats, matrices = _mla() if is_mla else _kda()
        floats |= more_floats
        if i == 0:
            matrices |= {"ffn_gate.weight": (WIDTH, DENSE_FF), "ffn_up.weight": (WIDTH, DENSE_FF)}
            matrices |= {"ffn_down.weight": (DENSE_FF, WIDTH)}
        else:
            floats |= {"ffn_gate_inp.weight": (WIDTH, EXPERTS), "exp_probs_b.bias": (EXPERTS,)}
            floats |= {"ffn_routed_norm.weight": (LATENT,)}
            matrices |= {"ffn_routed_down.weight": (WIDTH, LATENT), "ffn_routed_up.weight": (LATENT, WIDTH)}
            matrices |= {f"ffn_{part}_shexp.weight": (WIDTH, SHARED * EXPERT_FF) for part in ("gate", "up")}
            matrices |= {"ffn_down_shexp.weight": (SHARED * EXPERT_FF, WIDTH)}
        yield from (Tensor(f"blk.{i}.{name}", shape, Type.F32) for name, shape in floats.items())
        yield from (Tensor(f"blk.{i}.{name}", shape, trunk) for name, shape in matrices.items())
        if i > 0:
            for part in ("gate", "up"):
                yield Tensor(f"blk.{i}.ffn_{part}_exps.weight", (LATENT, EXPERT_FF, EXPERTS), experts)
            yield Tensor(f"blk.{i}.ffn_down_exps.weight", (EXPERT_FF, LATENT, EXPERTS), experts)


Shapes = dict[str, tuple[int, ...]]


def _mla() -> tuple[Shapes, Shapes]:
    floats: Shapes = {"attn_q_a_norm.weight": (Q_LORA,), "attn_kv_a_norm.weight": (KV_LORA,)}
    matrices: Shapes = {
        "attn_q_a.weight": (WIDTH, Q_LORA),
        "attn_q_b.weight": (Q_LORA, HEADS * (NOPE + ROPE)),
        "attn_kv_a_mqa.weight": (WIDTH, KV_LORA + ROPE),
        "attn_k_b.weight": (NOPE, KV_LORA, HEADS),
        "attn_v_b.weight": (KV_LORA, V_HEAD, HEADS),
        "attn_gate.weight": (WIDTH, HEADS * V_HEAD),
        "attn_output.weight": (HEADS * V_HEAD, WIDTH),
    }
    return floats, matrices


def _kda() -> tuple[Shapes, Shapes]:
    floats: Shapes = {f"ssm_conv1d_{part}.weight": (KERNEL, 1, INNER) for part in "qkv"}
    floats |= {"ssm_a": (HEADS,), "ssm_dt.bias": (INNER,), "ssm_norm.weight": (KDA_HEAD,)}
    matrices: Shapes = {f"attn_{part}.weight": (WIDTH, INNER) for part in "qkv"}
    matrices |= {
        "ssm_f_a.weight": (WIDTH, KDA_HEAD),
        "ssm_f_b.weight": (KDA_HEAD, INNER),
        "ssm_beta.weight": (WIDTH, HEADS),
        "ssm_g.weight": (WIDTH, INNER),
        "attn_output.weight": (INNER, WIDTH),
    }
    return floats, matrices


def metadata() -> list[Entry]:
    """The keys of the first shard: the profile's, the norms' and a vocabulary of the true length."""
    architecture: list[Entry] = [
        (key, list(value) if isinstance(value, tuple) else value) for key, value in load_model().metadata.items()
    ]
    return [
        ("general.architecture", "kimi-k3"),
        ("general.name", "Kimi-K3 without weights"),
        ("general.quantization_version", 2),
        *architecture,
        ("kimi-k3.attention.layer_norm_rms_epsilon", 1e-5),
        ("kimi-k3.kda.gate_lower_bound", -5.0),
        ("kimi-k3.expert_weights_scale", 1.0),
        ("kimi-k3.expert_weights_norm", True),
        ("kimi-k3.expert_gating_func", 2),
        ("kimi-k3.activation.situ_beta", 4.0),
        ("kimi-k3.activation.situ_linear_beta", 25.0),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "kimi-k2"),
        ("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCABULARY)]),
        ("tokenizer.ggml.token_type", [1] * VOCABULARY),
        ("tokenizer.ggml.bos_token_id", VOCABULARY - 2),
        ("tokenizer.ggml.eos_token_id", VOCABULARY - 1),
    ]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Scalar | Sequence[str] | Sequence[int]) -> bytes:
    kind = gguf.GGUFValueType
    match value:
        case bool():
            return struct.pack("<I?", kind.BOOL, value)
        case int():
            return struct.pack("<II", kind.UINT32, value)
        case float():
            return struct.pack("<If", kind.FLOAT32, value)
        case str():
            return struct.pack("<I", kind.STRING) + _text(value)
        case _:
            strings = bool(value) and isinstance(value[0], str)
            head = struct.pack("<IIQ", kind.ARRAY, kind.STRING if strings else kind.INT32, len(value))
            return head + b"".join(_text(v) if isinstance(v, str) else struct.pack("<i", v) for v in value)


def _entry(key: str, value: bytes) -> bytes:
    return _text(key) + value


def _write_shard(path: Path, entries: Sequence[bytes], infos: Sequence[Tensor]) -> None:
    table, offset = [], 0
    for info in infos:
        dimensions = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape)
        table.append(_text(info.name) + dimensions + struct.pack("<IQ", info.kind, offset))
        offset += -(-info.size_bytes // ALIGNMENT) * ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(table)
    header += b"\0" * (-len(header) % ALIGNMENT)
    path.write_bytes(header)
    os.truncate(path, len(header) + offset)  # the weights are a hole


def write(folder: Path, quant: str = "UD-IQ1_S", *, shard_bytes: int = 48 * 10**9) -> list[Path]:
    """Write the shards of one quant into ``folder`` (sparse) and return them in load order."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(tensors(quant))
    shards: list[list[Tensor]] = [[], []]  # the first carries metadata only, as on the hub
    used = 0
    for info in everything:
        if used and used + info.size_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(info)
        used += info.size_bytes
    paths = []
    for number, infos in enumerate(shards):
        split = [
            _entry("split.no", struct.pack("<IH", gguf.GGUFValueType.UINT16, number)),
            _entry("split.count", struct.pack("<IH", gguf.GGUFValueType.UINT16, len(shards))),
            _entry("split.tensors.count", struct.pack("<Ii", gguf.GGUFValueType.INT32, len(everything))),
        ]
        keys = metadata() if number == 0 else [("general.architecture", "kimi-k3")]
        path = folder / f"Kimi-K3-{quant}-{number + 1:05d}-of-{len(shards):05d}.gguf"
        _write_shard(path, [*(_entry(key, _value(value)) for key, value in keys), *split], infos)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Kimi K3 at its true size without its weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="UD-IQ1_S", choices=QUANTS)
    parser.add_argument("--shard-gb", type=float, default=48.0)
    options = parser.parse_args()
    for path in write(options.folder, options.quant, shard_bytes=int(options.shard_gb * 10**9)):
        print(f"{path.stat().st_size:>18,} B apparent, {path.stat().st_blocks * 512:>10,} B on disk  {path.name}")


if __name__ == "__main__":
    main()
