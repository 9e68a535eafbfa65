"""What is told of a build, and the builds that must not be trusted."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.engines import native_folder

from kimigguf.engines.builds import (
    compiler_version,
    cpu_extensions,
    cuda_architectures,
    cuda_warning,
    foreign_cards,
    look_at,
    parse_libraries,
    parse_system_info,
    runtime_version,
    unused_extensions,
)
from kimigguf.engines.cross_check import remarks
from kimigguf.engines.discover import discover
from kimigguf.engines.engine import Build, EngineKind, FoundEngine
from kimigguf.hardware.machines import load_machine
from kimigguf.hardware.snapshot import Accelerator, Backend, Cpu, Machine

CAPTURES = Path(__file__).parents[1] / "data" / "engines"
NVCC = b"\0Cuda compilation tools, release 13.2, V13.2.78\0Build cuda_13.2.r13.2/compiler.1_0\0"


def said(name: str) -> str:
    text = (CAPTURES / f"{name}.txt").read_text()
    assert text.startswith(("# provenance: real", "# provenance: constructed"))
    return text


def look(folder: Path, *, info: str | None = "", ldd: str | None = None, devices: tuple[str, ...] = ()) -> Build:
    program = folder / "llama-server"
    if not program.exists():
        program.write_bytes(b"\x7fELF")
    system_info = None if info is None else (lambda: info)
    return look_at(program, said="", system_info=system_info, linked=lambda _file: ldd, device_backends=devices)


def test_a_build_in_one_piece_says_which_extensions_it_has() -> None:
    features = parse_system_info(said("cpu-static"))
    assert cpu_extensions(features) == (
        "avx", "avx_vnni", "avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx512_bf16",
    )  # fmt: skip
    assert cuda_architectures(features) is None


def test_the_embedded_engines_line_without_thread_counts_is_read() -> None:
    # provenance: real, xllamacpp 2026.10.11549's get_system_info()
    line = (
        "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | LLAMAFILE = 1 | "
        "OPENMP = 1 | REPACK = 1 | "
    )
    assert cpu_extensions(parse_system_info(line)) == ("avx", "avx2", "f16c", "fma")


@pytest.mark.parametrize("text", ["", "error: invalid argument: -lv", "system_info: n_threads = 2 / 2 | ", "a | b | c"])
def test_no_line_is_unknown_and_not_an_empty_cpu(text: str) -> None:
    assert cpu_extensions(parse_system_info(text)) is None


def test_a_cuda_build_tells_architectures_variant_and_version(tmp_path: Path) -> None:
    for name in ("libggml-base.so", "libggml-cpu-haswell.so", "libggml-cpu-icelake.so", "libggml-vulkan.so.0.15.1"):
        (tmp_path / name).write_bytes(b"\x7fELF")
    (tmp_path / "libggml-cuda.so").write_bytes(b"\x7fELF" + b"\0" * 9_000_000 + NVCC)
    built = look(tmp_path, info=said("cuda-13.2"), devices=("cpu", "cuda"))
    assert built.backends == ("cuda", "rpc", "cpu", "vulkan")
    assert built.cuda_architectures == ("8.6", "12.0")
    assert built.cuda_version == "13.2.78"
    assert (built.cpu_variant, built.cpu_variants) == ("icelake", ("haswell", "icelake"))
    assert built.cpu_extensions == ("avx", "avx2", "f16c", "fma", "avx512f", "avx512_vnni")
    assert built.unknown == ()


def test_compressed_kernels_leave_the_version_to_the_runtime_that_is_linked(tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda-13.2" / "lib64"
    toolkit.mkdir(parents=True)
    (toolkit / "libcudart.so.13").symlink_to("libcudart.so.13.2.51")
    (toolkit / "libcudart.so.13.2.51").write_bytes(b"")
    ldd = f"\tlinux-vdso.so.1 (0x1)\n\tlibcudart.so.13 => {toolkit}/libcudart.so.13 (0x00007f)\n"
    (tmp_path / "libggml-cuda.so").write_bytes(b"\x7fELF")
    assert look(tmp_path, ldd=ldd).cuda_version == "13.2.51"


def test_a_cuda_version_that_nothing_tells_is_unknown_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "libggml-cuda.so").write_bytes(b"\x7fELF")
    (tmp_path / "libcudart.so.13").write_bytes(b"")
    built = look(tmp_path, info=None)
    assert built.cuda_version is None
    assert {one.what: one.reason for one in built.unknown} == {
        "cuda_version": "libggml-cuda.so does not name its CUDA compiler (compressed kernels), and no libcudart with "
        "its version in its name is linked",
        "cuda_architectures": "not asked",
        "cpu_extensions": "not asked",
    }


def test_a_silent_build_in_one_piece_has_unknown_backends(tmp_path: Path) -> None:
    assert look(tmp_path).backends is None
    assert look(tmp_path).cpu_extensions is None


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/local/cuda-13.2/targets/x86_64-linux/lib/libcudart.so.13.2.51", "13.2.51"),
        ("/usr/local/cuda-13.0/lib/libcudart.so.13", "13.0"),
        ("/usr/lib/x86_64-linux-gnu/libcudart.so.12.8.90", "12.8.90"),
        ("/usr/lib/libcudart.so.13", None),
    ],
)
def test_the_runtimes_version_stands_in_its_path(path: str, version: str | None) -> None:
    assert runtime_version(path) == version


def test_a_slow_disk_under_a_large_library_costs_the_version_only(tmp_path: Path) -> None:
    file = tmp_path / "libggml-cuda.so"
    file.write_bytes(b"\0" * (9 << 20) + NVCC)
    version, reason = compiler_version(file, limit_seconds=0.0)
    assert version is None
    assert "too large to search" in reason
    assert compiler_version(tmp_path / "gone")[1].startswith("gone cannot be read")


def test_the_compilers_mark_is_found_across_two_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    file.write_bytes(b"\0" * ((8 << 20) - 20) + NVCC)
    assert compiler_version(file)[0] == "13.2.78"


@pytest.mark.parametrize(
    ("version", "bad"),
    [("13.2", True), ("13.2.51", True), ("13.2.1", True), ("13.0.88", False), ("13.1.80", False), ("13.3.0", False),
     ("12.8.90", False), ("13.20.1", False), (None, False)],
)  # fmt: skip
def test_only_cuda_13_2_is_called_broken(version: str | None, *, bad: bool) -> None:
    warning = cuda_warning(version, ("cuda", "cpu"))
    assert (warning is not None) is bad
    assert warning is None or "13.2.0 and 13.2.1" in warning
    assert cuda_warning(version, ("cpu", "vulkan")) is None


def test_names_of_other_libraries_are_no_backends() -> None:
    names = ("libggml.so", "libggml-base.so", "ggml-cuda.dll", "libggml-cpu.so", "libggml-hip.so", "libllama.so")
    assert parse_libraries(names) == (("cuda", "cpu", "rocm"), ())


BUILT = Build(backends=("cuda", "cpu"), cuda_architectures=("8.0", "8.6"), cpu_extensions=("avx", "avx2"))
ENGINE = FoundEngine(
    kind=EngineKind.LLAMA_SERVER, path="/x", version="b1", build=11434, supports_k3=True, backends=("cpu",), built=BUILT
)


def test_extensions_that_the_build_leaves_alone_are_named() -> None:
    assert unused_extensions(BUILT, Cpu(isa=("avx", "avx2", "avx512f", "avx512_vnni"))) == ("avx512f", "avx512_vnni")
    assert unused_extensions(BUILT, Cpu(isa=("avx", "avx2", "avx_vnni"))) == ()
    assert unused_extensions(BUILT, Cpu()) == ()
    assert unused_extensions(None, Cpu(isa=("avx2",))) == ()


def test_code_for_a_card_runs_on_later_ones_of_its_generation_only() -> None:
    cards = [
        Accelerator(name=text, backend=Backend.CUDA, compute_capability=text)
        for text in ("7.5", "8.0", "8.6", "8.9", "9.0", "12.0")
    ]
    assert [card.name for card in foreign_cards(BUILT, cards)] == ["7.5", "9.0", "12.0"]
    assert foreign_cards(None, cards) == ()


def test_remarks_name_what_is_broken_first_and_speed_of_the_first_engine_only() -> None:
    machine = replace(
        load_machine("8x-b200", {}),
        cpu=Cpu(isa=("avx2", "avx512f")),
        accelerators=(Accelerator(name="NVIDIA B200", backend=Backend.CUDA, compute_capability="10.0"),) * 2,
    )
    first = replace(ENGINE, warnings=("broken",))
    found = remarks(machine, (first, ENGINE))
    assert found[0] == "llama-server: broken"
    assert "built for compute 8.0 8.6, and NVIDIA B200 is 10.0" in found[1]
    assert sum("avx512f" in line for line in found) == 1
    assert len(found) == 4
    assert remarks(machine, (replace(first, supports_k3=False),)) == ()
    assert remarks(Machine(name="x", source="y"), (ENGINE,)) == ()


@pytest.mark.native
def test_the_native_build_says_what_it_was_compiled_for_and_opens_nothing_from_the_environment(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LLAMA_ARG_HF_REPO": "nobody/nothing"}
    (engine, *_) = discover(environ, engine_path=native_folder())
    assert engine.built is not None
    assert engine.built.backends == ("cpu",)
    assert engine.built.cpu_extensions
    assert engine.warnings == ()


@pytest.mark.engine
def test_the_embedded_engine_says_what_it_was_compiled_for() -> None:
    engine = next(one for one in discover({"PATH": ""}) if one.kind is EngineKind.EMBEDDED)
    assert engine.built is not None
    assert "avx2" in (engine.built.cpu_extensions or ()) or "neon" in (engine.built.cpu_extensions or ())


def test_a_broken_cuda_build_beside_the_program_is_warned_of_without_a_device(tmp_path: Path) -> None:
    from fakes.engine import mainline, write_engine

    path = write_engine(tmp_path / "llama-server", version=mainline(11434))
    (tmp_path / "libggml-cuda.so").write_bytes(NVCC)
    (engine, *_) = discover({"PATH": "/usr/bin"}, engine_path=path, closely=False)
    assert engine.backends == ("cpu",)
    assert len(engine.warnings) == 1
    assert "13.2.78" in engine.warnings[0]
