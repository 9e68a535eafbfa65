"""Measured rates: how fast the memory and the models' disk can be read. Nothing here is guessed from a table.

Memory is read by ``memchr`` of the C library, called through ctypes, which lets go of Python's lock: one thread per
processor searches its own buffer, several times the caches, for a byte that is not in it. That is a pure read with the
widest loads that the library has (measured beside numpy's reductions it was as fast or faster on every run), so the
threads together saturate the memory as STREAM does. Disks are read past the page cache (O_DIRECT) or not counted.
"""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kimigguf.errors import MachineError
from kimigguf.events import Advance, Listener, Notice, Step, ignore
from kimigguf.hardware.host import Host
from kimigguf.hardware.linux import parse_cpu_list
from kimigguf.hardware.snapshot import Disk, Machine, NumaNode
from kimigguf.units import GIB, KIB, MIB, rate, storage

BLOCK_BYTES: Final = 4 * MIB
QUEUE: Final = 16
RAM_SECONDS: Final = 4.0
DISK_SECONDS: Final = 4.0
FILE_BYTES: Final = 2 * GIB
_CACHES: Final = 4
"""How many times the caches a buffer is, so that what is read is memory."""
_SMALLEST_BUFFER_BYTES: Final = 64 * MIB
_ABSENT: Final = 1
_STAT_BLOCK_BYTES: Final = 512
"""The unit of st_blocks, whatever the file system's own blocks are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes per second of reads. ``direct`` False: the file system refused O_DIRECT and these are the page cache's."""

    sequential: int
    random: int
    random_16: int
    direct: bool


def cache_bytes(host: Host) -> int:
    """All last-level caches together, in bytes; 64 MiB where /sys shows none."""
    seen: dict[str, int] = {}
    for cpu in host.names("sys/devices/system/cpu"):
        folder = f"sys/devices/system/cpu/{cpu}/cache/index3"
        shared, size = host.text(f"{folder}/shared_cpu_list"), host.text(f"{folder}/size")
        if shared and size and size.endswith("K") and size[:-1].isdigit():
            seen[shared] = int(size[:-1]) * KIB
    return sum(seen.values()) or 64 * MIB


def buffer_bytes(caches: int, threads: int, available: int | None) -> int:
    """Each thread's buffer: together several times the caches, never more than an eighth of what is available."""
    wanted = max(_SMALLEST_BUFFER_BYTES, _CACHES * caches // threads)
    if available is not None:
        wanted = min(wanted, max(MIB, available // 8 // threads))
    return wanted // mmap.PAGESIZE * mmap.PAGESIZE


def read_memory(cpus: Sequence[int], each_bytes: int, seconds: float) -> int:
    """Bytes per second that one thread on each of ``cpus`` reads from a buffer of its own.

    Each thread pins itself and touches its buffer first, so on a machine with several nodes its memory is near it.
    Time is counted from when all buffers are ready; each thread counts whole passes in its own time; the rates add up.

    Raises:
        MachineError: ``memory-not-measurable``: a buffer could not be had.
    """
    start = threading.Barrier(len(cpus))
    rates: list[float] = []
    failures: list[Exception] = []

    def work(cpu: int) -> None:
        try:
            _pin(cpu)
            with mmap.mmap(-1, each_bytes) as memory:
                _prefer_huge_pages(memory)
                rates.append(_stream(ctypes.c_char.from_buffer(memory), each_bytes, seconds, start))
        except (OSError, MemoryError, threading.BrokenBarrierError) as error:
            failures.append(error)
            start.abort()  # or the others would wait for this one for ever

    threads = [threading.Thread(target=work, args=(cpu,), daemon=True) for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        cause = next((str(error) for error in failures if not isinstance(error, threading.BrokenBarrierError)), None)
        raise MachineError("the memory's rate cannot be measured", code="memory-not-measurable", cause=cause)
    return round(sum(rates))


def _stream(view: ctypes.c_char, size: int, seconds: float, start: threading.Barrier) -> float:
    address = ctypes.addressof(view)
    ctypes.memset(address, 0, size)
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    start.wait()
    began = time.perf_counter()
    passes = 0
    while (elapsed := time.perf_counter() - began) < seconds or passes == 0:
        search(address, _ABSENT, size)
        passes += 1
    return passes * size / max(elapsed, time.perf_counter() - began)


def _pin(cpu: int) -> None:
    """Keep this thread on one processor; where that is not allowed or not known, the system places it."""
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            return


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    """Fewer page-table walks: what an engine gets for large buffers, too. A kernel without them says no."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return


def measure_memory(machine: Machine, host: Host, *, seconds: float = RAM_SECONDS, listen: Listener = ignore) -> Machine:
    """The machine with its memory's read rate, and each node's where there are several."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cpus = list(allowed)
    # A control group kills what takes more than it allows, so it bounds the buffers as well.
    free = [size for size in (machine.ram.available_bytes, machine.ram.cgroup_available_bytes) if size is not None]
    each = buffer_bytes(cache_bytes(host), len(cpus), min(free, default=None))
    listen(Step(text=f"reading memory on {len(cpus)} processors for {seconds:g} s"))
    total = read_memory(cpus, each, seconds)
    nodes = machine.ram.numa
    if nodes is not None and sum(node.cpus != 0 for node in nodes) > 1:
        near = tuple(_near(node, host, cpus) for node in nodes)
        listen(Step(text=f"reading the memory of {len(nodes)} nodes, each on its own processors"))
        nodes = tuple(
            replace(node, read_bytes_per_second=read_memory(own, each, seconds / 2)) if own else node
            for node, own in zip(nodes, near, strict=True)
        )
    rated = machine.ram.rated_bytes_per_second
    if rated is not None:
        listen(Notice(text=f"memory reads {rate(total)}, {100 * total // rated} % of the modules' {rate(rated)}"))
    return replace(machine, ram=replace(machine.ram, read_bytes_per_second=total, numa=nodes))


def _near(node: NumaNode, host: Host, allowed: Sequence[int]) -> list[int]:
    """The processors of a node that this process may use."""
    text = host.text(f"sys/devices/system/node/node{node.index}/cpulist") or ""
    return [cpu for cpu in parse_cpu_list(text) if cpu in allowed]


def disk_of(disks: Sequence[Disk] | None, folder: Path) -> int | None:
    """The place in ``disks`` of the one that ``folder`` (its links resolved) lies on: the longest mount above it."""
    path = f"{folder}".rstrip("/") + "/"
    above = [i for i, disk in enumerate(disks or ()) if path.startswith(disk.mount.rstrip("/") + "/")]
    return max(above, key=lambda i: len((disks or ())[i].mount), default=None)


def takes_direct_io(folder: Path) -> bool | None:
    """Whether files in ``folder`` can be read past the page cache, tried on a file without a name that holds nothing.

    None where that cannot be tried: no such folder, not writable, or a file system without nameless files (NFS).
    """
    nameless, direct = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    if not nameless or not direct:
        return None
    try:
        os.close(os.open(folder, nameless | os.O_RDWR))
    except OSError:
        return None
    try:
        os.close(os.open(folder, nameless | os.O_RDWR | direct))
    except OSError:
        return False
    return True


def with_direct_io(machine: Machine, folder: Path, answer: bool | None) -> Machine:  # noqa: FBT001 -- one fact and its place
    """The machine with ``direct_io`` told of the disk that ``folder`` (its links resolved) lies on, if it was told."""
    index = disk_of(machine.disks, folder)
    if index is None or machine.disks is None or answer is None:
        return machine
    disk = replace(machine.disks[index], direct_io=answer)
    unknown = tuple(one for one in machine.unknown if one.what != f"disks.{index}.direct_io")
    return replace(machine, disks=(*machine.disks[:index], disk, *machine.disks[index + 1 :]), unknown=unknown)


def measure_disk(
    machine: Machine,
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    seconds: float = DISK_SECONDS,
    listen: Listener = ignore,
) -> Machine:
    """The machine with the read rates of the disk that the models' folder lies on.

    Raises:
        MachineError: ``disk-not-measurable``: the folder cannot be written, or the disk is full.
    """
    index = disk_of(machine.disks, folder.resolve())
    if index is None or machine.disks is None:
        listen(Notice(text=f"{folder} lies on no disk that is known; its rate stays unknown"))
        return machine
    disk = machine.disks[index]
    if disk.free_bytes is not None:
        file_bytes = min(file_bytes, disk.free_bytes // 4)
    present = large_file(folder, file_bytes)
    size = file_bytes // BLOCK_BYTES * BLOCK_BYTES
    rates = _read_new_file(folder, size, seconds, listen) if present is None else _rates(present, size, seconds, listen)
    measured, notice = judged(disk, rates)
    if notice is not None:
        listen(Notice(text=notice))
    disks = (*machine.disks[:index], measured, *machine.disks[index + 1 :])
    notices = machine.notices if notice is None else (*machine.notices, notice)
    return replace(machine, disks=disks, notices=notices)


def large_file(folder: Path, size: int) -> Path | None:
    """A shard under the models' folder that is at least so large and holds no holes: it spares writing a test file."""
    for path in sorted(folder.glob("**/*.gguf")):
        try:
            info = path.stat()
        except OSError:
            continue
        if info.st_size >= size and info.st_blocks * _STAT_BLOCK_BYTES >= info.st_size and os.access(path, os.R_OK):
            return path
    return None


def judged(disk: Disk, rates: DiskRates) -> tuple[Disk, str | None]:
    """The disk with the rates that can be believed, and what is wrong with those that cannot.

    Rates of the page cache, and rates above what the drive's own link can carry, say nothing about the drive.
    """
    if not rates.direct:
        why = f"{disk.mount} refuses O_DIRECT: {rate(rates.sequential)} is the page cache, not the disk, and not used"
        return replace(disk, direct_io=False), why
    most = None if disk.pcie is None else disk.pcie.max_bytes_per_second
    fastest = max(rates.sequential, rates.random, rates.random_16)
    # The members of a RAID share the reads, and each has a link of its own.
    if most is not None and fastest > most * max(1, len(disk.members)):
        why = f"{disk.mount} seemed to read {rate(fastest)}, more than its link's {rate(most)}: a cache, and not used"
        return replace(disk, direct_io=True), why
    return replace(
        disk,
        direct_io=True,
        read_bytes_per_second=rates.sequential,
        random_read_bytes_per_second=rates.random,
        random_read_16_bytes_per_second=rates.random_16,
    ), None


def _read_new_file(folder: Path, size: int, seconds: float, listen: Listener) -> DiskRates:
    """Rates on a file of random bytes that is written for this and gone afterwards."""
    if size < QUEUE * BLOCK_BYTES:
        raise MachineError(
            f"there is no room in {folder} for a measurement",
            code="disk-not-measurable",
            hint=f"free at least {storage(4 * QUEUE * BLOCK_BYTES)} there, or name another folder by --models-dir",
        )
    path = folder / f".kimigguf-measure-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write_random(path, size, listen)
            return _rates(path, size, seconds, listen)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"{folder} cannot be measured",
            code="disk-not-measurable",
            cause=error.strerror,
            hint="name a folder that you may write by --models-dir",
        ) from error


def _write_random(path: Path, size: int, listen: Listener) -> None:
    """Random bytes, so that no file system stores them as a hole or compresses them."""
    block = os.urandom(BLOCK_BYTES)
    with path.open("xb", buffering=0) as file:
        for done in range(0, size, BLOCK_BYTES):
            file.write(block)
            if done % (16 * BLOCK_BYTES) == 0:
                listen(Advance(activity="write", item="test file", done_bytes=done, total_bytes=size))
        os.fsync(file.fileno())
    listen(Advance(activity="write", item="test file", done_bytes=size, total_bytes=size))


def _rates(path: Path, size: int, seconds: float, listen: Listener) -> DiskRates:
    descriptor, direct = _open(path)
    try:
        blocks = size // BLOCK_BYTES
        places = list(range(blocks))
        shuffled = random.sample(places, k=blocks)
        each = seconds / 3
        listen(Step(text=f"reading {path.parent} in sequence, then at random places"))
        return DiskRates(
            sequential=_read_for(descriptor, places, 1, each),
            random=_read_for(descriptor, shuffled, 1, each),
            random_16=_read_for(descriptor, shuffled[::-1], QUEUE, each),
            direct=direct,
        )
    finally:
        os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """The file past the page cache, or through it where that is refused."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, os.O_RDONLY | direct), True
        except OSError:  # tmpfs of older kernels, some overlays and network file systems
            pass
    return os.open(path, os.O_RDONLY), False


def _read_for(descriptor: int, places: Sequence[int], depth: int, seconds: float) -> int:
    """Bytes per second with ``depth`` reads of one block under way, over ``places`` again and again."""
    deadline = time.perf_counter() + seconds
    began = time.perf_counter()
    readers: list[Callable[[], int]] = [
        _Reader(descriptor=descriptor, places=places[first::depth], deadline=deadline) for first in range(depth)
    ]
    with ThreadPoolExecutor(max_workers=depth) as pool:
        total = sum(pool.map(lambda reader: reader(), readers))
    return int(total / (time.perf_counter() - began))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    descriptor: int
    places: Sequence[int]
    deadline: float

    def __call__(self) -> int:
        """Bytes read until the deadline; at least one block."""
        done: int = 0
        with mmap.mmap(-1, BLOCK_BYTES) as block:  # page-aligned, as O_DIRECT wants it
            while True:
                for place in self.places:
                    done += os.preadv(self.descriptor, [block], place * BLOCK_BYTES)
                    if time.perf_counter() >= self.deadline:
                        return done
