"""Which engine is found, whether it can load K3, and what is said when it cannot."""

from pathlib import Path

import pytest
from fakes.engine import mainline, write_engine
from fakes.engines import too_old_engine

from kimigguf.catalogue.quants import EngineNeed
from kimigguf.engines.builds import names_architecture
from kimigguf.engines.choose import choose
from kimigguf.engines.discover import discover, judge, known_flags, parse_devices, parse_version, places
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.errors import MachineError, UsageError


@pytest.mark.parametrize(
    ("output", "text", "build"),
    [
        (mainline(11434), "0.5.0 (build 11434, commit 0c1e57098)", 11434),
        ("version: 10448 (abc1234)\nbuilt with cc\n", "10448 (abc1234)", 10448),
        ("ggml_cuda_init: found 1 device\nversion: 10447 (abc)\n", "10447 (abc)", 10447),
        # A shallow clone counts only its own commits; xllamacpp and some distributions say 0 or 1.
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\n", "0.1.0-dev (build 1, commit 7e4c0a9)", None),
        ("version: 0 (unknown)\n", "0 (unknown)", None),
    ],
)
def test_a_version_in_either_format_is_read(output: str, text: str, build: int | None) -> None:
    found = parse_version(output)
    assert found is not None
    assert (found.text, found.build) == (text, build)


@pytest.mark.parametrize("output", ["", "llama 1.0", "version: unknown", "Usage: llama <command>"])
def test_another_program_of_that_name_is_not_taken_for_llama_cpp(output: str) -> None:
    assert parse_version(output) is None


def test_devices_are_read_in_the_engines_own_words_and_order() -> None:
    output = (
        "ggml_cuda_init: found 2 CUDA devices\nAvailable devices:\n"
        "  CUDA0: NVIDIA RTX PRO 6000 (Blackwell) (97887 MiB, 97000 MiB free)\n"
        "  CUDA1: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)\n"
    )
    devices = parse_devices(output)
    assert devices is not None
    assert [(d.name, d.description) for d in devices] == [
        ("CUDA0", "NVIDIA RTX PRO 6000 (Blackwell)"),
        ("CUDA1", "NVIDIA GeForce RTX 3090"),
    ]
    assert devices[1].total_bytes == 24576 << 20
    assert devices[1].free_bytes == 24000 << 20


def test_no_devices_and_no_answer_are_told_apart() -> None:
    assert parse_devices("Available devices:\n  (none)\n") == ()
    assert parse_devices("error: invalid argument: --list-devices\n") is None


@pytest.mark.parametrize(
    ("build", "knows", "expected"),
    [(10448, None, True), (10447, None, False), (10447, True, False), (None, True, True), (None, False, False),
     (None, None, None)],
)  # fmt: skip
def test_the_build_decides_and_without_one_the_binary_does(
    build: int | None, knows: bool | None, expected: bool | None
) -> None:
    supports, reason = judge(build, knows_architecture=knows)
    assert supports is expected
    assert "10448" in reason or "kimi-k3" in reason


def test_the_architecture_is_found_in_a_library_beside_the_binary(tmp_path: Path) -> None:
    binary = tmp_path / "bin" / "llama-server"
    binary.parent.mkdir()
    binary.write_bytes(b"\x7fELF")
    assert names_architecture(binary) is None  # no names in it: nothing can be said
    library = tmp_path / "lib" / "x86_64-linux-gnu" / "libllama.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\0deepseek2\0")
    assert names_architecture(binary) is False
    library.write_bytes(b"\0deepseek2\0kimi-k3\0")
    assert names_architecture(binary) is True


def test_the_order_is_option_then_variable_then_path_then_embedded(tmp_path: Path) -> None:
    option = write_engine(tmp_path / "a" / "llama-server", version=mainline(11434))
    variable = write_engine(tmp_path / "b" / "my-server", version=mainline(11434), stream="stdout")
    server = write_engine(tmp_path / "c" / "llama-server", version=mainline(11434))
    unified = write_engine(tmp_path / "c" / "llama", version=mainline(11434), stream="stdout")
    environ = {"PATH": str(tmp_path / "c"), "KIMIGGUF_LLAMA_SERVER": str(variable)}
    found = discover(environ, engine_path=option.parent)
    assert [(e.path, e.kind, e.explicit) for e in found[:4]] == [
        (str(option), EngineKind.LLAMA_SERVER, True),
        (str(variable), EngineKind.LLAMA_SERVER, True),
        (str(server), EngineKind.LLAMA_SERVER, False),
        (str(unified), EngineKind.LLAMA, False),
    ]
    assert all(e.supports_k3 and e.backends == ("cpu",) and e.devices == () for e in found[:4])
    assert found[4].kind is EngineKind.EMBEDDED


def test_a_foreign_program_named_llama_is_left_alone(tmp_path: Path) -> None:
    write_engine(tmp_path / "llama", version="llama: the spitting kind\n")
    assert all(e.kind is not EngineKind.LLAMA for e in discover({"PATH": str(tmp_path)}))


@pytest.mark.engine
def test_the_embedded_engine_is_found_with_its_build_and_devices() -> None:
    engine = choose({"PATH": ""}, kind="embedded")
    assert engine.supports_k3 is True
    assert engine.build is not None
    assert engine.build >= 11549
    assert engine.backends is not None
    assert engine.backends[0] == "cpu"


def test_an_old_engine_on_path_is_passed_over_for_one_that_can(tmp_path: Path) -> None:
    write_engine(tmp_path / "llama-server", version=mainline(10434))
    assert choose({"PATH": str(tmp_path)}).kind is EngineKind.EMBEDDED


@pytest.mark.parametrize("by", ["option", "variable"])
def test_an_old_engine_that_the_user_named_is_refused_with_both_builds_and_a_way_out(tmp_path: Path, by: str) -> None:
    old = write_engine(tmp_path / "llama-server", version=mainline(10434))
    environ = {"PATH": ""} | ({"KIMIGGUF_LLAMA_SERVER": str(old)} if by == "variable" else {})
    with pytest.raises(MachineError) as caught:
        choose(environ, engine_path=old if by == "option" else None)
    assert caught.value.code == "engine-too-old"
    assert "10434" in (caught.value.cause or "")
    assert "10448" in (caught.value.cause or "")
    assert "--engine embedded" in (caught.value.hint or "")


def test_a_relative_path_is_good_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of systemd starts it from another one, and refuses a relative program outright."""
    write_engine(tmp_path / "bin" / "llama-server", version=mainline(11434))
    monkeypatch.chdir(tmp_path)
    assert choose({"PATH": ""}, engine_path="bin").path == str(tmp_path / "bin" / "llama-server")
    found = places({"PATH": "bin", "KIMIGGUF_LLAMA_SERVER": "bin"})
    assert [str(place) for place, *_ in found] == [str(tmp_path / "bin"), str(tmp_path / "bin" / "llama-server")]


def test_a_path_without_a_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        choose({"PATH": ""}, engine_path=tmp_path / "nothing")
    assert caught.value.code == "engine-unusable"
    assert "no such file" in (caught.value.cause or "")


def test_no_engine_at_all_says_how_to_get_one() -> None:
    with pytest.raises(MachineError) as caught:
        choose({}, found=())
    assert caught.value.code == "no-engine"
    assert "pip install" in (caught.value.hint or "")
    assert caught.value.exit_code == 3


def test_an_unknown_engine_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="vllm"):
        choose({}, kind="vllm", found=())


def test_llama_cpp_python_is_never_taken_unasked() -> None:
    python = _engine(EngineKind.LLAMA_CPP_PYTHON)
    with pytest.raises(MachineError):
        choose({}, found=(python,))
    assert choose({}, kind="llama-cpp-python", found=(python,)) is python


def test_a_quant_of_the_fork_is_refused_with_the_reason_and_what_could_read_it() -> None:
    need = EngineNeed(min_build=None, reason="ggml type 66 exists only in the fork", alternative="the fork's build")
    with pytest.raises(MachineError) as caught:
        choose({}, found=(_engine(EngineKind.LLAMA_SERVER),), need=need)
    assert caught.value.code == "quant-unsupported"
    assert caught.value.cause == "ggml type 66 exists only in the fork"
    assert caught.value.hint == "the fork's build"


def _engine(kind: EngineKind) -> FoundEngine:
    return FoundEngine(kind=kind, path="/x", version="v", build=11434, supports_k3=True, backends=("cpu",), devices=())


def test_flags_are_read_from_help(tmp_path: Path) -> None:
    write_engine(tmp_path / "llama-server", version=mainline(11434))
    engine = choose({"PATH": ""}, engine_path=tmp_path)
    flags = frozenset({"--model", "--cors-origins", "--threads", "--ssl-key-file", "--ssl-cert-file"})
    assert known_flags(engine, {}) == flags


def test_a_program_that_hangs_on_version_does_not_hang_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.engines.discover._PROBE_SECONDS", 0.2)
    slow = tmp_path / "llama-server"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(MachineError) as caught:
        choose({"PATH": "/usr/bin:/bin"}, engine_path=slow)
    assert "did not answer" in (caught.value.cause or "")


@pytest.mark.engine
def test_a_real_llama_server_from_before_k3_is_refused(tmp_path: Path) -> None:
    """Its build number is that of a shallow clone (1), so its library has to be searched for the architecture."""
    binary = too_old_engine(tmp_path)
    with pytest.raises(MachineError) as caught:
        choose({"PATH": ""}, engine_path=binary)
    assert caught.value.code == "engine-too-old"
    assert "build 1" in (caught.value.cause or "")
    assert "kimi-k3" in (caught.value.cause or "")
