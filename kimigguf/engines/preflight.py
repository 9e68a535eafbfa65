"""Before the first byte is loaded: is everything as the plan needs it, now? Each check with its evidence."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from kimigguf.download.store import FileState, StoredSet
from kimigguf.engines.engine import FoundEngine
from kimigguf.engines.evidence import Check, State
from kimigguf.engines.llama_server import Address, port_problem
from kimigguf.hardware.snapshot import Machine
from kimigguf.units import memory, storage

_LOG_ROOM_BYTES: Final = 256 << 20
_NUMA_BALANCING: Final = Path("/proc/sys/kernel/numa_balancing")


def preflight(
    *,
    stored: StoredSet,
    engine: FoundEngine,
    machine: Machine,
    address: Address,
    changed: Sequence[str],
    log_folder: Path,
) -> tuple[Check, ...]:
    """Every check, in the order in which a start would meet them. ``changed``: what the plan no longer agrees with."""
    balancing = _NUMA_BALANCING.read_text().strip() if _NUMA_BALANCING.is_file() else None
    return (
        check_files(stored),
        check_engine(engine),
        check_plan(changed),
        check_port(address),
        check_log_room(log_folder),
        check_swap(psutil.swap_memory().total),
        *check_numa(machine.cpu.numa_nodes, balancing),
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


def check_engine(engine: FoundEngine) -> Check:
    state = {True: State.PASSED, False: State.FAILED, None: State.UNKNOWN}[engine.supports_k3]
    return Check(what="engine", state=state, evidence=f"{engine.title}: {engine.reason}", blocks=state is State.FAILED)


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
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check(what="log disk", state=State.UNKNOWN, evidence=f"{place}: {error.strerror}")
    state = State.PASSED if free >= _LOG_ROOM_BYTES else State.FAILED
    return Check(what="log disk", state=state, evidence=f"{storage(free)} free in {place}")


def check_swap(total_bytes: int) -> Check:
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
