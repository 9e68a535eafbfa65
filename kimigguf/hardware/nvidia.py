"""NVIDIA GPUs through NVML (nvidia-ml-py), and what /proc tells where NVML does not answer.

``read_devices`` asks NVML and keeps each reply or the error in its place; the ``parse_*`` functions are pure.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from kimigguf.hardware.facts import Facts, unknowns
from kimigguf.hardware.host import Host
from kimigguf.hardware.snapshot import Accelerator, Backend, Driver, MemoryKind, PcieLink, Unknown

Nvml: TypeAlias = Any
"""The module pynvml, or a stand-in with its functions."""

_UNIFIED_NAMES: Final = re.compile(r"\b(GB10|N1X?|Thor|Orin|Xavier|Tegra)\b|Jetson|DGX Spark", re.IGNORECASE)
"""Parts whose GPU works in the host's own memory. GH200 and GB200/GB300 are none: their HBM is memory of its own."""
_PROCESSES: Final = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
_MAX_NVLINKS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReply:
    """What one NVML call said: a value, or the error's name."""

    value: Any = None
    error: str | None = None


Replies: TypeAlias = Mapping[str, NvmlReply]
"""Replies by NVML function name, for one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawDevice:
    """One GPU, or one MIG instance of it: then ``parent`` is the GPU's name."""

    replies: Replies
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawNvml:
    """Everything NVML said. ``failure``: why it said nothing at all."""

    failure: str | None = None
    driver: NvmlReply = NvmlReply()
    cuda: NvmlReply = NvmlReply()
    devices: tuple[RawDevice, ...] = ()
    notices: tuple[str, ...] = ()


def load_nvml() -> Nvml:
    """The module pynvml (it loads the driver's library only when initialised)."""
    import pynvml  # noqa: PLC0415 -- 2,500 names that `kimigguf --help` does not need

    return pynvml


def read_devices(nvml: Nvml) -> RawNvml:
    """Ask NVML for every GPU and MIG instance. Every NVMLError becomes a reply; nothing is raised."""
    started = _ask(nvml, "nvmlInit")
    if started.error is not None:
        return RawNvml(failure=started.error)
    try:
        return _read_started(nvml)
    finally:
        _ask(nvml, "nvmlShutdown")


def _read_started(nvml: Nvml) -> RawNvml:
    count = _ask(nvml, "nvmlDeviceGetCount")
    devices: list[RawDevice] = []
    notices: list[str] = []
    for index in range(count.value or 0):
        handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle.error is not None:
            devices.append(RawDevice(replies={"nvmlDeviceGetHandleByIndex": handle}))
            continue
        instances = _mig_instances(nvml, handle.value)
        if instances is None:
            devices.append(RawDevice(replies=_replies(nvml, handle.value)))
            continue
        parent = _ask(nvml, "nvmlDeviceGetName", handle.value).value or f"GPU {index}"
        devices += [RawDevice(replies=_replies(nvml, instance), parent=parent) for instance in instances]
        if not instances:
            notices.append(f"{parent} (GPU {index}) is in MIG mode and shows no instance here")
    return RawNvml(
        failure=count.error,
        driver=_ask(nvml, "nvmlSystemGetDriverVersion"),
        cuda=_ask(nvml, "nvmlSystemGetCudaDriverVersion_v2"),
        devices=tuple(devices),
        notices=tuple(notices),
    )


def _ask(nvml: Nvml, function: str, *arguments: Any) -> NvmlReply:  # noqa: ANN401 -- handles are opaque
    try:
        return NvmlReply(value=getattr(nvml, function)(*arguments))
    except nvml.NVMLError as error:
        return NvmlReply(error=str(error))
    except (AttributeError, OSError, ValueError) as error:  # an older binding or library without this function
        return NvmlReply(error=f"{type(error).__name__}: {error}")


def _mig_instances(nvml: Nvml, handle: Any) -> list[Any] | None:  # noqa: ANN401 -- handles are opaque
    """Handles of the MIG instances; None where the GPU is not cut."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode.error is not None or not mode.value or mode.value[0] != 1:
        return None
    most = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle).value or 0
    replies = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(most)]
    return [reply.value for reply in replies if reply.error is None]


def _replies(nvml: Nvml, handle: Any) -> Replies:  # noqa: ANN401 -- handles are opaque
    plain = (
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetEnforcedPowerLimit",
    )
    replies = {function: _ask(nvml, function, handle) for function in plain}
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory.error is not None:
        # Some drivers of unified parts answer only the second version of the call.
        second = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", 0))
        memory = second if second.error is None else memory
    if memory.error is None:
        memory = NvmlReply(value=(int(memory.value.total), int(memory.value.free)))
    replies["nvmlDeviceGetMemoryInfo"] = memory
    replies["processes"] = _processes(nvml, handle)
    replies["nvlinks"] = _nvlinks(nvml, handle)
    return replies


def _processes(nvml: Nvml, handle: Any) -> NvmlReply:  # noqa: ANN401 -- handles are opaque
    """Memory held by processes, counted once per process; an error, or one unreadable process, makes it unknown."""
    held: dict[int, int] = {}
    for function in _PROCESSES:
        reply = _ask(nvml, function, handle)
        if reply.error is not None:
            return reply
        for process in reply.value:
            if process.usedGpuMemory is None:
                return NvmlReply(error="a process's use is hidden (another container or no permission)")
            held[process.pid] = max(held.get(process.pid, 0), int(process.usedGpuMemory))
    return NvmlReply(value=sum(held.values()))


def _nvlinks(nvml: Nvml, handle: Any) -> NvmlReply:  # noqa: ANN401 -- handles are opaque
    active = 0
    for link in range(_MAX_NVLINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state.error is not None:
            return state if link == 0 else NvmlReply(value=active)
        active += state.value == 1
    return NvmlReply(value=active)


def parse_nvml(raw: RawNvml) -> Facts:
    """Accelerators and driver from what NVML said, each missing fact with its reason."""
    accelerators: list[Accelerator] = []
    unknown: list[Unknown] = []
    for index, device in enumerate(raw.devices):
        accelerator, missing = parse_device(index, device)
        accelerators.append(accelerator)
        unknown += missing
    notices = raw.notices
    if sum(device.parent is not None for device in raw.devices) > 1:
        notices += ("CUDA uses one MIG instance per process: a server gets one of them, not their sum",)
    driver = Driver(backend=Backend.CUDA, version=_text(raw.driver.value), runtime_version=_cuda(raw.cuda.value))
    return Facts(
        accelerators=tuple(accelerators),
        drivers=(driver,),
        unknown=(*unknown, *unknowns([("drivers.version", driver.version, f"NVML: {raw.driver.error}")])),
        notices=notices,
    )


def parse_device(index: int, device: RawDevice) -> tuple[Accelerator, list[Unknown]]:
    """One accelerator from NVML's replies. Memory that NVML cannot tell is unknown, never 0 and never the parent's."""
    replies = device.replies
    name = _text(_value(replies, "nvmlDeviceGetName"))
    where = f"accelerators.{index}"
    if handle := replies.get("nvmlDeviceGetHandleByIndex"):
        return Accelerator(backend=Backend.CUDA), [Unknown(what=where, reason=f"NVML: {handle.error}")]
    kind, total, free, unknown = _memory(where, name, replies["nvmlDeviceGetMemoryInfo"])
    capability = _value(replies, "nvmlDeviceGetCudaComputeCapability")
    ecc = _value(replies, "nvmlDeviceGetEccMode")
    watts = _value(replies, "nvmlDeviceGetEnforcedPowerLimit")
    used = replies["processes"]
    return Accelerator(
        name=name,
        backend=Backend.CUDA,
        memory_kind=kind,
        total_bytes=total,
        free_bytes=free,
        uuid=_text(_value(replies, "nvmlDeviceGetUUID")),
        used_by_others_bytes=used.value,
        instance=(_mig_profile(name) or "MIG instance") if device.parent is not None else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        pcie=None if kind is MemoryKind.UNIFIED else _pcie(replies),
        nvlinks=_value(replies, "nvlinks"),
        ecc=bool(ecc[0]) if ecc else None,
        power_limit_watts=watts / 1000 if watts else None,
    ), unknown


def _memory(
    where: str, name: str | None, reply: NvmlReply
) -> tuple[MemoryKind | None, int | None, int | None, list[Unknown]]:
    """Kind, total, free and what is missing. A unified part's sizes are the host's and filled in by ``detect``."""
    unified = name is not None and _UNIFIED_NAMES.search(name) is not None
    if unified:
        return MemoryKind.UNIFIED, None, None, []
    if reply.error is not None:
        reason = f"NVML: {reply.error}"
        return None, None, None, [Unknown(what=f"{where}.total_bytes", reason=reason)]
    total, free = reply.value
    if total <= 0 or not 0 <= free <= total:
        reason = f"NVML says {free} of {total} bytes free, which cannot be"
        return None, None, None, [Unknown(what=f"{where}.total_bytes", reason=reason)]
    return MemoryKind.DISCRETE, total, free, []


def _pcie(replies: Replies) -> PcieLink | None:
    link = PcieLink(
        generation=_value(replies, "nvmlDeviceGetCurrPcieLinkGeneration"),
        width=_value(replies, "nvmlDeviceGetCurrPcieLinkWidth"),
        max_generation=_value(replies, "nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=_value(replies, "nvmlDeviceGetMaxPcieLinkWidth"),
    )
    return None if link == PcieLink() else link


def _mig_profile(name: str | None) -> str | None:
    match = re.search(r"MIG (\S+)", name or "")
    return match[1] if match else None


def _value(replies: Replies, function: str) -> Any:  # noqa: ANN401 -- NVML replies are of many types
    return replies[function].value if function in replies else None


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return value if isinstance(value, str) and value else None


def _cuda(value: object) -> str | None:
    """CUDA version from NVML's number: 12080 is 12.8."""
    return f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) and value > 0 else None


def visible(facts: Facts, environ: Mapping[str, str]) -> Facts:
    """Only the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and a notice of what it hides.

    The rules are CUDA's: indices or the beginning of a UUID, and everything after the first entry that is none is
    ignored. CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, while NVML numbers by bus: with
    unlike GPUs an index alone does not tell which one is meant, and the notice says so.
    """
    text, devices = environ.get("CUDA_VISIBLE_DEVICES"), facts.accelerators
    if text is None or not devices:
        return facts
    chosen: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        index = _index(entry, devices)
        if index is None or index in chosen:
            break
        chosen.append(index)
    notice = f"CUDA_VISIBLE_DEVICES={text} leaves {len(chosen)} of {len(devices)} GPUs"
    by_number = any(re.fullmatch(r"\s*\d+\s*", part) for part in text.split(","))
    unlike = len({(device.name, device.total_bytes) for device in devices}) > 1
    if chosen and by_number and unlike and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notice += "; they are unlike and numbered by bus here, by speed in CUDA: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    # Facts about devices are filed by their place in the list, which has just changed.
    places = {old: new for new, old in enumerate(chosen)}
    unknown = [moved for one in facts.unknown if (moved := _moved(one, places)) is not None]
    return replace(
        facts,
        accelerators=tuple(devices[index] for index in chosen),
        unknown=tuple(unknown),
        notices=(*facts.notices, notice),
    )


def _index(entry: str, devices: tuple[Accelerator, ...]) -> int | None:
    if re.fullmatch(r"\d+", entry):
        return int(entry) if int(entry) < len(devices) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    found = [index for index, device in enumerate(devices) if (device.uuid or "").startswith(entry)]
    return found[0] if len(found) == 1 else None


def _moved(unknown: Unknown, places: Mapping[int, int]) -> Unknown | None:
    match = re.match(r"accelerators\.(\d+)", unknown.what)
    if match is None:
        return unknown
    place = places.get(int(match[1]))
    return None if place is None else replace(unknown, what=f"accelerators.{place}{unknown.what[match.end() :]}")


def parse_proc_information(text: str) -> str | None:
    """The model from /proc/driver/nvidia/gpus/<bus>/information."""
    match = re.search(r"^Model:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return match[1] if match else None


def read_nvidia(host: Host, nvml: Callable[[], Nvml] = load_nvml) -> Facts:
    """NVIDIA GPUs as an engine here would see them; where NVML fails, the names that the driver puts into /proc."""
    raw = read_devices(nvml())
    if raw.failure is None:
        return visible(parse_nvml(raw), host.environ)
    return without_nvml(host, raw.failure)


def without_nvml(host: Host, failure: str) -> Facts:
    """What /proc and /sys tell of NVIDIA GPUs when NVML does not answer, with the reason as it is."""
    folder = "proc/driver/nvidia/gpus"
    models = [parse_proc_information(host.text(f"{folder}/{bus}/information") or "") for bus in host.names(folder)]
    if models:
        cards = tuple(Accelerator(name=model, backend=Backend.CUDA) for model in models)
        reason = f"the driver is loaded, but NVML says: {failure}"
        return Facts(accelerators=cards, unknown=(Unknown(what="accelerators.nvidia", reason=reason),))
    if cards_without_driver := _pci_cards(host):
        reason = f"{cards_without_driver} NVIDIA GPU(s) on the PCI bus without a working driver (NVML: {failure})"
        return Facts(unknown=(Unknown(what="accelerators.nvidia", reason=reason),))
    return Facts(accelerators=())


def _pci_cards(host: Host) -> int:
    """Display controllers (PCI class 03) of vendor 10de."""
    folder = "sys/bus/pci/devices"
    return sum(
        host.number(f"{folder}/{name}/vendor") == 0x10DE  # noqa: PLR2004 -- NVIDIA's PCI vendor id
        and (host.text(f"{folder}/{name}/class") or "").startswith("0x03")
        for name in host.names(folder)
    )
