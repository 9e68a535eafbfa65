"""The machine as values: what ``inspect`` prints, ``--save`` writes and every verdict stands on.

None is "unknown" everywhere; an empty tuple is "looked, and there is none". Sizes are bytes. The same types are
read from the machine files in ``profiles/machines``, where sizes may be written as "768GiB".
"""

from dataclasses import dataclass
from enum import StrEnum


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
class Cpu:
    """The processor(s).

    ``isa`` holds the extensions that decide how fast quantized matrix kernels run, in the names of /proc/cpuinfo
    (``avx2``, ``avx512f``, ``avx512_vnni``, ``avx512_bf16``, ``amx_tile``, ``amx_int8``, ``neon``, ``sve``, ...).
    """

    model: str | None = None
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    isa: tuple[str, ...] | None = None
    numa_nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ram:
    """Main memory, in bytes.

    ``available_bytes`` is what new work can have without swapping (MemAvailable), None in a file that describes a
    machine at rest. ``cgroup_limit_bytes`` is the tightest limit of any control group above this process, and
    ``cgroup_available_bytes`` what it still allows, reclaimable page cache credited; both None where nothing limits.
    Swap stands here to be shown; no verdict ever counts it.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    swap_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, GPU instance or integrated GPU, as an engine would see it.

    ``free_bytes`` is None in a file that describes a machine at rest. For unified memory both sizes describe the
    shared pool, and may be unknown.
    """

    name: str | None = None
    backend: Backend | None = None
    memory_kind: MemoryKind | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One mounted file system that could hold a model. ``free_bytes`` is what this user may still write."""

    mount: str
    file_system: str | None = None
    kind: DiskKind | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, live or described. ``source`` says where the description comes from (``detected``, a URL, ...)."""

    name: str
    source: str
    note: str | None = None
    cpu: Cpu = Cpu()
    ram: Ram = Ram()
    accelerators: tuple[Accelerator, ...] | None = None
    disks: tuple[Disk, ...] | None = None

    @property
    def is_unified(self) -> bool:
        """Whether an accelerator works in the host's own memory, which is then counted once."""
        return any(a.memory_kind is MemoryKind.UNIFIED for a in self.accelerators or ())
