"""Paths as people type them: ``~`` is this user's home."""

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """The path with ``~`` or ``~user`` replaced; as it is where there is no such user, so that no such file is found.

    ``Path.expanduser`` raises there, and where a container's user has no home at all.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 -- see above
