"""What llama.cpp's perplexity tool found between two models on one text, and the file of logits it works from. Pure."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MAGIC: Final = b"_logits_"
_HEADER: Final = struct.Struct("<8sIii")
HEADER_BYTES: Final = _HEADER.size
_NEAR_LOSSLESS: Final = 0.01
_RATIO_ODD: Final = 0.05
_NUMBER: Final = r"\s*([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with the tool's own standard error, which takes tokens for independent."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The tool's statistics over all scored tokens, teacher-forced: both models saw the same text before each token.

    Kullback-Leibler divergences are in nats, of the candidate from the reference, over the whole vocabulary;
    ``same_top`` is the share of tokens (0 to 1) where both hold the same one for the likeliest, ``probability_rms`` the
    root mean square difference of the probability of the text's own token. ``correlation`` is that of both models'
    log-probabilities.
    """

    mean: Estimate
    median: float
    percentile_99: float
    maximum: float
    same_top: Estimate
    probability_rms: Estimate
    candidate_perplexity: Estimate
    reference_perplexity: Estimate
    perplexity_ratio: Estimate
    correlation: float | None


def parse(output: str) -> Divergence | None:
    """Read the tool's closing statistics; None if they are not there, or are no numbers."""
    values: dict[str, tuple[float, ...]] = {}
    for name, (label, parts) in _LINES.items():
        pattern = rf"^{label}\s*:{_NUMBER}" + (rf"\s*±{_NUMBER}" if parts == 2 else "")  # noqa: PLR2004 -- mean and error
        found = re.search(pattern, output, re.MULTILINE)
        if found is not None:
            values[name] = tuple(map(float, found.groups()))
    correlation = values.pop("correlation", None)  # it is no number where one of the models is always equally sure
    if len(values) != len(_LINES) - 1:
        return None

    def estimate(name: str, scale: float = 1.0) -> Estimate:
        mean, error = values[name]
        return Estimate(mean=mean * scale, error=error * scale)

    return Divergence(
        mean=estimate("mean"),
        median=values["median"][0],
        percentile_99=values["percentile_99"][0],
        maximum=values["maximum"][0],
        same_top=estimate("same_top", 0.01),
        probability_rms=estimate("probability_rms", 0.01),
        candidate_perplexity=estimate("candidate_perplexity"),
        reference_perplexity=estimate("reference_perplexity"),
        perplexity_ratio=estimate("perplexity_ratio"),
        correlation=None if correlation is None else correlation[0] / 100,
    )


_LINES: Final[Mapping[str, tuple[str, int]]] = {
    "mean": (r"Mean\s+KLD", 2),
    "median": (r"Median\s+KLD", 1),
    "percentile_99": (r"99\.0%\s+KLD", 1),
    "maximum": (r"Maximum\s+KLD", 1),
    "same_top": (r"Same top p", 2),
    "probability_rms": (r"RMS Δp", 2),
    "candidate_perplexity": (r"Mean PPL\(Q\)", 2),
    "reference_perplexity": (r"Mean PPL\(base\)", 2),
    "perplexity_ratio": (r"Mean PPL\(Q\)/PPL\(base\)", 2),
    "correlation": (r"Cor\(ln\(PPL\(Q\)\), ln\(PPL\(base\)\)\)", 1),
}
"""What the tool's lines are called (llama.cpp build 11434, tools/perplexity/perplexity.cpp, ``kl_divergence``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What a file of a reference's logits says of itself."""

    context_tokens: int
    vocabulary: int
    chunks: int

    @property
    def scored_tokens(self) -> int:
        """The tool scores the second half of each chunk, so that every token has something before it."""
        return self.chunks * (self.context_tokens - 1 - self.context_tokens // 2)

    @property
    def size_bytes(self) -> int:
        """Of the whole file: 16 bits for each scored token and word of the vocabulary, and a little beside."""
        row = 2 * ((self.vocabulary + 1) // 2) + 4
        return HEADER_BYTES + 4 * self.context_tokens * self.chunks + 2 * row * self.scored_tokens


def read_header(data: bytes) -> Logits | None:
    """Read the beginning of such a file; None if it is none."""
    if len(data) < HEADER_BYTES:
        return None
    magic, context, vocabulary, chunks = _HEADER.unpack_from(data)
    if magic != _MAGIC or vocabulary <= 0 or chunks <= 0:
        return None
    return Logits(context_tokens=context, vocabulary=vocabulary, chunks=chunks)


def ratio_note(found: Divergence) -> str | None:
    """Why the perplexities differ where the distributions hardly do; None where that needs no explanation.

    The file keeps each token's logits down to 16 below the likeliest one (build 11434, ``log_softmax``): what the text
    has and the reference holds for less likely than that counts as that likely, for the reference alone.
    """
    if found.mean.mean >= _NEAR_LOSSLESS or found.perplexity_ratio.mean < 1 + _RATIO_ODD:
        return None
    return (
        "the perplexities' ratio says little here: kept logits end at a nine-millionth of the likeliest token's "
        "probability, and where the text is less likely still, only the candidate pays for it; go by the divergence"
    )


def in_words(kld: float) -> str:
    """The rough scale in use among people who quantize models."""
    for limit, words in ((_NEAR_LOSSLESS, "near lossless"), (0.05, "good"), (0.1, "noticeable")):
        if kld < limit:
            return words
    return "significant"
