"""A server that is left running: started, looked at, restarted, stopped - also after its supervisor was killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest
import stress_serve
from fakes.engines import BOTH
from fakes.place import Place
from fakes.processes import free_port, is_open, until

pytestmark = pytest.mark.engine


def test_it_is_started_looked_at_restarted_and_stopped(place: Place) -> None:
    answer = place.start()
    assert is_open(place.port)
    code, status = place.json("status")
    (server,) = status["servers"]
    assert code == 0
    assert (server["name"], server["state"]) == (answer["name"], "ready")
    assert server["pid"] == answer["pid"]
    assert server["planned_bytes"] > 0
    assert server["resident_bytes"] > 0
    assert (server["slots"], server["slots_busy"]) == (1, 0)
    assert "model loaded" in place.run("logs").stdout

    second = place.run("serve", str(place.model), "--port", str(place.port), "--json", "--detach")
    assert second.returncode in {2, 3}  # neither the port nor the name can be had twice

    code, again = place.json("restart")
    assert code == 0
    assert again["pid"] != answer["pid"]
    assert again["command"] == answer["command"]

    code, stopped = place.json("stop")
    assert (code, stopped["stopped"]) == (0, [answer["name"]])
    assert until(lambda: not is_open(place.port))
    assert until(lambda: place.left() == [])
    assert place.json("status") == (1, {"schema": "kimigguf.status/1", "servers": [], "died": []})


def test_of_two_that_are_started_together_under_one_name_one_comes_up(place: Place) -> None:
    def begin() -> "subprocess.Popen[bytes]":
        argv = ["serve", str(place.model), "--engine", "embedded", "--context", "4096", "--no-selftest"]
        return subprocess.Popen(
            [sys.executable, "-m", "kimigguf", *argv, "--name", "twin", "--port", str(free_port())],
            env=place.environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    both = [begin(), begin()]
    try:
        assert until(lambda: any(one.poll() is not None for one in both), seconds=60)
        (winner,) = [one for one in both if one.poll() is None]
        (loser,) = [one for one in both if one is not winner]
        assert loser.returncode == 2
        assert until(lambda: [s["state"] for s in place.json("status")[1]["servers"]] == ["ready"], seconds=60)
        assert place.run("stop", "--name", "twin").returncode == 0
        assert winner.wait(30) == 130
        assert until(lambda: place.left() == [])
    finally:
        for one in both:
            one.kill()
            one.wait()


def test_a_killed_supervisor_leaves_nothing_to_find(place: Place) -> None:
    place.start()
    (server,) = place.json("status")[1]["servers"]
    os.kill(server["supervisor_pid"], signal.SIGKILL)
    assert until(lambda: place.left() == [])
    code, status = place.json("status")
    assert (code, status["servers"]) == (1, [])
    assert [(one["name"], one["died_at"]) for one in status["died"]] == [(server["name"], None)]
    assert place.json("stop", "--name", server["name"])[1]["forgotten"] == [server["name"]]
    assert place.json("status")[1]["died"] == []


def test_an_engine_that_somebody_killed_does_not_vanish(place: Place) -> None:
    answer = place.start()
    os.kill(answer["pid"], signal.SIGKILL)
    assert until(lambda: place.left() == [])
    name = answer["name"]
    code, status = place.json("status")
    (died,) = status["died"]
    assert (code, status["servers"], died["name"], died["log"]) == (1, [], name, answer["log"])
    assert died["how"].startswith("killed by SIGKILL")
    code, seen = place.json("doctor", "--name", name)
    assert (code, seen["findings"][0]["code"], seen["findings"][0]["severity"]) == (1, "killed", "fatal")
    assert "killed by SIGKILL" in seen["findings"][0]["evidence"]
    code, again = place.json("restart", "--name", name)
    assert (code, again["state"], again["command"]) == (0, "ready", answer["command"])
    assert place.json("status")[1]["died"] == []


def test_a_start_that_fails_says_why_as_in_the_foreground(place: Place) -> None:
    done = place.run("serve", str(place.home / "nothing.gguf"), "--json", "--detach", "--port", str(place.port))
    assert done.returncode in {2, 5}
    assert "nothing.gguf" in json.loads(done.stderr.splitlines()[-1])["message"]
    assert place.left() == []


def test_sigterm_ends_a_server_that_a_script_started_with_an_ampersand(place: Place) -> None:
    """A shell without job control starts such a process with SIGINT ignored."""
    argv = f"{sys.executable} -m kimigguf serve {place.model} --engine embedded --port {place.port} --no-selftest"
    script = f"{argv} >{place.home}/out 2>{place.home}/err & echo $!"
    started = subprocess.run(
        ["sh", "-c", script], env=place.environ(), capture_output=True, text=True, timeout=30, check=True
    )
    pid = int(started.stdout)
    assert until(lambda: is_open(place.port), seconds=60)
    os.kill(pid, signal.SIGTERM)
    assert until(lambda: place.left() == [], seconds=20)
    assert until(lambda: not is_open(place.port))


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_stands_between_a_client_and_the_engine(kind: str, place: Place) -> None:
    """So its throughput is the bare engine's: the port is the engine's own, and it runs the command that was shown."""
    answer = place.start(kind)
    server = place.status()
    engine, supervisor = psutil.Process(server["pid"]), psutil.Process(server["supervisor_pid"])
    assert urllib.parse.urlsplit(answer["url"]).port == place.port
    assert place.port in listened(engine)
    assert listened(supervisor) == set()
    assert engine.ppid() == supervisor.pid
    assert engine.cmdline() == answer["command"]


def test_an_answer_on_its_way_is_not_cut_off_by_a_stop(place: Place) -> None:
    """It is streamed to its end although the server is told to stop in the midst of it."""
    log = Path(place.start()["log"])

    def request(**settings: object) -> urllib.request.Request:
        body = json.dumps({"prompt": "Hello", "ignore_eos": True, **settings}).encode()
        url = f"http://127.0.0.1:{place.port}/v1/completions"
        return urllib.request.Request(url, body, {"Content-Type": "application/json"})

    with urllib.request.urlopen(request(max_tokens=60), timeout=60) as short:
        speed = json.load(short)["timings"]["predicted_per_second"]
    # Three seconds of answer, fast machine or slow: long enough to be met, short enough for the patience of a stop.
    tokens = int(min(max(3 * speed, 30), 3000))
    supervisor = place.status()["supervisor_pid"]
    with urllib.request.urlopen(request(max_tokens=tokens, stream=True), timeout=60) as answer:
        first = answer.readline()
        # As ``kimigguf stop`` does, which starts too slowly to meet a quick engine in the midst of an answer.
        os.kill(supervisor, signal.SIGTERM)
        rest = answer.read().decode()
    assert first.startswith(b"data: ")
    assert '"finish_reason":"length"' in rest
    assert rest.rstrip().endswith("data: [DONE]")
    assert until(lambda: place.left() == [], seconds=30)
    said = log.read_text(errors="replace")
    assert "1 request(s) in flight get up to 15 s to end" in said
    assert "cut off" not in said


def listened(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_starts_and_stops_of_every_kind_leave_no_process_and_no_port(model: Path, tmp_path: Path) -> None:
    """The cycle that scripts/stress_serve.py runs a hundred times; it raises where something is left."""
    home = tmp_path / "home"  # by which what is left is known
    shutil.copytree(model, home / "model")
    dice = random.Random(6)
    codes = {}
    for end in (None, *stress_serve.VIOLENT):
        codes[end], ready = stress_serve.cycle(home / "model", home, "embedded", end, dice.uniform(0.0, 3.0))
        assert (ready is None) == (end is not None)
    assert codes[None] == 130
    assert codes["supervisor"] == -signal.SIGKILL
