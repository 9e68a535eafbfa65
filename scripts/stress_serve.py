"""Start and stop `kimigguf serve` many times, some of them violently, and count what is left behind.

Every cycle serves a tiny random Kimi K3. Of ten cycles three are ended at a random moment: the supervisor is killed,
the engine is killed, or the terminal is closed (SIGHUP). The rest get a Ctrl-C once the server is ready.

usage: python scripts/stress_serve.py [--cycles 100] [--engine embedded] [--seed 1]
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import tiny_k3

VIOLENT = ("supervisor", "engine", "terminal")


def left(word: str) -> list[psutil.Process]:
    """Living processes with ``word`` in their command line, children of this one that wait to be reaped left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(word in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def cycle(model: Path, home: Path, engine: str, end: str | None, moment: float) -> tuple[int, float | None]:
    """One start and one end; returns the exit code and the seconds to ready, None if it was ended before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = home / "out"
    argv = [sys.executable, "-m", "kimigguf", "serve", str(model), "--engine", engine, "--port", str(port)]
    environ = dict(os.environ) | {"XDG_STATE_HOME": str(home / "state")}
    began = time.monotonic()
    with out.open("wb") as stdout:
        process = subprocess.Popen(
            [*argv, "--no-selftest"], env=environ, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True
        )
    ready = None
    if end is None:
        if wait(lambda: b"Ctrl-C stops it" in out.read_bytes() or process.poll() is not None, 120):
            ready = time.monotonic() - began
        process.send_signal(signal.SIGINT)
    else:
        time.sleep(moment)
        engines = [child for child in left(str(home)) if child.pid != process.pid]
        if end == "engine" and engines:
            engines[0].kill()
        else:
            process.send_signal(signal.SIGHUP if end == "terminal" else signal.SIGKILL)
    code = process.wait(60)
    if not wait(lambda: not left(str(home)) and not is_open(port), 20):
        raise RuntimeError(f"left behind after {end or 'a Ctrl-C'} at {moment:.2f} s: {left(str(home))}")
    return code, ready


def main() -> int:
    parser = argparse.ArgumentParser(description="Start and stop `kimigguf serve` many times and count what is left.")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    orphans = 0
    times: list[float] = []
    codes: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory(prefix="kimigguf-stress-") as folder:
        home = Path(folder)
        model = home / "model"
        tiny_k3.write(model)
        for number in range(options.cycles):
            end = VIOLENT[number % 3] if number % 10 < 3 else None
            try:
                code, ready = cycle(model, home, options.engine, end, dice.uniform(0.0, 3.0))
            except RuntimeError as error:
                print(f"cycle {number}: {error}", flush=True)
                orphans += 1
                for process in left(str(home)):
                    process.kill()
                continue
            codes[end or "ctrl-c", code] = codes.get((end or "ctrl-c", code), 0) + 1
            if ready is not None:
                times.append(ready)
    times.sort()
    print(f"{options.cycles} cycles, {orphans} with something left behind")
    for (end, code), count in sorted(codes.items()):
        print(f"  ended by {end}: exit code {code}, {count} times")
    if times:
        print(f"  ready after {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s (slowest)")
    return 1 if orphans else 0


if __name__ == "__main__":
    sys.exit(main())
