"""What an engine was built with: backends, CUDA version and architectures, CPU extensions; and builds known broken.

Told by the engine's own start-up line (``system_info``), by the libraries beside the program, and by what CUDA's
compiler leaves in the program. Sources: llama.cpp's ``llama_print_system_info`` and ``ggml_backend_load_best`` for the
line and the names of libraries; unslothai/unsloth issue 4849 and ggml-org/llama.cpp pull request 28784 for CUDA 13.2
(its compiler miscompiles kernels of IQ quants; 13.0, 13.1 and 13.3 do not).
"""

import mmap
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from kimigguf.engines.engine import Build
from kimigguf.hardware.snapshot import Accelerator, Backend, Cpu, Unknown

ARCHITECTURE: Final = "kimi-k3"
_CONTROL: Final = b"deepseek2"
"""An architecture that every llama.cpp of the last years names: a file without it is not where names are kept."""
BROKEN_CUDA: Final = re.compile(r"13\.2(\.|$)")
SCAN_SECONDS: Final = 0.3
"""How long a program's bytes are searched: a CUDA library is hundreds of MB and may lie on a slow disk."""
_CHUNK: Final = 8 << 20
_LIBRARY: Final = re.compile(r"^(?:lib)?ggml-([a-z]+)(?:-([a-z0-9_.-]+?))?\.(?:so|dll|dylib)(?:\.[\d.]+)?$")
_BACKENDS: Final = {
    "cpu": "cpu", "cuda": "cuda", "hip": "rocm", "rocm": "rocm", "vulkan": "vulkan", "metal": "metal", "mtl": "metal",
    "sycl": "sycl", "rpc": "rpc", "opencl": "opencl", "cann": "cann", "musa": "musa",
}  # fmt: skip
_COMPILED: Final = re.compile(rb"Cuda compilation tools, release \d+\.\d+, V(\d+\.\d+\.\d+)")
_RUNTIMES: Final = (re.compile(r"libcudart\.so\.(\d+\.\d+[\d.]*)$"), re.compile(r"/cuda-(\d+\.\d+)/"))
_SECTION: Final = re.compile(r"([A-Za-z]+) ?: ((?:[A-Z0-9_]+ = [^|]*\| ?)*)")
_FEATURE: Final = re.compile(r"([A-Z0-9_]+) = ([^|]*?) *\|")
_EXTENSIONS: Final = {
    "AVX": "avx", "F16C": "f16c", "FMA": "fma", "AVX2": "avx2", "AVX_VNNI": "avx_vnni", "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8", "NEON": "neon",
    "DOTPROD": "dotprod", "MATMUL_INT8": "i8mm", "SVE": "sve", "SME": "sme",
}  # fmt: skip
_DECISIVE: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "dotprod", "i8mm", "sve")
"""What makes quantized kernels faster where the CPU has it. AVX-VNNI is left out: AVX-512 VNNI does the same work."""


def names_architecture(path: Path) -> bool | None:
    """Whether the engine's files contain the architecture's name; None if no file holds such names at all."""
    found_names = False
    for file in binary_files(path):
        try:
            with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(ARCHITECTURE.encode()) >= 0:
                    return True
                found_names = found_names or content.find(_CONTROL) >= 0
        except (OSError, ValueError):  # unreadable or empty: it tells nothing
            continue
    return False if found_names else None


def binary_files(path: Path) -> Iterable[Path]:
    """The program and the libraries of llama.cpp's that lie beside it."""
    real = path.resolve()
    yield real
    for folder in (real.parent, real.parent.parent / "lib", real.parent.parent / "lib64"):
        for pattern in ("libllama*", "*/libllama*"):
            if folder is not real.parent or pattern == "libllama*":
                yield from {file.resolve() for file in folder.glob(pattern) if file.is_file()}


def parse_system_info(output: str) -> dict[str, dict[str, str]] | None:
    """Each backend's features in a ``system_info`` line (``CPU : AVX2 = 1 | ...``); None where there is none."""
    line = next((line for line in output.splitlines() if re.search(r"[A-Z0-9_]+ = [^|]+\|", line)), None)
    if line is None:
        return None
    text = line.partition("system_info:")[2] or line
    # The text begins with counts of threads, in front of the first bar.
    text = text.partition("|")[2] if "n_threads" in text else text
    found = {name.upper(): dict(_FEATURE.findall(features)) for name, features in _SECTION.findall(text) if features}
    return found or None


def cpu_extensions(features: dict[str, dict[str, str]] | None) -> tuple[str, ...] | None:
    """What the CPU backend was compiled with, in /proc/cpuinfo's names."""
    if features is None or "CPU" not in features:
        return None
    return tuple(_EXTENSIONS[name] for name, value in features["CPU"].items() if name in _EXTENSIONS and value != "0")


def cuda_architectures(features: dict[str, dict[str, str]] | None) -> tuple[str, ...] | None:
    """``860,1200`` as compute capabilities ``8.6``, ``12.0``."""
    numbers = re.findall(r"\d{3,4}", (features or {}).get("CUDA", {}).get("ARCHS", ""))
    return tuple(f"{int(number) // 100}.{int(number) // 10 % 10}" for number in numbers) or None


def parse_libraries(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Backends and CPU variants among the names of the files beside a program."""
    backends: dict[str, None] = {}
    variants: dict[str, None] = {}
    for name in names:
        match = _LIBRARY.match(name)
        if match is None or match[1] not in _BACKENDS:
            continue
        backends[_BACKENDS[match[1]]] = None
        if match[1] == "cpu" and match[2]:
            variants[match[2]] = None
    return tuple(backends), tuple(variants)


def parse_loaded(output: str) -> tuple[Path, ...]:
    """The files in lines such as ``load_backend: loaded CPU backend from /x/libggml-cpu-zen4.so``."""
    return tuple(dict.fromkeys(Path(name) for name in re.findall(r"loaded \w+ backend from (\S.*\S)", output)))


def runtime_version(path: str) -> str | None:
    """The CUDA version in the path of a resolved libcudart: by its own name, else by the toolkit's folder."""
    return next((match[1] for pattern in _RUNTIMES if (match := pattern.search(path))), None)


def compiler_version(file: Path, *, limit_seconds: float = SCAN_SECONDS) -> tuple[str | None, str]:
    """The CUDA compiler's version that stands in a program, and why there is none: compressed kernels hide it."""
    deadline = time.monotonic() + limit_seconds
    try:
        with file.open("rb") as handle:
            kept = b""
            while part := handle.read(_CHUNK):
                if match := _COMPILED.search(kept + part):
                    return match[1].decode(), ""
                if time.monotonic() > deadline:
                    return None, f"{file.name} is too large to search within {limit_seconds} s"
                kept = part[-128:]
    except OSError as error:
        return None, f"{file.name} cannot be read: {error.strerror}"
    return None, f"{file.name} does not name its CUDA compiler (compressed kernels)"


def cuda_warning(version: str | None, backends: Sequence[str] | None) -> str | None:
    """What to say of a CUDA build that is known to be broken."""
    if version is None or not BROKEN_CUDA.match(version) or (backends is not None and "cuda" not in backends):
        return None
    return (
        f"its CUDA is {version}, and CUDA 13.2.0 and 13.2.1 miscompile the kernels of IQ quants, which then give "
        "garbage; use a build with CUDA 12.8, 13.0, 13.1 or 13.3"
    )


def unused_extensions(built: Build | None, cpu: Cpu) -> tuple[str, ...]:
    """The CPU's extensions that decide speed and that the build leaves alone; empty where either is unknown."""
    if built is None or built.cpu_extensions is None or cpu.isa is None:
        return ()
    return tuple(name for name in _DECISIVE if name in cpu.isa and name not in built.cpu_extensions)


def foreign_cards(built: Build | None, cards: Iterable[Accelerator]) -> tuple[Accelerator, ...]:
    """The CUDA cards for which the build has no machine code: code for 8.6 runs on 8.9, not on 8.0 or 9.0."""
    if built is None or not built.cuda_architectures:
        return ()
    made = [_capability(text) for text in built.cuda_architectures]
    return tuple(
        card
        for card in cards
        if card.backend is Backend.CUDA
        and card.compute_capability is not None
        and not any(
            (major, minor) <= _capability(card.compute_capability) and major == _capability(card.compute_capability)[0]
            for major, minor in made
        )
    )


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def look_at(
    path: Path,
    *,
    said: str,
    system_info: Callable[[], str | None] | None,
    linked: Callable[[Path], str | None],
    device_backends: Sequence[str] | None,
) -> Build:
    """What can be told of the program at ``path``.

    Args:
        path: The program.
        said: All that it printed so far (``--version``, ``--list-devices``).
        system_info: Gets the output of a start that prints ``system_info``; None: do not start it.
        linked: Gets what the system's loader says of a file (``ldd``), None where it does not say.
        device_backends: The backends of the devices that the engine lists.
    """
    real = path.resolve()
    info = (system_info() or "") if system_info is not None else ""
    features = parse_system_info(info)
    loaded = parse_loaded(said + "\n" + info)
    loaded_backends, loaded_variants = parse_libraries(file.name for file in loaded)
    files = _beside(real, loaded)
    beside, variants = parse_libraries(file.name for file in files)
    named = tuple(_BACKENDS[name.lower()] for name in features or () if name.lower() in _BACKENDS)
    backends = tuple(dict.fromkeys((*loaded_backends, *beside, *named, *(device_backends or ()))))
    unknown = []
    version: str | None = None
    if "cuda" in backends:
        version, reason = _cuda_version(real, files, linked)
        if version is None:
            unknown.append(Unknown(what="cuda_version", reason=reason))
        if (architectures := cuda_architectures(features)) is None:
            unknown.append(Unknown(what="cuda_architectures", reason=_not_said(system_info)))
    else:
        architectures = None
    if (extensions := cpu_extensions(features)) is None:
        unknown.append(Unknown(what="cpu_extensions", reason=_not_said(system_info)))
    return Build(
        # Built in one piece and silent: there may be more than what was seen.
        backends=backends if beside or features is not None else None,
        cuda_version=version,
        cuda_architectures=architectures,
        cpu_extensions=extensions,
        cpu_variants=variants,
        cpu_variant=next(iter(loaded_variants), None),
        unknown=tuple(unknown),
    )


def _not_said(system_info: Callable[[], str | None] | None) -> str:
    return "not asked" if system_info is None else "the engine printed no system_info line in time"


def _beside(real: Path, loaded: Iterable[Path]) -> tuple[Path, ...]:
    """The libraries where a program's own are looked for, and beside those that it said it loaded."""
    near = (real.parent, real.parent.parent / "lib", real.parent.parent / "lib64")
    folders = dict.fromkeys((*near, *(file.parent for file in loaded)))
    return tuple(
        file for folder in folders for pattern in ("*ggml-*", "*cudart*") for file in sorted(folder.glob(pattern))
    )


def _cuda_version(real: Path, files: Iterable[Path], linked: Callable[[Path], str | None]) -> tuple[str | None, str]:
    """By the compiler's mark in the CUDA library, else by the CUDA runtime beside the program or linked to it."""
    library = next((file for file in files if re.match(r"(lib)?ggml-(cuda)\b", file.name)), real)
    version, reason = compiler_version(library)
    if version is not None:
        return version, ""
    runtimes = [str(file.resolve()) for file in files if "cudart" in file.name]
    runtimes += [str(Path(target).resolve()) for target in re.findall(r"libcudart\S* => (/\S+)", linked(library) or "")]
    found = next((version for path in runtimes if (version := runtime_version(path)) is not None), None)
    return found, "" if found else f"{reason}, and no libcudart with its version in its name is linked"
