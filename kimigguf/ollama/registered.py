"""What a model that Ollama has is made of, read from its manifest where this user may.

Ollama keeps ``manifests/HOST/OWNER/MODEL/TAG`` beside its blobs: the layers by their kind and digest. Source:
https://github.com/ollama/ollama/blob/main/manifest/manifest.go.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_HOST: Final = "registry.ollama.ai"
_OWNER: Final = "library"
_KIND: Final = "application/vnd.ollama.image."
_MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The digests of a model's weights, in order, its parameters and its licence. Nothing else is set in it."""

    weights: tuple[str, ...]
    parameters: Mapping[str, Any]
    licence: str | None

    def is_this(self, weights: Sequence[str], parameters: Mapping[str, Any], licence: str | None) -> bool:
        """Whether it is what would be registered; the order of the weights is not Ollama's to tell."""
        same = sorted(self.weights) == sorted(weights)
        return same and dict(self.parameters) == dict(parameters) and self.licence == licence


def registered(models: Path, name: str) -> Registered | None:
    """What ``name``, with its tag, is made of; None where that cannot be read, or holds more than is put there."""
    model, _, tag = name.rpartition(":")
    parts = model.split("/")
    path = models.joinpath("manifests", *[_HOST, _OWNER][: 3 - len(parts)], *parts, tag)
    try:
        layers = json.loads(path.read_bytes()[:_MOST_BYTES])["layers"]
        kinds = [(str(layer["mediaType"]).removeprefix(_KIND), str(layer["digest"])) for layer in layers]
        texts = {kind: _blob(models, digest) for kind, digest in kinds if kind in {"params", "license"}}
        parameters = json.loads(texts.get("params", "{}"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # A template is Ollama's own finding in the file: it is no sign that somebody has set one.
    if any(kind not in {"model", "params", "license", "template"} for kind, _ in kinds):
        return None
    return Registered(
        weights=tuple(digest for kind, digest in kinds if kind == "model"),
        parameters=parameters,
        licence=texts.get("license"),
    )


def _blob(models: Path, digest: str) -> str:
    return (models / "blobs" / digest.replace(":", "-", 1)).read_bytes()[:_MOST_BYTES].decode()
