"""A small split GGUF set like K3's: the first shard holds metadata only. Its tensors are random; nothing can run it."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter


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
    writer.add_uint32(f"{architecture}.block_count", 93)
    writer.add_uint32(f"{architecture}.context_length", 1_048_576)
    random = np.random.default_rng(3)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.ffn_norm.weight", random.random(size_bytes // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tuple(sorted(folder.glob("*.gguf")))
