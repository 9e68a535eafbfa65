"""Fake engine programs: they print what a real one prints, or fail as a real one cannot be made to on purpose."""

import sys
from pathlib import Path

DEVICES_NONE = "Available devices:\n  (none)\n"


def write_engine(
    path: Path, *, version: str = "", devices: str = DEVICES_NONE, body: bytes = b"", stream: str = "stderr"
) -> Path:
    """An executable that answers ``--version`` and ``--list-devices``; ``body`` is what its file holds besides."""
    path.parent.mkdir(parents=True, exist_ok=True)
    script = (
        f"#!{sys.executable}\nimport sys\n"
        f"if '--version' in sys.argv: sys.{stream}.write({version!r})\n"
        f"if '--list-devices' in sys.argv: sys.stdout.write({devices!r})\n"
        "if '--help' in sys.argv:\n"
        "    sys.stdout.write('--model M --cors-origins O --threads N --ssl-key-file F --ssl-cert-file F')\n"
    )
    path.write_bytes(script.encode() + b"# " + body + b"\n")
    path.chmod(0o755)
    return path


def mainline(build: int) -> str:
    """What ``--version`` of a mainline build prints."""
    return f"version: 0.5.0 (build {build}, commit 0c1e57098)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
