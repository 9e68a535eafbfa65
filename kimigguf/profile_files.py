"""Facts as data: finds, reads and validates the TOML files under ``profiles/``, a user's own before the shipped ones.

A user's ``<config>/kimigguf/profiles/<kind>/<name>.toml`` overrides the shipped file of that name;
``KIMIGGUF_PROFILES`` names another folder to look in first.
"""

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from kimigguf.errors import UsageError
from kimigguf.units import parse_size

T = TypeVar("T")
_MAX_FILE_BYTES: Final = 1 << 20


@cache
def shipped() -> Path:
    """The ``profiles`` folder of this installation: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    inside = package / "_profiles"
    return inside if inside.is_dir() else package.parent / "profiles"


def _folders(environ: Mapping[str, str]) -> list[Path]:
    from platformdirs import user_config_path  # noqa: PLC0415 -- kept out of `kimigguf --help`

    extra = [Path(environ["KIMIGGUF_PROFILES"])] if environ.get("KIMIGGUF_PROFILES") else []
    return [*extra, user_config_path("kimigguf") / "profiles", shipped()]


def names(kind: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of all profiles of a kind (``models``, ``machines``, ``serving``, ...), sorted."""
    return tuple(sorted({path.stem for folder in _folders(environ) for path in (folder / kind).glob("*.toml")}))


def find(kind: str, name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of one profile.

    Raises:
        UsageError: ``unknown-profile`` with the nearest names.
    """
    if name in (known := names(kind, environ)):  # membership first: a name is never used as a path unchecked
        return next(path for folder in _folders(environ) if (path := folder / kind / f"{name}.toml").is_file())
    nearest = get_close_matches(name, known, n=3, cutoff=0.4) or known
    raise UsageError(
        f"there is no profile {name!r} in {kind}", code="unknown-profile", hint="known: " + ", ".join(nearest)
    )


def _size(value: object) -> object:
    """Let sizes be written as "768GiB" wherever a number of bytes is expected."""
    if isinstance(value, str):
        try:
            return parse_size(value)
        except UsageError as error:
            raise ValueError(f"{error.message}; {error.hint}") from None
    return value


def _with_sizes(value: Any, key: str = "") -> Any:  # noqa: ANN401 -- walks parsed TOML, whose values are of any type
    if isinstance(value, dict):
        return {k: _with_sizes(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_sizes(v) for v in value]
    return _size(value) if key.endswith("_bytes") else value


def load(path: Path, into: type[T]) -> T:
    """Read one TOML file into a dataclass.

    Raises:
        UsageError: ``bad-profile``, naming the file, each bad key and what it should be.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large to be a profile", code="bad-profile")
        data = _with_sizes(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}", code="bad-profile", cause=error.strerror) from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8 and size errors are all ValueErrors
        raise UsageError(f"{path} is no valid TOML profile", code="bad-profile", cause=str(error)) from error
    try:
        return TypeAdapter(into).validate_python(data, extra="forbid")
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()[:8]
        )
        raise UsageError(f"{path} is no valid {into.__name__}", code="bad-profile", cause=problems) from error


def read(kind: str, name: str, into: type[T], environ: Mapping[str, str] = os.environ) -> T:
    """The profile ``name`` of a kind, the user's own before the shipped one.

    Raises:
        UsageError: ``unknown-profile`` or ``bad-profile``.
    """
    return load(find(kind, name, environ), into)
