"""Accelerators that are not there: loopback ggml-rpc-server processes stand in for GPUs in llama.cpp's memory report.

They hold no memory worth speaking of, since the report allocates nothing; what they have is the host's, so budgets are
the planner's business and not the engine's.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kimigguf.engines import report
from kimigguf.engines.command import Command, command
from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine
from kimigguf.engines.report import Comparison
from kimigguf.engines.serving import load_serving
from kimigguf.gguf_file.shards import ShardSet
from kimigguf.placement.plan import Plan

_READY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcDevices:
    """The binaries' folder and one loopback port per device."""

    folder: Path
    ports: tuple[int, ...]

    def addresses(self, count: int) -> str:
        """The value of llama.cpp's --rpc for the first ``count`` devices."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[:count])

    def engine(self, count: int) -> FoundEngine:
        """The native engine as it would be found on a machine with ``count`` accelerators."""
        return FoundEngine(
            kind=EngineKind.LLAMA_SERVER,
            path=str(self.folder / "llama-server"),
            version=None,
            build=None,
            supports_k3=True,
            backends=("cpu", "rpc"),
            devices=tuple(EngineDevice(name=f"RPC{index}") for index in range(count)),
        )

    def command(self, plan: Plan) -> Command:
        """The exact command line of a plan. An RPC device's memory, unlike a GPU's, is not called as the device is."""
        spoken = command(plan, self.engine(len(plan.layout.devices)), profile=load_serving(plan.model.architecture))
        argv = tuple(
            re.sub(r"=RPC(\d+)(?=,|$)", lambda match: f"=RPC0[127.0.0.1:{self.ports[int(match[1])]}]", word)
            for word in spoken.argv
        )
        return replace(spoken, argv=argv)

    def verify(self, plan: Plan, shards: ShardSet) -> Comparison:
        """The plan's ledger beside the engine's report for the plan's own command line."""
        count = len(plan.layout.devices)
        extra = ("--rpc", self.addresses(count)) if count else ()
        return report.verify(
            plan, shards, self.engine(count), self.command(plan), environ=dict(os.environ), extra=extra
        )


@contextmanager
def rpc_devices(folder: Path, count: int) -> Iterator[RpcDevices]:
    """Start ``count`` servers from ``folder`` on free loopback ports, and stop them at the end."""
    ports = _free_ports(count)
    servers = [
        subprocess.Popen(
            [folder / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]
    try:
        for port, server in zip(ports, servers, strict=True):
            _wait(port, server)
        yield RpcDevices(folder=folder, ports=tuple(ports))
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"ggml-rpc-server on port {port} did not start")
