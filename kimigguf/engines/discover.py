"""Finds the engines on this machine, and tells which can load Kimi K3.

Order: ``--engine-path``, ``KIMIGGUF_LLAMA_SERVER``, ``llama-server`` on PATH, the unified ``llama`` on PATH, the
embedded engine, llama-cpp-python.
"""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kimigguf.engines.builds import ARCHITECTURE, cuda_warning, look_at, names_architecture
from kimigguf.engines.engine import Build, EngineDevice, EngineKind, FoundEngine
from kimigguf.hardware.probes import ask_all
from kimigguf.home import from_home
from kimigguf.units import MIB

MIN_BUILD: Final = 10448
"""llama.cpp's first build with arch kimi-k3 (PR 26185, merged 2026-08-15)."""
ENVIRONMENT_VARIABLE: Final = "KIMIGGUF_LLAMA_SERVER"

_NUMBERED_FROM: Final = 1000
"""Lower numbers come from shallow clones, which count only the commits they have; they say nothing."""
_PROBE_SECONDS: Final = 20.0
_SYSTEM_INFO_SECONDS: Final = 3.0
_NO_MODEL: Final = "/nonexistent/kimigguf-asks-for-system-info.gguf"
"""A start with this model prints ``system_info`` and ends when there is no such file, some 10 ms later."""
_VERSION_NEW: Final = re.compile(r"^version: (\S+) \(build (\d+), commit ([^)\s]+)\)", re.MULTILINE)
_VERSION_OLD: Final = re.compile(r"^version: (\d+) \(([^)\s]+)\)", re.MULTILINE)
_EMBEDDED_INFO: Final = re.compile(r'"system_info": "([^"]*)"')
_DEVICE: Final = re.compile(r"^\s+(\S+): (.+) \((\d+) MiB, (\d+) MiB free\)\s*$", re.MULTILINE)
_BACKENDS: Final = {
    "cuda": "cuda", "rocm": "rocm", "hip": "rocm", "vulkan": "vulkan", "mtl": "metal", "metal": "metal",
    "sycl": "sycl", "rpc": "rpc",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What ``--version`` printed. ``build`` is None where the number cannot be one of mainline's."""

    text: str
    build: int | None


def parse_version(output: str) -> Version | None:
    """Read ``version: X (build N, commit H)`` or the older ``version: N (H)``; None if it is neither.

    A build number below 1000 is that of a shallow clone and comes back as None.
    """
    if match := _VERSION_NEW.search(output):
        text, number = f"{match[1]} (build {match[2]}, commit {match[3]})", int(match[2])
    elif match := _VERSION_OLD.search(output):
        text, number = f"{match[1]} ({match[2]})", int(match[1])
    else:
        return None
    return Version(text=text, build=number if number >= _NUMBERED_FROM else None)


def parse_devices(output: str) -> tuple[EngineDevice, ...] | None:
    """Read ``--list-devices``; None if this is not its output, empty if it lists none."""
    if "Available devices:" not in output:
        return None
    return tuple(
        EngineDevice(
            name=match[1], description=match[2], total_bytes=int(match[3]) * MIB, free_bytes=int(match[4]) * MIB
        )
        for match in _DEVICE.finditer(output.partition("Available devices:")[2])
    )


def backends(devices: tuple[EngineDevice, ...] | None) -> tuple[str, ...] | None:
    """The compute interfaces behind the devices, ``cpu`` first; a name that is not known stays as it is."""
    if devices is None:
        return None
    stems = (re.match(r"[A-Za-z]*", device.name.lower()) for device in devices)
    names = (_BACKENDS.get(stem[0], stem[0]) for stem in stems if stem)
    return tuple(dict.fromkeys(("cpu", *names)))


def judge(build: int | None, *, knows_architecture: bool | None) -> tuple[bool | None, str]:
    """Whether an engine loads Kimi K3, and how that was told. The build number decides where there is one."""
    if build is not None:
        return build >= MIN_BUILD, f"build {build}, and Kimi K3 needs {MIN_BUILD} or later"
    match knows_architecture:
        case True:
            return True, f"no build number, but the binary names the architecture {ARCHITECTURE}"
        case False:
            return False, (
                f"no build number, and the binary does not name the architecture {ARCHITECTURE} "
                f"(build {MIN_BUILD} or later does)"
            )
        case None:
            return None, f"no build number, and the binary could not be searched for {ARCHITECTURE}"


def discover(
    environ: Mapping[str, str], *, engine_path: str | Path | None = None, closely: bool = True
) -> tuple[FoundEngine, ...]:
    """Every engine found, in order of preference. Never raises: one that cannot be asked says so in ``reason``.

    ``closely`` False: native engines are not started to have them say what they were compiled for.
    """
    engines = []
    for place, chosen_by, explicit in places(environ, engine_path):
        engine = _probe_binary(_binary_in(place), environ, chosen_by=chosen_by, explicit=explicit, closely=closely)
        # A `llama` that does not print a llama.cpp version is some other program of that name.
        if engine.version is not None or explicit or engine.kind is EngineKind.LLAMA_SERVER:
            engines.append(engine)
    return (*engines, *_python_engines(environ))


def places(environ: Mapping[str, str], engine_path: str | Path | None = None) -> list[tuple[Path, str, bool]]:
    """Where native engines are looked for: a program or its folder, what pointed there, and whether the user did.

    Every path is absolute: a plan's command is good in any folder.
    """
    named = ((engine_path, "--engine-path"), (environ.get(ENVIRONMENT_VARIABLE), ENVIRONMENT_VARIABLE))
    found = [(from_home(path).absolute(), pointed, True) for path, pointed in named if path]
    search = environ.get("PATH", "")
    on_path = (shutil.which(name, path=search) for name in ("llama-server", "llama"))
    return found + [(Path(path).absolute(), "PATH", False) for path in on_path if path]


def known_flags(engine: FoundEngine, environ: Mapping[str, str]) -> frozenset[str] | None:
    """The long flags that a native engine's ``--help`` lists; None if it cannot be asked or takes no flags."""
    if engine.kind not in {EngineKind.LLAMA_SERVER, EngineKind.LLAMA} or engine.path is None:
        return None
    serve = ["serve"] if engine.kind is EngineKind.LLAMA else []
    flags = frozenset(re.findall(r"--[a-z][a-z0-9-]+", _run([engine.path, *serve, "--help"], environ) or ""))
    return flags if "--model" in flags else None


def _binary_in(place: Path) -> Path:
    if place.is_dir():
        for name in ("llama-server", "llama"):
            if (place / name).is_file():
                return place / name
    return place


def _run(argv: list[str], environ: Mapping[str, str], *, seconds: float | None = None) -> str | None:
    """Both output streams of a short command; None if it cannot run, or not in time. The exit code says nothing."""
    limit = _PROBE_SECONDS if seconds is None else seconds
    try:
        done = subprocess.run(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout + b"\n" + done.stderr).decode(errors="replace")


def _probe_binary(
    path: Path, environ: Mapping[str, str], *, chosen_by: str, explicit: bool, closely: bool
) -> FoundEngine:
    kind = EngineKind.LLAMA if path.stem == "llama" else EngineKind.LLAMA_SERVER
    version: Version | None = None
    devices: tuple[EngineDevice, ...] | None = None
    supports: bool | None = False
    built: Build | None = None
    if not path.is_file():
        reason = "there is no such file"
    elif (output := _run([str(path), "--version"], environ)) is None:
        reason = f"it does not run here, or did not answer --version within {_PROBE_SECONDS:.0f} s"
    elif (version := parse_version(output)) is None:
        reason = "it does not answer --version as llama.cpp does" + _last_line(output)
    else:
        knows = names_architecture(path) if version.build is None else None
        supports, reason = judge(version.build, knows_architecture=knows)
        if supports is not False:
            devices, built = _ask(path, kind, environ, output, closely=closely)
    return FoundEngine(
        kind=kind,
        path=str(path),
        version=version.text if version else None,
        build=version.build if version else None,
        supports_k3=supports,
        backends=backends(devices),
        reason=reason,
        devices=devices,
        chosen_by=chosen_by,
        explicit=explicit,
        built=built,
        warnings=_warnings(built),
    )


def _ask(
    path: Path, kind: EngineKind, environ: Mapping[str, str], said: str, *, closely: bool
) -> tuple[tuple[EngineDevice, ...] | None, Build]:
    """The devices that a native engine lists, and what it was built with, asked side by side: CUDA starts slowly."""
    program = [str(path), *(["serve"] if kind is EngineKind.LLAMA else [])]
    # What the user has set for serving (a repository to download) must not happen here.
    bare = {name: value for name, value in environ.items() if not name.startswith("LLAMA_")}
    start = [*program, "--model", _NO_MODEL, "--host", "127.0.0.1", "--port", "0", "--offline", "-lv", "4"]
    answers = ask_all(
        {
            "devices": lambda: _run([*program, "--list-devices"], environ),
            "info": lambda: _run(start, bare, seconds=_SYSTEM_INFO_SECONDS) if closely else None,
        },
        limit_seconds=_PROBE_SECONDS + 1,
    )
    listed, info = answers["devices"].value or "", answers["info"].value
    devices = parse_devices(listed)
    built = look_at(
        path,
        said=f"{said}\n{listed}",
        system_info=(lambda: info) if closely else None,
        linked=partial(_linked, environ),
        device_backends=backends(devices),
    )
    return devices, built


def _linked(environ: Mapping[str, str], file: Path) -> str | None:
    return _run(["ldd", str(file)], environ, seconds=1.0)


def _warnings(built: Build | None) -> tuple[str, ...]:
    warning = cuda_warning(built.cuda_version, built.backends) if built is not None else None
    return (warning,) if warning else ()


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f" ({lines[-1][:200]})" if lines else ""


def _python_engines(environ: Mapping[str, str]) -> tuple[FoundEngine, ...]:
    return tuple(engine for engine in (_embedded(environ), _llama_cpp_python(environ)) if engine is not None)


def _distribution(name: str, module: str) -> tuple[str, str] | None:
    """Version and file of an installed package, without importing it: an engine must not load into this process."""
    try:
        version = importlib.metadata.version(name)
        spec = importlib.util.find_spec(module)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return (version, spec.origin) if spec and spec.origin else None


def _embedded(environ: Mapping[str, str]) -> FoundEngine | None:
    found = _distribution("xllamacpp", "xllamacpp")
    if found is None:
        return None
    version, path = found
    # The package's version ends in llama.cpp's build (2026.10.11549); its BUILD_INFO says 0.
    last = version.rpartition(".")[2]
    build = int(last) if last.isdigit() and int(last) >= _NUMBERED_FROM else None
    supports, reason = judge(build, knows_architecture=None)
    output = _run([sys.executable, "-m", "kimigguf.engines.embedded", "--devices"], environ)
    devices = parse_embedded_devices(output)
    built: Build | None = None
    if devices is not None:
        program = next(Path(path).parent.glob("*.abi3.*"), Path(path))
        built = look_at(
            program,
            said="",
            system_info=lambda: json.loads(f'"{match[1]}"') if (match := _EMBEDDED_INFO.search(output or "")) else None,
            linked=partial(_linked, environ),
            device_backends=backends(devices),
        )
    else:
        supports, reason = False, "xllamacpp is installed but does not load here; run python -c 'import xllamacpp'"
    return FoundEngine(
        kind=EngineKind.EMBEDDED,
        path=path,
        version=f"xllamacpp {version}",
        build=build,
        supports_k3=supports,
        backends=backends(devices),
        reason=reason,
        devices=devices,
        chosen_by="installed with kimigguf",
        built=built,
        warnings=_warnings(built),
    )


def parse_embedded_devices(output: str | None) -> tuple[EngineDevice, ...] | None:
    """Read the one JSON line of ``python -m kimigguf.engines.embedded --devices``; None if it is not there."""
    for line in (output or "").splitlines():
        if line.startswith('{"devices"'):
            return tuple(EngineDevice(**device) for device in json.loads(line)["devices"])
    return None


def _llama_cpp_python(environ: Mapping[str, str]) -> FoundEngine | None:
    found = _distribution("llama-cpp-python", "llama_cpp")
    if found is None:
        return None
    version, path = found
    library = Path(path).parent / "lib" / "libllama.so"
    supports, reason = judge(None, knows_architecture=names_architecture(library))
    built = look_at(library, said="", system_info=None, linked=partial(_linked, environ), device_backends=None)
    return FoundEngine(
        kind=EngineKind.LLAMA_CPP_PYTHON,
        path=path,
        version=f"llama-cpp-python {version}",
        build=None,
        supports_k3=supports,
        backends=None,
        reason=reason,
        chosen_by="installed",
        built=built,
        warnings=_warnings(built),
    )
