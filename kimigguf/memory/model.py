"""A model as its memory sees it: layers with a kind, the bytes of their parts and of what they keep per token."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from kimigguf.catalogue.quants import ModelProfile, Quant
from kimigguf.errors import IntegrityError, UsageError
from kimigguf.gguf_file.header import SkippedArray, TensorInfo
from kimigguf.memory import kimi_k3

if TYPE_CHECKING:
    from kimigguf.gguf_file.shards import ShardSet


class Source(StrEnum):
    """Where a number comes from."""

    HEADER = "header"
    PROFILE = "profile"
    MEASURED = "measured"
    ASSUMED = "assumed"


class LayerKind(StrEnum):
    """What a layer keeps per sequence."""

    KDA = "kda"
    """Kimi Delta Attention: a recurrent state of fixed size per slot."""
    MLA = "mla"
    """Multi-head latent attention: a latent K cache that grows with the context; V is a view of it."""
    ATTENTION = "attention"
    """Ordinary (grouped-query) attention: K and V caches that grow with the context."""


class Part(StrEnum):
    """Which part of the model a tensor belongs to; llama.cpp places each by its own rule."""

    EMBEDDING = "embedding"
    HEAD = "head"
    TRUNK = "trunk"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor. ``layer`` is None outside the blocks; ``ggml_type`` is None where only the size is known."""

    name: str
    part: Part
    layer: int | None
    shape: tuple[int, ...]
    ggml_type: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block. ``trunk_bytes`` is everything in it but the routed experts, ``expert_bytes`` those.

    ``key_width`` and ``value_width`` are the numbers cached per token (0: none), ``state_bytes`` the recurrent state
    per slot, in f32 whatever the cache's type. All three are None where the architecture's own rule is not known.
    """

    index: int
    kind: LayerKind | None
    trunk_bytes: int
    expert_bytes: int
    key_width: int | None = None
    value_width: int | None = None
    state_bytes: int | None = None


Metadata: TypeAlias = Mapping[str, object]

_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_EXPERTS: Final = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
"""llama.cpp's own pattern of routed experts (``LLM_FFN_EXPS_REGEX``)."""
_INPUT: Final = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_MAX_LAYERS: Final = 4096

_ATTENTION: Final = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "qwen2moe",
        "qwen3moe",
        "mistral3",
        "glm4",
        "deepseek",
        "hunyuan-moe",
        "ernie4_5-moe",
        "dots1",
        "bailingmoe",
        "bailingmoe2",
        "granitemoe",
        "olmoe",
        "minimax-m2",
    }
)
"""Architectures whose layers all keep a plain K and V cache of the whole context."""
_LATENT: Final = frozenset({"deepseek2", "kimi-linear", "kimi-k3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All that memory depends on. Bytes are those of the files; an engine's padding is the ledger's business.

    ``metadata`` holds the scalar and short array keys of the first shard. ``weights`` are in load order.
    """

    architecture: str
    source: Source
    layers: tuple[Layer, ...]
    embedding_bytes: int
    head_bytes: int
    context_max_tokens: int | None
    weights: tuple[Weight, ...] = field(repr=False)
    metadata: Metadata = field(repr=False, hash=False)

    @property
    def weight_bytes(self) -> int:
        """All weights together."""
        return self.embedding_bytes + self.head_bytes + sum(x.trunk_bytes + x.expert_bytes for x in self.layers)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the token embedding, which an engine then keeps twice when they lie apart."""
        return not any(weight.name.startswith("output.weight") for weight in self.weights)

    @classmethod
    def from_shards(cls, shards: "ShardSet") -> "ModelSpec":
        """The model that a set of files holds, exact to the byte.

        Raises:
            IntegrityError: ``no-architecture`` or ``bad-layers`` for headers that describe no model.
        """
        if shards.architecture is None:
            raise IntegrityError("the first shard does not name its architecture", code="no-architecture")
        return _spec(
            shards.architecture,
            Source.HEADER,
            {key: value for key, value in shards.metadata.items() if not isinstance(value, SkippedArray)},
            tuple(_weight(tensor, size) for tensor, size in _sized(shards)),
        )

    @classmethod
    def from_profile(cls, profile: ModelProfile, quant: Quant) -> "ModelSpec":
        """The model as the catalogue knows it: the trunk by the architecture's shapes, experts alike in all layers.

        Raises:
            UsageError: ``no-facts`` where the catalogue lacks the keys or sizes to work it out offline.
        """
        if profile.architecture != kimi_k3.ARCHITECTURE or not profile.metadata or quant.expert_bytes is None:
            raise UsageError(
                f"the catalogue does not know enough of {quant.name} to work out its memory offline",
                code="no-facts",
                hint="name the folder of its files instead",
            )
        table = kimi_k3.tensor_table(
            profile.metadata,
            trunk_type=quant.trunk_type or "Q8_0",
            expert_type=quant.expert_type,
            size_bytes=quant.size_bytes,
            expert_bytes=quant.expert_bytes,
        )
        weights = tuple(
            Weight(name=row.name, part=part, layer=layer, shape=row.shape, ggml_type=row.ggml_type, size_bytes=row.size)
            for row in table
            for part, layer in (_place(row.name),)
        )
        return _spec(profile.architecture, Source.PROFILE, dict(profile.metadata), weights)


def _place(name: str) -> tuple[Part, int | None]:
    if block := _BLOCK.match(name):
        return (Part.EXPERTS if _EXPERTS.search(name) else Part.TRUNK), int(block[1])
    return (Part.EMBEDDING if name.startswith(_INPUT) else Part.HEAD), None


def _weight(tensor: TensorInfo, size_bytes: int) -> Weight:
    part, layer = _place(tensor.name)
    return Weight(
        name=tensor.name, part=part, layer=layer, shape=tensor.shape, ggml_type=tensor.ggml_type, size_bytes=size_bytes
    )


def _sized(shards: "ShardSet") -> Iterable[tuple[TensorInfo, int]]:
    """Every tensor with its bytes; a type that this version does not know is measured by the next tensor's offset."""
    for file in shards.files:
        header = file.header
        ends = sorted({tensor.offset for tensor in header.tensors})
        following = dict(pairwise([*ends, file.size_bytes - header.data_offset]))
        for tensor in header.tensors:
            size = tensor.size_bytes
            yield tensor, max(following[tensor.offset] - tensor.offset, 0) if size is None else size


def integer(metadata: Metadata, key: str, default: int | None = None) -> int | None:
    """The whole number under ``key``, or ``default`` where there is none."""
    value = metadata.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def per_layer(metadata: Metadata, key: str, count: int) -> tuple[int, ...] | None:
    """A key that is one number for all layers or an array with one each; None where it is neither."""
    value = metadata.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,) * count
    if isinstance(value, tuple) and len(value) >= count and all(isinstance(v, int) for v in value):
        return tuple(int(v) for v in value[:count])
    return None


def _spec(architecture: str, source: Source, metadata: Metadata, weights: tuple[Weight, ...]) -> ModelSpec:
    count = integer(metadata, f"{architecture}.block_count")
    highest = max((weight.layer for weight in weights if weight.layer is not None), default=-1)
    if count is None or not highest < count <= _MAX_LAYERS:
        raise IntegrityError(
            f"the header gives {count} layers, but its tensors reach layer {highest}",
            code="bad-layers",
            hint="the files are damaged or of different models; fetch the set again",
        )
    sums: defaultdict[tuple[Part, int | None], int] = defaultdict(int)
    for weight in weights:
        sums[weight.part, weight.layer] += weight.size_bytes
    widths = _widths(architecture, metadata, count)
    return ModelSpec(
        architecture=architecture,
        source=source,
        layers=tuple(
            Layer(
                index=index,
                kind=kind,
                trunk_bytes=sums[Part.TRUNK, index],
                expert_bytes=sums[Part.EXPERTS, index],
                key_width=key,
                value_width=value,
                state_bytes=state,
            )
            for index, (kind, key, value, state) in enumerate(widths)
        ),
        embedding_bytes=sums[Part.EMBEDDING, None],
        head_bytes=sums[Part.HEAD, None],
        context_max_tokens=integer(metadata, f"{architecture}.context_length"),
        weights=weights,
        metadata=metadata,
    )


_Widths: TypeAlias = tuple[LayerKind | None, int | None, int | None, int | None]
_UNKNOWN: Final[_Widths] = (None, None, None, None)


def _widths(architecture: str, metadata: Metadata, count: int) -> tuple[_Widths, ...]:
    """What each layer caches, by the architecture's own rule (``llama_model::create_memory`` in llama.cpp)."""
    heads = per_layer(metadata, f"{architecture}.attention.head_count", count)
    heads_kv = per_layer(metadata, f"{architecture}.attention.head_count_kv", count) or heads
    width = integer(metadata, f"{architecture}.embedding_length")
    if heads is None or heads_kv is None or width is None or architecture not in _ATTENTION | _LATENT:
        return (_UNKNOWN,) * count
    if integer(metadata, f"{architecture}.attention.sliding_window") or integer(
        metadata, f"{architecture}.nextn_predict_layers"
    ):
        return (_UNKNOWN,) * count  # windows and draft layers keep less than the rule below says
    head = width // heads[0] if heads[0] else None
    key = integer(metadata, f"{architecture}.attention.key_length", head)
    value = integer(metadata, f"{architecture}.attention.value_length", head)
    if key is None or value is None:
        return (_UNKNOWN,) * count
    latent = integer(metadata, f"{architecture}.attention.key_length_mla") is not None
    state = kda_state_bytes(architecture, metadata, heads[0])
    return tuple(_layer_widths(n, key, value, latent=latent, state=state) for n in heads_kv)


def _layer_widths(heads_kv: int, key: int, value: int, *, latent: bool, state: int | None) -> _Widths:
    if heads_kv == 0:  # how llama.cpp marks a recurrent layer of the Kimi models
        return (LayerKind.KDA, 0, 0, state) if state is not None else _UNKNOWN
    if latent:  # K holds the latent; V is a view of it and has no cache
        return LayerKind.MLA, key * heads_kv, 0, 0
    return LayerKind.ATTENTION, key * heads_kv, value * heads_kv, 0


def kda_state_bytes(architecture: str, metadata: Metadata, heads: int) -> int | None:
    """Recurrent state of one KDA layer for one sequence: three convolution windows and one matrix per head, in f32."""
    head = integer(metadata, f"{architecture}.kda.head_dim")
    window = integer(metadata, f"{architecture}.ssm.conv_kernel")
    if head is None or window is None:
        return None
    return 4 * (3 * (window - 1) * heads * head + heads * head * head)
