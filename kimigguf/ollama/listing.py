"""What the engine says of its model, as Ollama lists and shows one. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from kimigguf.ollama.translate import Json

NO_DATE: Final = "1970-01-01T00:00:00Z"
"""The engine does not say when its file was made, and the clients want a date."""
NEVER: Final = "9999-01-01T00:00:00Z"
_LETTERS: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


def full_name(name: str) -> str:
    """The name with its tag, which is ``latest`` where none is given."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def listed(model: Mapping[str, Any]) -> Json:
    """One model of ``/v1/models`` as ``/api/tags`` lists it."""
    meta = model.get("meta") or {}
    return {
        "name": full_name(model["id"]),
        "model": full_name(model["id"]),
        "modified_at": NO_DATE,
        "size": int(meta.get("size") or 0),
        "digest": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": None,
            "parameter_size": _short(int(meta.get("n_params") or 0)),
            "quantization_level": str(meta.get("ftype") or "").removeprefix("(guessed) "),
        },
    }


def running(model: Mapping[str, Any], props: Mapping[str, Any]) -> Json:
    """The same as ``/api/ps`` lists it. What of it lies in VRAM is not known here."""
    return listed(model) | {"context_length": _context(props), "expires_at": NEVER, "size_vram": None}


def shown(model: Mapping[str, Any], props: Mapping[str, Any], *, embeds: bool) -> Json:
    """The same as ``/api/show`` answers, from the engine's ``/props`` too."""
    meta = model.get("meta") or {}
    context = _context(props)
    info = {f"kimigguf.{name}": value for name, value in meta.items()}
    if "n_params" in meta:
        info["general.parameter_count"] = meta["n_params"]
    return {
        "modelfile": f"# served by kimigguf\nFROM {props.get('model_path', model['id'])}\n",
        "parameters": f"num_ctx {context}" if context else "",
        "template": props.get("chat_template") or "",
        "modified_at": NO_DATE,
        "details": listed(model)["details"],
        "model_info": info,
        "capabilities": [*_capabilities(props.get("chat_template_caps")), *(["embedding"] if embeds else [])],
    }


def _capabilities(template: Mapping[str, bool] | None) -> list[str]:
    """By what the engine found its chat template to know; an engine that does not say serves K3, which knows both."""
    if template is None:
        return ["completion", "tools", "thinking"]
    found = ["completion"]
    if template.get("supports_tools"):
        found.append("tools")
    if template.get("supports_preserve_reasoning") or template.get("supports_reasoning_effort"):
        found.append("thinking")
    return found


def _context(props: Mapping[str, Any]) -> int | None:
    context: int | None = (props.get("default_generation_settings") or {}).get("n_ctx")
    return context


def _short(count: int) -> str:
    for size, letter in _LETTERS:
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count or "")
