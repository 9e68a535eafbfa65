"""/proc/self/mountinfo as values (its format is in proc_pid_mountinfo(5))."""

import re
from dataclasses import dataclass
from typing import Final

_FIELDS_BEFORE_DASH: Final = 6
_FIELDS_AFTER_DASH: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount. ``device`` is ``major:minor``; ``root`` the folder of the file system that is mounted."""

    device: str
    root: str
    mount_point: str
    options: tuple[str, ...]
    file_system: str
    source: str
    super_options: tuple[str, ...]


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """All mounts in their order; a line that is none is left out."""
    return tuple(mount for line in text.splitlines() if (mount := _parse_line(line)) is not None)


def _parse_line(line: str) -> Mount | None:
    left, dash, right = line.partition(" - ")
    before, after = left.split(" "), right.split(" ")
    if not dash or len(before) < _FIELDS_BEFORE_DASH or len(after) < _FIELDS_AFTER_DASH:
        return None
    return Mount(
        device=before[2],
        root=_plain(before[3]),
        mount_point=_plain(before[4]),
        options=tuple(before[5].split(",")),
        file_system=after[0],
        source=_plain(after[1]),
        super_options=tuple(after[2].split(",")),
    )


def _plain(text: str) -> str:
    r"""The kernel writes blanks, tabs, newlines and backslashes as octal: ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
