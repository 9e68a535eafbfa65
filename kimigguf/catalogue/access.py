"""Which hub, and with whose token: as huggingface_hub has it, but from the environment that the command was given."""

import contextlib
from collections.abc import Mapping
from pathlib import Path


def endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address without a trailing slash; HF_ENDPOINT names a mirror."""
    return (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def token(environ: Mapping[str, str]) -> str | None:
    """HF_TOKEN, or the login that huggingface_hub has stored."""
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    if given := (environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip():
        return given
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8").strip() or None
    return None
