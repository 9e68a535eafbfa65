"""A small split GGUF set like K3's: the first shard holds metadata only. Its tensors are random; nothing can run it."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

_KEYS = {
    "block_count": 93,
    "context_length": 1_048_576,
    "embedding_length": 7168,
    "attention.head_count": 96,
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 128,
    "expert_count": 896,
    "expert_used_count": 16,
    "attn_res.block_size": 12,
}
"""Those without which a file counts as made before K3's layout was final."""


def write_set(
    folder: Path,
    *,
    name: str = "Kimi-K3-UD-IQ1_S",
    tensors: int = 3,
    size_bytes: int = 40_000,
    architecture: str = "kimi-k3",
) -> tuple[Path, ...]:
    """Write the set into ``folder`` and return its files in order; ``size_bytes`` is the size of each tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(folder / f"{name}.gguf", architecture, split_max_tensors=1, small_first_shard=True)
    for key, value in _KEYS.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array(f"{architecture}.attention.head_count_kv", [int(n % 4 == 3 or n == 92) for n in range(93)])
    random = np.random.default_rng(3)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.ffn_norm.weight", random.random(size_bytes // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tuple(sorted(folder.glob("*.gguf")))
