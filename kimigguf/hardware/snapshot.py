"""The machine as values: what ``inspect`` prints, ``--save`` writes and every verdict stands on.

None is "unknown" everywhere; an empty tuple is "looked, and there is none". Sizes are bytes. The same types are
read from the machine files in ``profiles/machines``, where sizes may be written as "768GiB".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

THIS_MACHINE: Final = "this-machine"
DETECTED: Final = "detected"
"""Name and source of a machine that was read just now."""


class MemoryKind(StrEnum):
    """How an accelerator's memory relates to the host's."""

    DISCRETE = "discrete"
    """Memory of its own: adds to the host's RAM."""
    UNIFIED = "unified"
    """The host's RAM: one pool, counted once."""


class Backend(StrEnum):
    """The compute interface by which engines drive an accelerator."""

    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"
    VULKAN = "vulkan"
    SYCL = "sycl"


class DiskKind(StrEnum):
    """What lies under a file system."""

    NVME = "nvme"
    SSD = "ssd"
    HDD = "hdd"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A fact that could not be read: which one, in dotted words (``ram.available_bytes``), and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor(s).

    ``isa`` holds the extensions that decide how fast quantized matrix kernels run, in the names of /proc/cpuinfo
    (``avx2``, ``avx512f``, ``avx512_vnni``, ``avx512_bf16``, ``amx_tile``, ``amx_int8``, ``neon``, ``sve``, ...).
    ``cores`` are physical; where they differ in kind, ``performance_cores`` says how many are the fast ones.
    ``quota_cores`` is how many cores' worth of time a control group allows, None where nothing limits.
    """

    model: str | None = None
    architecture: str | None = None
    sockets: int | None = None
    cores: int | None = None
    performance_cores: int | None = None
    threads: int | None = None
    isa: tuple[str, ...] | None = None
    numa_nodes: int | None = None
    governor: str | None = None
    quota_cores: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """Memory near one group of cores. ``cpus`` 0: memory without cores (an expander, or a coherent GPU's own).

    ``read_bytes_per_second`` was measured by the node's own cores on its own memory.
    """

    index: int
    total_bytes: int | None = None
    free_bytes: int | None = None
    cpus: int | None = None
    read_bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ram:
    """Main memory, in bytes.

    ``available_bytes`` is what new work can have without swapping (MemAvailable), None in a file that describes a
    machine at rest. ``cgroup_limit_bytes`` is the tightest limit of any control group above this process, and
    ``cgroup_available_bytes`` what they all still allow (not always the tightest one decides), reclaimable page cache
    credited; both None where nothing limits. Swap and huge pages stand here to be shown; no verdict ever counts them.
    ``rated_bytes_per_second`` is what the modules can deliver together, ``read_bytes_per_second`` what was measured.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    huge_pages_bytes: int | None = None
    numa: tuple[NumaNode, ...] | None = None
    modules: str | None = None
    rated_bytes_per_second: int | None = None
    read_bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """A PCI Express link as it runs now and as the device could run it."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None

    @property
    def max_bytes_per_second(self) -> int | None:
        """What the fastest form of the link carries one way, line coding taken off; None where that is unknown."""
        generation, width = self.max_generation or self.generation, self.max_width or self.width
        if generation is None or width is None or generation not in _PCIE_LANE_BYTES_PER_SECOND:
            return None
        return _PCIE_LANE_BYTES_PER_SECOND[generation] * width


_PCIE_LANE_BYTES_PER_SECOND: Final[Mapping[int, int]] = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_384,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_563_000_000,
}
"""2.5, 5 GT/s at 8b/10b; 8, 16, 32 GT/s at 128b/130b; 64 GT/s in flits of 242 useful bytes out of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, GPU instance or integrated GPU, as an engine would see it.

    ``free_bytes`` is None in a file that describes a machine at rest. For unified memory both sizes describe the
    shared pool, and may be unknown; ``working_set_bytes`` is then the most of it that the system lets the GPU have
    (Apple's wired limit; carve-out and GTT of an AMD APU). ``instance`` names the MIG profile of a GPU instance.
    ``used_by_others_bytes`` is what other processes hold.
    """

    name: str | None = None
    backend: Backend | None = None
    memory_kind: MemoryKind | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    uuid: str | None = None
    working_set_bytes: int | None = None
    used_by_others_bytes: int | None = None
    instance: str | None = None
    compute_capability: str | None = None
    pcie: PcieLink | None = None
    nvlinks: int | None = None
    ecc: bool | None = None
    power_limit_watts: float | None = None
    bandwidth_bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A GPU driver: its version and the newest runtime (CUDA, ROCm) that it can serve."""

    backend: Backend
    version: str | None = None
    runtime_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One mounted file system that could hold a model.

    ``free_bytes`` is what this user may still write. ``device`` is the block device or remote, ``members`` the
    physical devices under a RAID, LVM or encrypted volume, ``model`` what the drive calls itself.
    ``direct_io`` says whether O_DIRECT works there. The rates are measured past the page cache, else None:
    ``read_bytes_per_second`` in sequence, the others 4 MiB at random places, one at a time and sixteen at once.
    """

    mount: str
    file_system: str | None = None
    kind: DiskKind | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    device: str | None = None
    members: tuple[str, ...] = ()
    model: str | None = None
    pcie: PcieLink | None = None
    read_only: bool = False
    read_ahead_bytes: int | None = None
    direct_io: bool | None = None
    read_bytes_per_second: int | None = None
    random_read_bytes_per_second: int | None = None
    random_read_16_bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, live or described. ``source`` says where the description comes from (``detected``, a URL, ...).

    ``unknown`` gives the reason for each fact that was looked for and not found; ``notices`` what a reader of the
    facts should know (devices hidden by the environment, memory counted elsewhere). ``measured_on`` is the date of
    the measured rates, ``system`` the operating system in words.
    """

    name: str
    source: str
    note: str | None = None
    system: str | None = None
    cpu: Cpu = Cpu()
    ram: Ram = Ram()
    accelerators: tuple[Accelerator, ...] | None = None
    disks: tuple[Disk, ...] | None = None
    drivers: tuple[Driver, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notices: tuple[str, ...] = ()
    measured_on: str | None = None

    @property
    def is_this_one(self) -> bool:
        """Whether this is the machine at hand as it was just read: neither described nor changed by a what-if."""
        return (self.name, self.source) == (THIS_MACHINE, DETECTED)

    @property
    def is_unified(self) -> bool:
        """Whether an accelerator works in the host's own memory, which is then counted once."""
        return any(a.memory_kind is MemoryKind.UNIFIED for a in self.accelerators or ())
