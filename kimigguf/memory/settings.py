"""The settings of a run that decide its memory."""

from dataclasses import dataclass
from enum import StrEnum

from kimigguf.units import GIB


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine is told, in tokens and bytes.

    ``context_tokens`` is the whole context, shared by ``slots`` sequences. ``repack`` lets the engine copy CPU experts
    into its own layout (anonymous memory, no paging from disk). ``checkpoints`` is context checkpoints per slot.
    """

    context_tokens: int = 32768
    slots: int = 1
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    kv_type: KvType = KvType.F16
    flash_attention: bool = True
    checkpoints: int = 4
    prompt_cache_bytes: int = GIB
    repack: bool = False
    kv_offload: bool = True
