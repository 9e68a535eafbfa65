"""What is known of a model and its quants before anything is downloaded. Read from ``profiles/models``."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Published quality of a quant against the original. Each is None where nobody published it.

    ``kld`` is the mean Kullback-Leibler divergence per token in nats, ``top1_percent`` how often the most likely
    token is the same, ``perplexity`` on the publisher's own text.
    """

    kld: float | None = None
    top1_percent: float | None = None
    perplexity: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """What an engine must be able to do to load the files.

    ``min_build`` is mainline llama.cpp's first build that can, None where no mainline build can; ``reason`` then says
    why, and ``alternative`` what could.
    """

    min_build: int | None = None
    reason: str | None = None
    alternative: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """One quant of a model.

    ``size_bytes`` is the sum of its shards as listed at the catalogue's commit. ``expert_bytes`` and ``trunk_bytes``
    split it into routed experts and everything that every token reads (the loader takes the trunk as the rest);
    ``expert_type`` and ``trunk_type`` are the
    ggml types that dominate each. ``quality_rank`` orders the quants of a model: higher is nearer to the original.
    """

    name: str
    folder: str
    size_bytes: int
    quality_rank: int
    expert_bytes: int | None = None
    trunk_bytes: int | None = None
    expert_type: str | None = None
    trunk_type: str | None = None
    quality: Quality = Quality()
    engine: EngineNeed = EngineNeed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Where the files lie: a Hugging Face repository at one commit. ``commit`` None: no repository is endorsed."""

    id: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    name: str
    url: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginRule:
    """Addressable memory needed = download size x (1 + margin). A margin on top of the weights."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model family as ``profiles/models/NAME.toml`` describes it.

    ``metadata`` holds the GGUF keys of the architecture that decide memory (as they stand in the first shard), so that
    memory can be worked out offline; empty where they are not known. ``unsupported_reason`` says why no released
    engine runs it; None where one does.
    """

    name: str
    title: str
    architecture: str
    sources: tuple[str, ...]
    quants: tuple[Quant, ...]
    context_max_tokens: int | None = None
    repository: Repository = Repository()
    licence: Licence | None = None
    margin: MarginRule | None = None
    hosted_api: str | None = None
    metadata: Mapping[str, int | float | str | bool | tuple[int, ...]] = field(default_factory=dict)
    note: str | None = None
    unsupported_reason: str | None = None
