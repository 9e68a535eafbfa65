"""What was asked of ``serve``, as one value that can be written as arguments again."""

from dataclasses import dataclass
from pathlib import Path

from kimigguf.engines.llama_server import STALL_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. Exactly one of ``target`` and ``plan_path`` is given.

    ``context_tokens`` None: the default. ``extra`` goes to llama-server as it is.
    """

    target: str | None = None
    plan_path: Path | None = None
    engine: str = "auto"
    engine_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    context_tokens: int | None = None
    slots: int = 1
    effort: str | None = None
    agent: bool = False
    alias: str | None = None
    models_dir: Path | None = None
    no_download: bool = False
    no_selftest: bool = False
    dry_run: bool = False
    stall_timeout: float = STALL_SECONDS
    restart: str = "never"
    name: str | None = None
    extra: tuple[str, ...] = ()
    api_key_file: Path | None = None
    new_api_key: bool = False
    prefault: bool = False
    ollama_port: int | None = None

    def arguments(self, name: str) -> tuple[str, ...]:
        """What makes ``kimigguf serve`` ask for the same again, under ``name``."""
        flags: list[str] = ["--name", name]
        for flag, value in (
            ("--plan", self.plan_path),
            ("--engine", self.engine),
            ("--engine-path", self.engine_path),
            ("--host", self.host),
            ("--port", self.port),
            ("--context", self.context_tokens),
            ("--slots", self.slots if self.plan_path is None else None),  # a plan has its own
            ("--effort", self.effort),
            ("--alias", self.alias),
            ("--models-dir", self.models_dir),
            ("--api-key-file", self.api_key_file),
            ("--ollama-port", self.ollama_port),
            ("--restart", self.restart),
            ("--stall-timeout", round(self.stall_timeout)),
        ):
            flags += [] if value is None else [flag, str(value)]
        switches = {
            "--agent": self.agent,
            "--no-download": self.no_download,
            "--no-selftest": self.no_selftest,
            "--new-api-key": self.new_api_key,
            "--prefault": self.prefault,
        }
        flags += [flag for flag, on in switches.items() if on]
        flags += [] if self.target is None else [self.target]
        return (*flags, *(("--", *self.extra) if self.extra else ()))
