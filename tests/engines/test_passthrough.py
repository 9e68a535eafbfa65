"""What may be handed on to llama-server: everything but what would undo the plan's safety."""

import re
import subprocess
from pathlib import Path

import pytest
from fakes.engines import native_folder

from kimigguf.engines.engine import EngineKind
from kimigguf.engines.passthrough import _REASONS, READ, WRITTEN, absolute, check_extra, check_known
from kimigguf.errors import UsageError
from kimigguf.gguf_file.shards import find_set, read_set
from kimigguf.memory.flags import parse, spelled
from kimigguf.memory.model import ModelSpec


@pytest.mark.parametrize(
    "extra", [("--threads", "32"), ("--numa", "distribute"), ("--temp", "0.6"), ("--reasoning-budget", "4096"), ()]
)
def test_harmless_arguments_are_let_through(extra: tuple[str, ...]) -> None:
    check_extra(extra, EngineKind.LLAMA_SERVER)  # raises nothing


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--bogus", "check what stands after --"),
        ("--thread", "check what stands after --: did you mean --threads"),
        ("--threads=4", "write it as two words: -- --threads 4"),
    ],
)
def test_an_option_that_the_engine_would_end_over_is_refused_before_it_is_started(word: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_known(["--numa", "distribute", word], {"--threads", "--numa", "--verbose", "--tags"})
    assert (caught.value.code, caught.value.exit_code) == ("engine-flag-unknown", 2)
    assert word in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(said)
    assert "--tags" not in caught.value.hint  # that is near to nothing here


def test_what_may_be_an_option_of_the_engine_or_a_value_is_not_refused() -> None:
    check_known(["--bogus"], None)  # an engine that cannot be asked
    check_known(["-t", "4", "--log_prefix", "--chat-template", "--{{ x }}"], {"--log-prefix", "--chat-template"})


@pytest.mark.parametrize("flag", ["--load-mode", "-lm"])
def test_only_the_way_of_loading_that_takes_what_was_counted_is_let_through(flag: str) -> None:
    check_extra([flag, "mmap+mlock"], EngineKind.LLAMA_SERVER)  # raises nothing
    for mode in ("none", "mlock", "dio", ""):
        with pytest.raises(UsageError, match="cannot be handed on"):
            check_extra([flag, mode], EngineKind.LLAMA_SERVER)
    with pytest.raises(UsageError):
        check_extra([flag], EngineKind.LLAMA_SERVER)


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


@pytest.mark.parametrize(
    "written", ["--ctx_size", "--n_gpu_layers", "--api_key", "--hf_token", "--gpt_oss_20b_default", "--ctx_size=9"]
)
def test_a_refused_flag_is_refused_in_the_spelling_that_llama_cpp_takes_too(written: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_extra([written, "SECRET"], EngineKind.LLAMA_SERVER)
    assert caught.value.code == "flag-undoes-plan"
    assert "SECRET" not in f"{caught.value.message} {caught.value.cause} {caught.value.hint}"


def test_files_are_named_as_any_folder_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ("--threads", "3", "--ssl_key_file", "k.pem", "--slot-save-path", "slots", "--grammar-file", "/etc/g")
    here = (*extra[:3], f"{tmp_path}/k.pem", extra[4], f"{tmp_path}/slots", *extra[6:])
    assert absolute(extra) == here
    assert absolute(()) == ()


@pytest.mark.native
def test_every_file_of_the_real_server_is_refused_or_named_from_any_folder() -> None:
    """One that is missed is looked for in / by a unit of systemd, and in the container by Docker."""
    done = subprocess.run([native_folder() / "llama-server", "--help"], capture_output=True, text=True, check=True)
    heads = re.findall(r"^(-.*?)(?:FNAME|PATH|FILE|DIR|JINJA_TEMPLATE_FILE)\b", done.stdout, re.MULTILINE)
    flags = {flag for head in heads for flag in re.findall(r"--?[a-z][\w-]*", head)}
    assert len(flags) > 20
    assert flags - READ - WRITTEN - {flag for _, refused in _REASONS.values() for flag in refused} == set()


@pytest.mark.parametrize("value", ["--temp", "my_model", "-h_x"])
def test_what_is_no_long_flag_is_left_as_it_is(value: str) -> None:
    assert spelled(value) == value


def test_memory_reads_the_spelling_with_underscores_as_llama_cpp_does(tiny: Path) -> None:
    spec = ModelSpec.from_shards(read_set(find_set(tiny)))
    usual = parse(["--ctx-size", "8192", "--no-kv-offload", "--parallel", "2"], spec)
    assert parse(["--ctx_size=8192", "--no_kv_offload", "--parallel", "2"], spec) == usual
    assert usual.settings.context_tokens == 8192


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


@pytest.mark.native
@pytest.mark.engine
def test_every_flag_of_the_real_server_that_fetches_or_places_or_tells_a_secret_is_refused() -> None:
    """Flags go by their help: a new build may bring new ones."""
    done = subprocess.run([str(native_folder() / "llama-server"), "--help"], capture_output=True, text=True, check=True)
    telling = re.compile(r"can download|download url|hugging face|access token|api key|buffer type|offload")
    refused = {flag for _, flags in _REASONS.values() for flag in flags}
    found = 0
    for entry in re.split(r"^(?=-[\w-])", done.stdout, flags=re.MULTILINE)[1:]:
        if telling.search(" ".join(entry.lower().split())):
            found += 1
            assert refused & set(re.findall(r"--?[a-z][\w.-]*", entry)), entry
    assert found > 15
