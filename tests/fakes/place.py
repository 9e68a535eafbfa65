"""A home of its own with a model in it, from which a test uses ``kimigguf`` as a person would."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.engines import native_folder
from fakes.processes import ONE_THREAD, free_port, with_word


@dataclass(slots=True)
class Place:
    home: Path
    model: Path
    port: int

    def environ(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            **ONE_THREAD,
        }

    def run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kimigguf", *argv],
            env=self.environ(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def json(self, *argv: str) -> tuple[int, dict[str, Any]]:
        done = self.run(*argv, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def serve(
        self, kind: str = "embedded", *options: str, selftest: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """``serve --detach`` of the model on an engine of that kind."""
        path = () if kind == "embedded" else ("--engine-path", str(native_folder()))
        return self.run(
            "serve", str(self.model), "--json", "--engine", kind, *path, "--port", str(self.port), "--context", "4096",
            *(() if selftest else ("--no-selftest",)), "--detach", *options,
        )  # fmt: skip

    def start(self, kind: str = "embedded", *options: str, selftest: bool = False) -> dict[str, Any]:
        """Serve the model in the background; the answer once it is ready."""
        done = self.serve(kind, *options, selftest=selftest)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def status(self) -> dict[str, Any]:
        """What ``status`` says of the only server."""
        (server,) = self.json("status")[1]["servers"]
        found: dict[str, Any] = server
        return found

    def left(self) -> list[int]:
        return with_word(str(self.home))


@contextlib.contextmanager
def placed(home: Path, model: Path) -> Iterator[Place]:
    """A place that leaves no process behind."""
    place = Place(home, model, free_port())
    try:
        yield place
    finally:
        place.run("stop", "--all")
        for pid in place.left():
            os.kill(pid, signal.SIGKILL)
