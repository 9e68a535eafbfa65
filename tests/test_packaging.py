"""What `pip install .` gives is whole: the command, the types, and the facts."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_carries_the_command_and_every_profile(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "kimigguf = kimigguf.cli.app:main" in entry_points
    assert "kimigguf/py.typed" in names
    assert {f"kimigguf/probe/{name}" for name in ("page.html", "compare.html", "report.schema.json")} <= names
    shipped = {path.relative_to(ROOT / "profiles").as_posix() for path in (ROOT / "profiles").rglob("*.toml")}
    assert shipped
    assert {f"kimigguf/_profiles/{name}" for name in shipped} <= names
