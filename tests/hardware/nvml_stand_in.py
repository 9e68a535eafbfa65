"""NVML replayed from a JSON capture: the functions of pynvml that detectors call, raising pynvml's own errors."""

# ruff: noqa: N802, N815 -- the names are NVML's own
import json
from types import SimpleNamespace
from typing import Any

import pynvml
from hardware.captures import DATA


class NvmlStandIn:
    """Answers by function name and device; ``{"error": 3}`` in a capture becomes that NVMLError."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, capture: dict[str, Any]) -> None:
        self._capture = capture
        self.started = 0

    @classmethod
    def load(cls, name: str) -> "NvmlStandIn":
        return cls(json.loads((DATA / f"{name}.nvml.json").read_text()))

    @staticmethod
    def _answer(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"error"}:
            raise pynvml.NVMLError(value["error"])
        return value

    def nvmlInit(self) -> None:
        self._answer(self._capture.get("nvmlInit"))
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer(self._capture.get("nvmlSystemGetDriverVersion", {"error": pynvml.NVML_ERROR_UNKNOWN}))

    def nvmlSystemGetCudaDriverVersion_v2(self) -> Any:
        return self._answer(self._capture.get("nvmlSystemGetCudaDriverVersion_v2", {"error": 999}))

    def nvmlDeviceGetCount(self) -> Any:
        return len(self._capture["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        device = self._capture["devices"][index]
        self._answer(device.get("nvmlDeviceGetHandleByIndex"))
        return device

    def nvmlDeviceGetMigMode(self, device: Any) -> Any:
        return self._answer(device.get("nvmlDeviceGetMigMode", {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}))

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> Any:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        instances = device.get("instances", [])
        return instances[index] if index < len(instances) else self._answer({"error": pynvml.NVML_ERROR_NOT_FOUND})

    def nvmlDeviceGetMemoryInfo(self, device: Any, version: int | None = None) -> Any:
        key = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
        return SimpleNamespace(**self._answer(device.get(key, {"error": pynvml.NVML_ERROR_NOT_SUPPORTED})))

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> Any:
        links = device.get("nvlinks", 0)
        return 1 if link < links else self._answer({"error": pynvml.NVML_ERROR_INVALID_ARGUMENT})

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> Any:
        return [SimpleNamespace(**process) for process in self._answer(device.get("processes", []))]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: Any) -> Any:
        return []

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvmlDeviceGet"):
            raise AttributeError(function)
        return lambda device: self._answer(device.get(function, {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}))
