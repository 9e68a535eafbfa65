"""Before the first byte is loaded: is everything as the plan needs it, now? Each check with its evidence."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from kimigguf.download.store import FileState, StoredSet
from kimigguf.engines.command import locks_memory
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.engines.evidence import Check, State
from kimigguf.engines.llama_server import Address, port_problem
from kimigguf.engines.passthrough import reason_against
from kimigguf.engines.tls import CERTIFICATE_FLAG, speaks_tls
from kimigguf.hardware.host import Host
from kimigguf.hardware.linux import parse_cpu_list
from kimigguf.hardware.snapshot import Cpu, Machine
from kimigguf.memory.flags import spelled
from kimigguf.memory.layout import HOST
from kimigguf.memory.ledger import Column
from kimigguf.placement.plan import Plan
from kimigguf.units import KIB, memory, storage

_LOG_ROOM_BYTES: Final = 256 << 20
_NATIVE: Final = frozenset({EngineKind.LLAMA_SERVER, EngineKind.LLAMA})
_MAY_LOCK: Final = 1 << 14
"""CAP_IPC_LOCK in a mask of capabilities: who has it locks as much as there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLimit:
    """How much memory a process may lock, in bytes, None: without limit. ``exempt``: the limit does not bind it."""

    soft_bytes: int | None
    hard_bytes: int | None
    exempt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the system around a start says; None: it does not say.

    ``processors`` are those that this process may run on; ``configs`` llama.cpp's own configuration files, as pairs of
    path and text.
    """

    numa_balancing: str | None = None
    locks: LockLimit | None = None
    processors: int | None = None
    configs: tuple[tuple[str, str], ...] = ()


def read_surroundings(environ: Mapping[str, str], host: Host | None = None) -> Surroundings:
    """What the checks need to know of the system."""
    host = host or Host()
    limits, status = host.text("proc/self/limits"), host.text("proc/self/status")
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '~')}/.config"
    found = (
        (path, host.text(path.lstrip("/"))) for path in ("/etc/llama.cpp/config.ini", f"{home}/llama.cpp/config.ini")
    )
    return Surroundings(
        numa_balancing=host.text("proc/sys/kernel/numa_balancing"),
        locks=parse_locks(limits, status),
        processors=parse_processors(status),
        configs=tuple((path, text) for path, text in found if text is not None),
    )


def parse_locks(limits: str | None, status: str | None) -> LockLimit | None:
    """The limit on locked memory in /proc/PID/limits, and whether /proc/PID/status says that it binds."""
    found = re.search(r"^Max locked memory +(\d+|unlimited) +(\d+|unlimited) +bytes", limits or "", re.MULTILINE)
    if found is None:
        return None
    soft, hard = (None if text == "unlimited" else int(text) for text in found.groups())
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", status or "", re.MULTILINE)
    return LockLimit(soft_bytes=soft, hard_bytes=hard, exempt=mask is not None and bool(int(mask[1], 16) & _MAY_LOCK))


def parse_processors(status: str | None) -> int | None:
    """How many processors /proc/PID/status lets a process run on (``taskset``, a container's ``--cpuset-cpus``)."""
    found = re.search(r"^Cpus_allowed_list:\s*([\d,-]+)$", status or "", re.MULTILINE)
    return len(parse_cpu_list(found[1])) or None if found else None


def preflight(
    *,
    stored: StoredSet | None,
    engine: FoundEngine,
    machine: Machine,
    plan: Plan,
    argv: Sequence[str],
    address: Address,
    changed: Sequence[str],
    log_folder: Path,
    around: Surroundings,
) -> tuple[Check, ...]:
    """Every check, in the order in which a start would meet them.

    ``argv`` is the engine's command line, ``changed`` what the plan no longer agrees with.
    """
    return (
        check_files(stored) if stored is not None else not_fetched(plan),
        check_engine(engine),
        *check_cuda(engine, uses_cuda=any("CUDA" in word for word in argv)),
        *check_tls(engine, argv),
        *check_configs(engine, around.configs, argv),
        check_plan(changed),
        check_port(address),
        check_log_room(log_folder),
        *check_locking(plan, argv, around.locks),
        check_swap(machine.ram.swap_total_bytes),
        *check_numa(machine.cpu.numa_nodes, around.numa_balancing),
        *check_spread(machine.cpu.numa_nodes, engine, argv),
        *check_threads(machine.cpu, around.processors, engine, argv),
    )


def check_files(stored: StoredSet) -> Check:
    count, size = len(stored.files), storage(stored.size_bytes)
    if stored.manifest is None:
        evidence = f"{count} file(s), {size}, complete by name; nobody has said what their hashes should be"
        return Check(what="files", state=State.UNKNOWN, evidence=evidence)
    verified = sum(file.state is FileState.VERIFIED for file in stored.files)
    state = State.PASSED if verified == count else State.UNKNOWN
    evidence = f"{verified} of {count} shards hashed as listed and untouched since, {size}"
    return Check(what="files", state=state, evidence=evidence)


def not_fetched(plan: Plan) -> Check:
    """What a dry run has to say of files that a start would fetch first."""
    size = storage(sum(file.size_bytes for file in plan.model.files))
    return Check(
        what="files",
        state=State.UNKNOWN,
        evidence=f"not whole on this machine; a start fetches them first: {len(plan.model.files)} shards, {size}",
        hint=f"kimigguf download {plan.model.quant}",
    )


def check_engine(engine: FoundEngine) -> Check:
    state = {True: State.PASSED, False: State.FAILED, None: State.UNKNOWN}[engine.supports_k3]
    return Check(what="engine", state=state, evidence=f"{engine.title}: {engine.reason}", blocks=state is State.FAILED)


def check_cuda(engine: FoundEngine, *, uses_cuda: bool) -> tuple[Check, ...]:
    """A build that computes wrongly on CUDA; nothing to say where none of the plan lies on a CUDA device."""
    if not uses_cuda:
        return ()
    if engine.warnings:
        return (
            Check(
                what="CUDA build",
                state=State.FAILED,
                evidence="; ".join(engine.warnings),
                hint="name a llama.cpp that was built with CUDA 12.8 or 13.3: --engine-path DIR",
            ),
        )
    version = engine.built.cuda_version if engine.built is not None else None
    if version is None:
        evidence = "which CUDA it was built with could not be told; 13.2 computes wrongly"
        return (Check(what="CUDA build", state=State.UNKNOWN, evidence=evidence),)
    return (Check(what="CUDA build", state=State.PASSED, evidence=f"built with CUDA {version}"),)


def check_tls(engine: FoundEngine, argv: Sequence[str]) -> tuple[Check, ...]:
    """Whether the engine can speak TLS; nothing to say where nobody asked for that."""
    if CERTIFICATE_FLAG not in map(spelled, argv):
        return ()
    able = speaks_tls(engine.path)
    if able is None:
        evidence = "whether this engine was built with it could not be told; one that was not ends at once"
        return (Check(what="TLS", state=State.UNKNOWN, evidence=evidence),)
    if able:
        return (Check(what="TLS", state=State.PASSED, evidence="the engine was built with it"),)
    return (
        Check(
            what="TLS",
            state=State.FAILED,
            evidence=f"{engine.path} was built without it",
            hint="use a llama.cpp built with OpenSSL (--engine-path DIR), a TLS proxy in front, or ssh -N -L",
            blocks=True,
        ),
    )


def check_configs(engine: FoundEngine, configs: Sequence[tuple[str, str]], argv: Sequence[str]) -> tuple[Check, ...]:
    """llama.cpp's own configuration files: what they add is in force unless the command line says otherwise.

    Source: ``common_params_apply_system_config`` in llama.cpp's common/arg.cpp, build 11434.
    """
    if engine.kind not in _NATIVE:
        return ()
    checks = []
    for path, text in configs:
        flags = [f"--{key}" for key in _config_keys(text) if f"--{key}" not in argv]
        against = [flag for flag in flags if reason_against(flag) is not None or reason_against(flag[1:]) is not None]
        evidence = f"{path} adds {', '.join(flags) or 'nothing'} to the command line"
        if against:
            hint = f"take {', '.join(against)} out of it, or move it away: {shlex.join(['mv', path, f'{path}.off'])}"
            evidence += f", and the plan does not stand with {', '.join(against)}"
            checks.append(Check(what="config file", state=State.FAILED, evidence=evidence, hint=hint))
        else:
            checks.append(Check(what="config file", state=State.PASSED, evidence=evidence))
    return tuple(checks)


def _config_keys(text: str) -> list[str]:
    """The options of the sections that every program reads: before the first heading, ``[*]`` and ``[default]``."""
    keys: dict[str, None] = {}
    section = "*"
    for line in text.splitlines():
        if match := re.match(r"\s*\[([^\]]*)\]", line):
            section = match[1].strip()
        elif section in {"*", "default"} and (match := re.match(r"([A-Za-z_][\w.-]*)\s*=", line)):
            keys[match[1]] = None
    return [key for key in keys if key != "version"]


def check_plan(changed: Sequence[str]) -> Check:
    if not changed:
        return Check(what="plan", state=State.PASSED, evidence="the machine has what the plan needs")
    return Check(
        what="plan",
        state=State.FAILED,
        evidence="; ".join(changed),
        hint="make it again: kimigguf plan QUANT --json > plan.json; or free what others hold",
        blocks=True,
    )


def check_port(address: Address) -> Check:
    problem = port_problem(address)
    if problem is None:
        return Check(what="port", state=State.PASSED, evidence=f"{address.host}:{address.port} is free")
    return Check(what="port", state=State.FAILED, evidence=problem.message, hint=problem.hint, blocks=True)


def check_log_room(folder: Path) -> Check:
    place = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))  # noqa: PTH110 -- never raises
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check(what="log disk", state=State.UNKNOWN, evidence=f"{place}: {error.strerror}")
    return judge_log_room(free, place)


def judge_log_room(free_bytes: int, place: Path) -> Check:
    evidence = f"{storage(free_bytes)} free in {place}"
    if free_bytes >= _LOG_ROOM_BYTES:
        return Check(what="log disk", state=State.PASSED, evidence=evidence)
    hint = f"make {storage(_LOG_ROOM_BYTES)} of room there, or: export XDG_STATE_HOME=/another/disk"
    return Check(what="log disk", state=State.FAILED, evidence=evidence, hint=hint)


def check_locking(plan: Plan, argv: Sequence[str], limit: LockLimit | None) -> tuple[Check, ...]:
    """Whether the model may be locked in memory; nothing to say where nobody asked for that."""
    if not locks_memory(argv):
        return ()
    need = plan.ledger.total_bytes(HOST, column=Column.MODEL)
    if no_room := plan.streamed_bytes:
        return (
            Check(
                what="memory lock",
                state=State.FAILED,
                evidence=f"all of the model is to be locked, and {memory(no_room)} of it have no room in RAM",
                hint="leave --load-mode out",
                blocks=True,
            ),
        )
    if limit is None:
        return (Check(what="memory lock", state=State.UNKNOWN, evidence="the system does not say what may be locked"),)
    if limit.exempt or limit.soft_bytes is None or limit.soft_bytes >= need:
        unbound = limit.exempt or limit.soft_bytes is None
        allowed = "without a limit" if unbound else f"and ulimit -l allows {memory(limit.soft_bytes)}"
        return (Check(what="memory lock", state=State.PASSED, evidence=f"{memory(need)} to lock, {allowed}"),)
    enough = limit.hard_bytes is None or limit.hard_bytes >= need
    kib = -(-need // KIB)
    return (
        Check(
            what="memory lock",
            state=State.FAILED,
            evidence=f"{memory(need)} to lock, and ulimit -l allows {memory(limit.soft_bytes)}: it would stay unlocked",
            hint=f"ulimit -l {'unlimited' if limit.hard_bytes is None else kib}"
            if enough
            else "sudo prlimit --pid $$ --memlock=unlimited:unlimited",
        ),
    )


def check_swap(total_bytes: int | None) -> Check:
    if total_bytes is None:
        return Check(what="swap", state=State.UNKNOWN, evidence="whether there is any could not be read")
    if total_bytes == 0:
        return Check(what="swap", state=State.PASSED, evidence="there is none")
    evidence = f"{memory(total_bytes)} are on: caches and states may be swapped out, and a token then waits for a disk"
    return Check(what="swap", state=State.UNKNOWN, evidence=evidence, hint="sudo swapoff -a")


def check_numa(nodes: int | None, balancing: str | None) -> tuple[Check, ...]:
    """Nothing to say about a machine of one memory node."""
    if nodes is None or nodes < 2:  # noqa: PLR2004 -- two are the fewest that can differ
        return ()
    if balancing is None:
        return (
            Check(
                what="NUMA", state=State.UNKNOWN, evidence=f"{nodes} nodes; whether the kernel moves pages is unknown"
            ),
        )
    if balancing == "0":
        return (Check(what="NUMA", state=State.PASSED, evidence=f"{nodes} nodes, and the kernel moves no pages"),)
    return (
        Check(
            what="NUMA",
            state=State.FAILED,
            evidence=f"{nodes} nodes, and the kernel moves pages between them while the model runs",
            hint="echo 0 | sudo tee /proc/sys/kernel/numa_balancing",
        ),
    )


def check_spread(nodes: int | None, engine: FoundEngine, argv: Sequence[str]) -> tuple[Check, ...]:
    """Whether the engine's threads are spread over the memory nodes, from which the model's pages are read."""
    if nodes is None or nodes < 2:  # noqa: PLR2004 -- two are the fewest that can differ
        return ()
    if "--numa" in argv:
        return (Check(what="NUMA spread", state=State.PASSED, evidence="the engine is told how to spread"),)
    native = engine.kind in _NATIVE
    return (
        Check(
            what="NUMA spread",
            state=State.UNKNOWN,
            evidence=f"{nodes} nodes, and the engine's threads run where the kernel puts them",
            hint="add at the end: -- --numa distribute" if native else None,
        ),
    )


def check_threads(cpu: Cpu, processors: int | None, engine: FoundEngine, argv: Sequence[str]) -> tuple[Check, ...]:
    """Whether a container or ``taskset`` leaves the engine a processor for each of its threads.

    llama.cpp starts one for every physical core that it sees, quota and affinity or not (``cpu_get_num_math``), and all
    of them wait for each other after every operation.
    """
    allowed = min((n for n in (cpu.quota_cores, processors) if n is not None), default=None)
    told = next((value for flag, value in pairwise(argv) if flag in {"-t", "--threads"} and value.isdecimal()), None)
    threads = int(told) if told and int(told) else cpu.cores
    if allowed is None or threads is None or threads <= allowed:
        return ()
    fewer = max(1, int(allowed))
    return (
        Check(
            what="threads",
            state=State.FAILED,
            evidence=f"{threads} threads on {allowed:g} processors, which is all that this process may use: a thread "
            "that has to wait for one holds up all the others, and tokens come many times slower",
            hint=f"add at the end: -- --threads {fewer}"
            if engine.kind in _NATIVE
            else f"allow it more processors, or: --engine llama-server and at the end -- --threads {fewer}",
        ),
    )
