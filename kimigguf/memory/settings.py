"""The settings of a run that decide its memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kimigguf.units import GIB

KV_BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
    "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
}  # fmt: skip
"""Numbers and bytes per block of each cache type (ggml's type traits)."""


class KvType(StrEnum):
    """Number format of the KV cache; K and V always use the same one (llama.cpp refuses K3 otherwise)."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"

    @property
    def is_quantized(self) -> bool:
        return KV_BLOCKS[self][0] > 1

    def row_bytes(self, width: int) -> int:
        """Bytes of ``width`` numbers, whole blocks."""
        block, block_bytes = KV_BLOCKS[self]
        return -(-width // block) * block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine is told, in tokens and bytes.

    ``context_tokens`` is the whole context, shared by ``slots`` sequences. ``repack`` lets the engine copy CPU experts
    into its own layout (anonymous memory, no paging from disk). ``checkpoints`` is context checkpoints per slot.
    ``unified_cache`` lets every slot use the whole context; otherwise each has an equal share. ``projector_bytes`` is
    the size of the vision projector's file, 0 for none. ``offload_operations`` is for real GPUs: the first one runs
    large batches of what has its weights on the host, and needs room for a copy of each in turn (RPC servers do not).
    """

    context_tokens: int = 32768
    slots: int = 1
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    kv_type: KvType = KvType.F16
    flash_attention: bool = True
    checkpoints: int = 4
    prompt_cache_bytes: int = GIB
    prompt_cache_is_capped: bool = True
    repack: bool = False
    kv_offload: bool = True
    unified_cache: bool = False
    projector_bytes: int = 0
    offload_operations: bool = False

    @property
    def streams(self) -> int:
        """Separate caches: one per slot, or one that all share."""
        return 1 if self.unified_cache else self.slots

    @property
    def stream_tokens(self) -> int:
        """Cells of each stream's cache: the context, or a slot's share of it, rounded up as llama.cpp does."""
        whole = _padded(self.context_tokens)
        return whole if self.unified_cache else _padded(whole // self.slots)

    @property
    def effective_ubatch_tokens(self) -> int:
        """Tokens of the largest physical batch: neither the batch nor the context can be smaller than it."""
        return min(self.ubatch_tokens, self.batch_tokens, self.context_tokens)


def _padded(tokens: int) -> int:
    return -(-tokens // 256) * 256
