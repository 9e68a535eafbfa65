"""What ``status`` and the server's log say of its memory, of real servers that really grow and really run short."""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest
from fakes.engines import BOTH
from fakes.place import Place
from fakes.processes import until

from kimigguf.units import MIB


def converse(port: int, first_word: str) -> None:
    """One turn of many hundred tokens that shares nothing with any other."""
    body = {"prompt": first_word + " the" * 350, "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["choices"]


@pytest.mark.engine
@pytest.mark.native
def test_what_a_server_grows_by_is_laid_at_the_checkpoints_and_the_prompt_cache(place: Place) -> None:
    place.start("llama-server", "--slots", "2", selftest=True)
    before = place.status()["host_memory"]
    assert before["growth"]["total_bytes"] is not None
    for number in range(8):
        converse(place.port, f"q{number}{chr(97 + number) * 40}")
    after = place.status()["host_memory"]
    growth = after["growth"]
    assert after["prompt_cache_bytes"] > before["prompt_cache_bytes"] + 3 * MIB
    assert growth["prompt_cache_bytes"] > 3 * MIB
    assert growth["checkpoint_bytes"] == after["checkpoint_bytes"] - _at_ready(before)
    assert 0 < after["checkpoint_bytes"] <= after["checkpoint_planned_bytes"]
    assert after["prompt_cache_planned_bytes"] > after["prompt_cache_bytes"]
    # What the log tells is what the process really took: little is left that nothing explains.
    explained = growth["prompt_cache_bytes"] + growth["checkpoint_bytes"]
    assert growth["total_bytes"] == explained + growth["unexplained_bytes"]
    assert abs(growth["unexplained_bytes"]) < 0.5 * explained + 2 * MIB
    words = place.run("status").stdout
    assert "prompt cache +" in words
    assert "context checkpoints" in words


def _at_ready(host: dict[str, int | dict[str, int]]) -> int:
    held, growth = host["checkpoint_bytes"], host["growth"]
    assert isinstance(held, int)
    assert isinstance(growth, dict)
    return held - growth["checkpoint_bytes"]


@pytest.mark.engine
def test_a_server_whose_group_fills_up_says_so_in_its_log_and_in_status(place: Place) -> None:
    """The engine is put under a real limit once it runs; what it holds then is more than nine tenths of that."""
    place.start()
    server = place.status()
    group = Path(f"/sys/fs/cgroup/memory/kimigguf-watched-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no v1 memory control group can be made here: {error}")
    filler = None
    try:
        limit = 96 * MIB
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(server["pid"]))
        code = f"import os, time; x = os.urandom({84 * MIB}); print(1, flush=True); time.sleep(90)"
        filler = subprocess.Popen(
            ["sh", "-c", f"echo $$ > {group}/cgroup.procs && exec python3 -c '{code}'"], stdout=subprocess.PIPE
        )
        assert filler.stdout is not None
        assert filler.stdout.readline() == b"1\n"
        pressure = place.status()["memory_pressure"]
        assert pressure["state"] == "failed"
        assert "the cgroup has" in pressure["evidence"]
        assert "runs short" in place.run("status").stdout
        log = Path(server["log"])
        assert until(lambda: "memory pressure: " in log.read_text(errors="replace"), seconds=30)
        (line,) = [line for line in log.read_text(errors="replace").splitlines() if "memory pressure" in line]
        assert line.startswith("kimigguf 20")
        assert "the cgroup has" in line
        assert place.status()["state"] == "ready"
    finally:
        if filler is not None:
            filler.kill()
            filler.communicate()
        place.run("stop", "--all")
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.parametrize("kind", BOTH)
def test_doctor_finds_nothing_in_a_server_as_kimigguf_starts_it(kind: str, place: Place) -> None:
    place.start(kind)
    code, examined = place.json("doctor")
    assert (code, examined["findings"]) == (0, [])


@pytest.mark.engine
@pytest.mark.native
def test_doctor_asks_a_running_server_what_its_log_does_not_tell(place: Place) -> None:
    """With another template and a limit of its own it serves on, and nothing of it stands in the log."""
    place.start("llama-server", "--", "--chat-template", "chatml", "-n", "64")
    code, examined = place.json("doctor")
    found = {finding["code"]: finding for finding in examined["findings"]}
    assert code == 1
    assert set(found) == {"template", "thinking-dropped", "tools-dropped", "cut-off"}
    assert "multi-turn becomes inconsistent" in found["thinking-dropped"]["message"]
    assert "agents stop after a tool call" in found["tools-dropped"]["message"]
    assert found["cut-off"]["evidence"] == "-n 64 in the engine's command"
    words = " ".join(place.run("doctor").stdout.split())
    assert all(finding["hint"] in words for finding in examined["findings"])
