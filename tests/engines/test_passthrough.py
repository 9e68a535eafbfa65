"""What may be handed on to llama-server: everything but what would undo the plan's safety."""

import subprocess

import pytest
from fakes.engines import native_folder

from kimigguf.engines.engine import EngineKind
from kimigguf.engines.passthrough import _REASONS, check_extra
from kimigguf.errors import UsageError


@pytest.mark.parametrize(
    "extra", [("--threads", "32"), ("--numa", "distribute"), ("--temp", "0.6"), ("--reasoning-budget", "4096"), ()]
)
def test_harmless_arguments_are_let_through(extra: tuple[str, ...]) -> None:
    check_extra(extra, EngineKind.LLAMA_SERVER)  # raises nothing


@pytest.mark.parametrize(
    "flag",
    ["-ngl", "--fit", "-ctk", "--cpu-moe", "-ot", "--cache-reuse", "--api-key", "--host", "--agent", "--ctx-size=9"],
)
def test_an_argument_that_undoes_the_plan_is_refused_with_the_reason(flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_extra(["--threads", "4", flag, "1"], EngineKind.LLAMA)
    assert caught.value.code == "flag-undoes-plan"
    assert flag.partition("=")[0] in caught.value.message
    assert caught.value.cause
    assert caught.value.hint


def test_an_engine_without_a_command_line_takes_none() -> None:
    with pytest.raises(UsageError, match="embedded"):
        check_extra(["--threads", "4"], EngineKind.EMBEDDED)


@pytest.mark.native
@pytest.mark.engine
def test_most_refused_flags_are_flags_of_the_real_server() -> None:
    """A refused name that the server does not know guards nothing. Some are older or newer than this build."""
    done = subprocess.run([str(native_folder() / "llama-server"), "--help"], capture_output=True, text=True, check=True)
    words = set(done.stdout.replace(",", " ").split())
    refused = {flag for _, flags in _REASONS.values() for flag in flags}
    assert refused - words <= {"--mlock", "--mmap", "--no-mmap", "--model-draft", "--no-metrics", "--agent"}
