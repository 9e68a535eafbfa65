"""Failures that are really made: the kernel's kill, no memory, a taken port, an engine from before Kimi K3."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_k3
from fakes.engines import BOTH, real_engine, too_old_engine
from fakes.place import Place
from fakes.plans import make_plan
from fakes.processes import free_port, is_running, until
from gguf import GGUFReader

from kimigguf.engines import llama_server
from kimigguf.engines.command import Command, command
from kimigguf.engines.discover import known_flags
from kimigguf.engines.llama_server import Address, Server
from kimigguf.engines.serving import load_serving
from kimigguf.errors import ServerError
from kimigguf.memory.layout import Layout
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import PlannedFile
from kimigguf.placement.plan_file import write_plan
from kimigguf.units import MIB


def made_command(kind: str, model: Path, work: Path, *, port: int, context: int = 4096) -> Command:
    engine = real_engine(kind)
    files = tuple(PlannedFile(name=f.name, size_bytes=f.stat().st_size) for f in sorted(model.glob("*.gguf")))
    settings = Settings(context_tokens=context, ubatch_tokens=128, prompt_cache_bytes=16 * MIB, checkpoints=2)
    plan = make_plan(layout=Layout.on_host(tiny_k3.LAYERS), settings=settings, folder=model, files=files)
    write_plan(plan, work / "plan.json")
    return command(
        plan, engine, profile=load_serving("kimi-k3"), port=port, plan_file=str(work / "plan.json"),
        known_flags=known_flags(engine, os.environ), environ=os.environ,
    )  # fmt: skip


def start(made: Command, port: int, work: Path) -> Server:
    address = Address(host="127.0.0.1", port=port)
    return Server.start(made, address, alias="kimi-k3", log=work / "engine.log", total_bytes=1000)


def failure(made: Command, port: int, work: Path) -> ServerError:
    with start(made, port, work) as server, pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert not is_running(server.pid)
    return caught.value


# It takes a MiB of memory in the group for each line that it reads. Until what the engine had is given back, the kernel
# may look for another one to kill: that is to be the eater, not the supervisor.
_EATER = """
import os, sys
open("/proc/self/oom_score_adj", "w").write("999")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
eaten = []
for line in sys.stdin:
    eaten.append(os.urandom(1 << 20))
    print("more", flush=True)
"""


@pytest.mark.engine
def test_a_real_oom_kill_under_a_memory_cgroup_is_told_with_the_groups_limit(place: Place) -> None:
    """Supervisor and engine live in one group; another process there takes the rest, and the kernel ends the engine."""
    group = Path(f"/sys/fs/cgroup/memory/kimigguf-oom-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no v1 memory control group can be made here: {error}")
    try:
        serve = [sys.executable, "-m", "kimigguf", "serve", str(place.model), "--json", "--engine", "embedded"]
        joined = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        done = subprocess.run(
            [*joined, *serve, "--port", str(place.port), "--context", "4096", "--no-selftest", "--detach"],
            env=place.environ(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        server = place.status()
        Path(f"/proc/{server['pid']}/oom_score_adj").write_text("1000")  # of all in the group it is to be the one
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + 8 * MIB))
        eat_until_gone(group, server["pid"])
        assert until(lambda: not is_running(server["supervisor_pid"]), seconds=30)
    finally:
        place.run("stop", "--all")
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    records = (place.home / "state/kimigguf/logs" / f"{server['name']}.err").read_text().splitlines()
    told = json.loads(records[-1])
    assert (told["code"], told["exit_code"]) == ("oom-killed", 6)
    assert "its control group's limit of" in told["cause"]
    if os.access("/dev/kmsg", os.R_OK):
        assert f"Killed process {server['pid']} " in told["cause"]
    assert "--context" in told["hint"]
    assert place.json("status")[1]["servers"] == []
    code, examined = place.json("doctor")  # its log, the last thing that is left of it
    assert (code, examined["findings"][0]["code"]) == (1, "oom-killed")


def eat_until_gone(group: Path, pid: int) -> None:
    command = [sys.executable, "-c", _EATER, str(group)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as eater:
        try:
            assert eater.stdin is not None
            assert eater.stdout is not None
            while is_running(pid):
                with suppress(BrokenPipeError):
                    eater.stdin.write(b"\n")
                if eater.stdout.readline() != b"more\n":  # ended too, before what the engine had was given back
                    assert until(lambda: not is_running(pid), seconds=10)
        finally:
            eater.kill()


@pytest.mark.engine
@pytest.mark.native
def test_an_engine_that_really_gets_no_memory_is_told_to_plan_with_less(model: Path, tmp_path: Path) -> None:
    """The address space of a run with a small context does not hold a large one; no control group is needed."""
    port = free_port()
    with start(made_command("llama-server", model, tmp_path, port=port), port, tmp_path) as server:
        server.wait_ready()
        lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        (peak,) = [int(line.split()[1]) for line in lines if line.startswith("VmPeak:")]
    port = free_port()
    made = made_command("llama-server", model, tmp_path, port=port, context=1 << 20)
    limited = ("sh", "-c", f'ulimit -v {peak + 1024}; exec "$@"', "sh", *made.argv)
    error = failure(replace(made, argv=limited), port, tmp_path)
    assert error.code == "out-of-memory"
    assert "alloc" in (error.cause or "")
    assert "--context" in (error.hint or "")


@pytest.mark.parametrize("kind", BOTH)
def test_a_port_that_is_taken_between_the_check_and_the_start_is_told_by_the_engines_own_line(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(llama_server, "require_free", lambda _address: None)
        error = failure(made_command(kind, model, tmp_path, port=port), port, tmp_path)
    assert error.code == "port-in-use"
    assert str(port) in (error.cause or "")
    assert "--port" in (error.hint or "")


@pytest.mark.engine
def test_a_real_engine_from_before_k3_that_is_made_to_load_it_names_the_build_that_can(
    model: Path, tmp_path: Path
) -> None:
    port = free_port()
    first = min(model.glob("*.gguf"))
    argv = (str(too_old_engine(tmp_path)), "-m", str(first), "--port", str(port))
    made = Command(argv=argv, environ=dict(os.environ))
    # On a busy machine this build at times ends before its log's own thread has written all lines.
    errors = (failure(made, port, tmp_path) for _ in range(8))
    error = next((error for error in errors if error.code == "engine-too-old"), None)
    assert error is not None
    assert "unknown model architecture: 'kimi-k3'" in (error.cause or "")
    assert "10448" in (error.hint or "")


@pytest.mark.engine
def test_a_shard_of_another_quant_under_the_right_name_is_found_where_the_engine_would_load_it(
    place: Place, tmp_path: Path
) -> None:
    """llama.cpp loads it without a word; here nobody has said what the files should hash to either."""
    other = tmp_path / "other"
    tiny_k3.write(other, quant="UD-IQ1_S")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for file in sorted(place.model.glob("*.gguf")):
        (mixed / file.name).write_bytes(file.read_bytes())
    (target,) = mixed.glob("*-00003-of-*.gguf")
    (foreign,) = other.glob("*-00003-of-*.gguf")
    target.write_bytes(foreign.read_bytes())
    done = place.run("serve", str(mixed), "--json", "--engine", "embedded", "--port", str(place.port))
    told = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, told["code"]) == (5, "foreign-shard")
    assert target.name in told["message"]
    assert "IQ1_S" in told["cause"]
    assert list((place.home / "state").rglob("serve-*.log")) == []  # no engine was started


@pytest.mark.parametrize("kind", BOTH)
def test_a_model_whose_numbers_are_nan_is_never_called_ready(kind: str, place: Place) -> None:
    """llama.cpp serves it without a word of complaint: one token again and again, under status 200."""
    broken = place.home / "broken"
    shutil.copytree(place.model, broken)
    for file in broken.glob("*.gguf"):
        for tensor in GGUFReader(file, "r+").tensors:
            if tensor.name == "output_norm.weight":
                tensor.data[:] = np.nan
    place.model = broken
    done = place.serve(kind, selftest=True)
    told = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, told["code"]) == (6, "selftest-failed")
    assert "numbers" in told["message"]
    assert "no number (NaN)" in told["cause"]
    assert "CUDA 13.2" in told["hint"]
    assert until(lambda: place.left() == [])

    place.start(kind)  # without the self-test it serves, and doctor finds it
    code, examined = place.json("doctor")
    assert (code, [finding["code"] for finding in examined["findings"]]) == (1, ["not-a-number"])
