"""The running server that a command is about, and what a server that has ended left behind."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kimigguf.cli.app import App
from kimigguf.errors import UsageError

if TYPE_CHECKING:
    from kimigguf.engines.registry import Entry


def chosen_server(app: App, name: str | None) -> "Entry":
    """The server of that name, or the only one.

    Raises:
        UsageError: ``no-server``, whose hint shows what runs: who wants to stop a server does not want to start one;
            ``which-server``.
    """
    from kimigguf.engines.registry import find
    from kimigguf.engines.session import servers_folder

    try:
        return find(servers_folder(app.environ), name)
    except UsageError as error:
        if error.code != "no-server":
            raise
        raise UsageError(error.message, code=error.code, cause=error.cause, hint="kimigguf status") from error


def key_of(entry: "Entry") -> str | None:
    """A key that the server takes; None where it wants none, or its file has gone: what needs one is unknown then."""
    from kimigguf.engines.keys import read_keys

    try:
        return read_keys(Path(entry.api_key_file))[0] if entry.api_key_file else None
    except UsageError:
        return None


def last_log(app: App, name: str | None) -> Path | None:
    """The newest log of a server that has ended: of that name, or of any; None if there is none."""
    from kimigguf.engines.deaths import death_of
    from kimigguf.engines.registry import entries
    from kimigguf.engines.session import servers_folder, state_folder

    folder = state_folder(app.environ) / "logs"
    if name is None:
        pattern = "*.log"
    elif (death := death_of(servers_folder(app.environ), name)) is not None and Path(death.log).is_file():
        return Path(death.log)
    elif (told := _told(folder, name)) is not None:
        return told
    elif (port := re.search(r"-(\d+)$", name)) is not None:
        pattern = f"serve-{port[1]}-*.log"  # logs are called by the port, and so are servers that were given no name
    else:
        return None
    alive = {entry.log for entry in entries(servers_folder(app.environ))}
    ended = [path for path in folder.glob(pattern) if str(path) not in alive]
    return max(ended, key=_touched, default=None)


def _told(folder: Path, name: str) -> Path | None:
    """The log that a server in the background named in its last answer: each start of its engine adds one."""
    if "/" in name:
        return None
    try:
        text = (folder / f"{name}.out").read_text(encoding="utf-8")
        answer = json.loads(text[max(0, text.rfind("\n{\n")) :])
    except (OSError, ValueError):
        return None
    log = answer.get("log") if isinstance(answer, dict) else None
    return Path(log) if isinstance(log, str) and Path(log).is_file() else None


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since it was listed
        return 0.0
