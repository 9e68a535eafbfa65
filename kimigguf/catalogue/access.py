"""Which hub, and with whose token: as huggingface_hub has it, but from the environment that the command was given."""

import contextlib
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from kimigguf.errors import UsageError
from kimigguf.home import from_home


def endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address without a trailing slash; HF_ENDPOINT names a mirror.

    Raises:
        UsageError: ``bad-endpoint`` where HF_ENDPOINT is no web address.
    """
    address = (environ.get("HF_ENDPOINT") or "https://huggingface.co").strip().rstrip("/")
    try:
        parts = urllib.parse.urlsplit(address)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        good = False
    if not good or not address.isprintable() or " " in address:
        raise UsageError(
            f"HF_ENDPOINT={address!r} is no web address",
            code="bad-endpoint",
            hint="unset HF_ENDPOINT to use the hub itself",
        )
    return address


def token(environ: Mapping[str, str]) -> str | None:
    """HF_TOKEN, or the login that huggingface_hub has stored."""
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    if given := (environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip():
        return given
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    path = from_home(environ.get("HF_TOKEN_PATH") or home / "token")
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8").strip() or None
    return None
