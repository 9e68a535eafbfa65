"""Paths as people type them: ``~`` is this user's home."""

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """The path with ``~`` or ``~user`` replaced; as it is where there is no such user, so that no such file is found.

    ``Path.expanduser`` raises there, and where a container's user has no home at all.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 -- see above


def whole(path: str | Path) -> Path:
    """The path from the root on, without ``.`` and ``..``, as services and links to it need it; links stay links.

    Only where a link stands before a ``..``, so that leaving both out would name another file, is it followed.
    """
    typed = from_home(path)
    plain = os.path.abspath(typed)  # noqa: PTH100 -- Path.absolute keeps .. in it
    if ".." in typed.parts and os.path.realpath(plain) != os.path.realpath(typed):
        return Path(os.path.realpath(typed))
    return Path(plain)
