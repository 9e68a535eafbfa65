"""Whether shards that agree in number and names could still be of different quants, or of an unfinished layout."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kimigguf.errors import IntegrityError
from kimigguf.gguf_file.header import Header
from kimigguf.gguf_file.types import type_name

if TYPE_CHECKING:
    from kimigguf.gguf_file.shards import ShardFile

_EXPERTS: Final = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.")
_LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "kimi-k3": (
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "ssm.conv_kernel",
        "kda.head_dim",
        "expert_count",
        "expert_used_count",
        "attn_res.block_size",
    )
}
"""Keys without which llama.cpp does not load an architecture (``src/models/kimi-k3.cpp``): early files lack some."""


def check_layout(header: Header, *, name: str) -> None:
    """Find files that were made before their architecture's layout was final.

    Raises:
        IntegrityError: ``outdated-layout`` with the keys that are missing.
    """
    architecture = header.architecture or ""
    keys = [f"{architecture}.{key}" for key in _LAYOUTS.get(architecture, ())]
    missing = [key for key in keys if key not in header.metadata]
    if missing:
        raise IntegrityError(
            f"{name} was made before the layout of {architecture} was final",
            code="outdated-layout",
            cause=f"it lacks {', '.join(missing)}, and llama.cpp asks for them",
            hint="fetch a newer upload: kimigguf download QUANT",
        )


def check_expert_types(files: Sequence["ShardFile"]) -> None:
    """Find a shard of another quant by the types of its experts: llama.cpp would load it without a word.

    Only in sets that were split by a number of tensors. There the same tensors lie in the same shard of every quant,
    so nothing else tells. In sets split by size, as the published ones are, another quant's shard ends at other tensors
    and is found by those; and some of them change the type from layer to layer, which looks like a foreign shard.

    Raises:
        IntegrityError: ``foreign-shard``, naming it.
    """
    lengths = [len(file.header.tensors) for file in files if file.header.tensors]
    if len(set(lengths[:-1])) > 1:
        return
    types = {file.name: _expert_types(file.header) for file in files}
    types = {name: found for name, found in types.items() if found}
    for name, found in types.items():
        others = [other for key, other in types.items() if key != name]
        if len(others) < 2:  # noqa: PLR2004 -- of two shards, nobody can say which is the foreign one
            return
        usual = frozenset.intersection(*others)
        if usual and not any(found & other for other in others):
            raise IntegrityError(
                f"{name} is from another quant than the shards beside it",
                code="foreign-shard",
                cause=f"its experts are {_names(found)}, and all the others hold {_names(usual)}",
                hint="fetch it again from the commit of the others",
            )


def _expert_types(header: Header) -> frozenset[int]:
    return frozenset(tensor.ggml_type for tensor in header.tensors if _EXPERTS.search(tensor.name))


def _names(types: Collection[int]) -> str:
    return " and ".join(sorted(type_name(number) for number in types))
