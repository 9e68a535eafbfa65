"""What is remembered of a server that ended by itself: until it is started again, stopped, or a day has passed.

``<servers folder>/.<name>.died``, beside the entries of those that live, and none of them.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kimigguf.whole_file import write_whole

_SCHEMA: Final = "kimigguf.death/1"
_KEPT_SECONDS: Final = 24 * 3600.0
UNSEEN: Final = "its supervisor ended with it: both were killed, or the machine went down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A server that ended by itself, and ``how``, in words.

    ``noticed`` is when it was found dead, in seconds since the epoch; ``seen``: that is the moment of its end.
    ``arguments`` start it again, in ``folder``.
    """

    name: str
    how: str
    noticed: float
    seen: bool
    alias: str
    quant: str | None
    port: int
    log: str
    arguments: tuple[str, ...]
    folder: str
    schema: str = _SCHEMA


def remember(folder: Path, death: Death) -> None:
    """Keep it among the servers of ``folder``, if that can be written: of a death there is more to say than this."""
    with suppress(OSError):
        write_whole(_path(folder, death.name), (json.dumps(asdict(death), indent=1) + "\n").encode(), mode=0o600)


def forget(folder: Path, name: str) -> bool:
    """Forget the death of a server of that name; whether there was one to forget."""
    try:
        _path(folder, name).unlink()
    except OSError:
        return False
    return True


def deaths(folder: Path) -> tuple[Death, ...]:
    """Those of the last 24 hours, by name; older ones are forgotten. Of a name that lives again nothing is kept."""
    found = []
    for path in sorted(folder.glob(".*.died")):
        death = _read(path)
        if death is not None and 0 <= time.time() - death.noticed <= _KEPT_SECONDS:
            found.append(death)
        else:
            with suppress(OSError):
                path.unlink()
    return tuple(found)


def death_of(folder: Path, name: str) -> Death | None:
    """The death of the server of that name, if it died by itself in the last 24 hours."""
    return next((death for death in deaths(folder) if death.name == name), None)


def _path(folder: Path, name: str) -> Path:
    return folder / f".{name}.died"


def _read(path: Path) -> Death | None:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 -- kept out of `kimigguf --help`

    with suppress(OSError, ValidationError):
        death = TypeAdapter(Death).validate_json(path.read_bytes())
        if death.schema == _SCHEMA and path.name == f".{death.name}.died":
            return death
    return None
