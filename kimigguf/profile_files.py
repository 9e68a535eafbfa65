"""Facts as data: finds, reads and validates the TOML files under ``profiles/``, a user's own before the shipped ones.

A user's ``<config>/kimigguf/profiles/<kind>/<name>.toml`` overrides the shipped file of that name;
``KIMIGGUF_PROFILES`` names another folder to look in first.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from kimigguf.errors import UsageError
from kimigguf.units import parse_size

T = TypeVar("T")
_MAX_FILE_BYTES: Final = 1 << 20
_ALIKE: Final = 0.6
"""From this share of equal letters on a name is one that may have been meant."""
_SHOWN: Final = 8
_LISTED_BY: Final[Mapping[str, str]] = {"machines": "kimigguf machine list shows them all"}
_IN_WORDS: Final[Mapping[str, str]] = {
    "missing": "has to be there",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "bool_type": "should be true or false",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "dict_type": "should be a table",
    "mapping_type": "should be a table",
    "dataclass_type": "should be a table",
}
"""What pydantic's kinds of error say in the words of TOML."""


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


def own_folder(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's own profiles of a kind lie, and new ones are written."""
    return _folders(environ)[0] / kind


def names(kind: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of all profiles of a kind (``models``, ``machines``, ``serving``, ...), sorted."""
    return tuple(sorted({path.stem for folder in _folders(environ) for path in _files(folder / kind)}))


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.glob("*.toml"))
    except PermissionError:  # `sudo -u` leaves HOME with another user, whose profiles are then not this one's
        return []


def find(kind: str, name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of one profile.

    Raises:
        UsageError: ``unknown-profile`` with the nearest names.
    """
    if name in (known := names(kind, environ)):  # membership first: a name is never used as a path unchecked
        return next(path for folder in _folders(environ) for path in _files(folder / kind) if path.stem == name)
    raise UsageError(
        f"there is no profile {name!r} in {kind}", code="unknown-profile", hint=_those_like(kind, name, known)
    )


def _those_like(kind: str, name: str, known: tuple[str, ...]) -> str:
    """The names that look or begin like ``name``, or some of all and where the rest are."""

    def likeness(candidate: str) -> float:
        # Of a long name people know a word or the beginning.
        parts = (candidate, candidate[: len(name)], *candidate.split("-"))
        return max(SequenceMatcher(a=name.lower(), b=part).ratio() for part in parts)

    scores = {candidate: likeness(candidate) for candidate in known}
    near = sorted((one for one in known if scores[one] >= _ALIKE), key=lambda one: -scores[one])
    shown = near[:_SHOWN] or known[:_SHOWN]
    rest = len(known) - len(shown)
    where = _LISTED_BY.get(kind, f"{shipped() / kind} has them all")
    return f"{'nearest' if near else 'known'}: {', '.join(shown)}" + (f"; {where}" if rest else "")


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


def load(path: Path, into: type[T], *, what: str = "profile") -> T:
    """Read one TOML file into a dataclass; ``what`` is how such a file is called to people.

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
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {_in_words(one['type'], one['msg'], into, one['loc'])}"
            for one in error.errors()[:8]
        )
        raise UsageError(f"{path} is no valid {what}", code="bad-profile", cause=problems) from error


def _in_words(kind: str, message: str, into: type, place: tuple[int | str, ...]) -> str:
    """One problem as the writer of a TOML file may read it: without Python's names for things."""
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        allowed = _keys(into, place[:-1])
        near = get_close_matches(str(place[-1]), allowed, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"no such key; there may be {', '.join(allowed)}{meant}"
    return _IN_WORDS.get(kind) or message.removeprefix("Input ").removeprefix("Value error, ")


def _keys(into: type, place: tuple[int | str, ...]) -> list[str]:
    """The keys that a table may have: the fields of the dataclass at ``place`` in another."""
    here: Any = into
    for step in place:
        if isinstance(step, str) and here is not None:
            here = _dataclass_in(get_type_hints(here).get(step))
    return [] if here is None else [field.name for field in fields(here)]


def _dataclass_in(hint: object) -> type | None:
    """The dataclass that a field holds, be it one, many or perhaps none of it."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next((found for inner in get_args(hint) if (found := _dataclass_in(inner))), None)


def read(kind: str, name: str, into: type[T], environ: Mapping[str, str] = os.environ) -> T:
    """The profile ``name`` of a kind, the user's own before the shipped one.

    Raises:
        UsageError: ``unknown-profile`` or ``bad-profile``.
    """
    return load(find(kind, name, environ), into)
