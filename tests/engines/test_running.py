"""Real engines on a tiny K3: ready, right by default, two turns, and gone without a trace."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import BOTH, real_engine
from fakes.processes import free_port, is_open, is_running, until

from kimigguf.engines.command import command
from kimigguf.engines.discover import known_flags
from kimigguf.engines.llama_server import Address, Server, get
from kimigguf.engines.serving import load_serving
from kimigguf.errors import MachineError, ServerError
from kimigguf.events import Advance, Event
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import write_plan


def start(
    kind: str, plan: Plan, work: Path, *, port: int | None = None, key: str | None = None, **choices: Any
) -> Server:
    engine = real_engine(kind)
    plan_file = work / "plan.json"
    write_plan(plan, plan_file)
    address = Address(host="127.0.0.1", port=port or free_port())
    made = command(
        plan,
        engine,
        profile=load_serving("kimi-k3"),
        port=address.port,
        plan_file=str(plan_file),
        known_flags=known_flags(engine, os.environ),
        environ=os.environ,
        **choices,
    )
    size = sum(file.size_bytes for file in plan.model.files)
    return Server.start(made, address, alias="kimi-k3", log=work / "engine.log", total_bytes=size, key=key)


def post(server: Server, body: dict[str, Any], *, key: str | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(
        f"{server.address.url}/v1/chat/completions", json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


@pytest.mark.parametrize("kind", BOTH)
def test_it_serves_two_turns_with_k3s_defaults_and_leaves_nothing(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    seen: list[Event] = []
    with start(kind, tiny_plan, tmp_path) as server:
        server.wait_ready(seen.append)
        answer = get(server.address, "/props")
        assert answer is not None
        defaults = json.loads(answer[1])["default_generation_settings"]
        params = defaults["params"]
        assert (params["temperature"], params["top_k"], params["min_p"]) == (1.0, 0, 0.0)
        assert params["top_p"] == pytest.approx(0.95)
        assert defaults["n_ctx"] == 4096
        question = {"role": "user", "content": "Hello"}
        first = post(server, {"messages": [question], "max_tokens": 8})["choices"][0]["message"]
        assert first["reasoning_content"]
        again = post(server, {"messages": [question, first, {"role": "user", "content": "And?"}], "max_tokens": 8})
        assert again["choices"][0]["message"]["reasoning_content"]
        assert (get(server.address, "/metrics") or (0, b""))[0] == 200
        pid, port = server.pid, server.address.port
    assert until(lambda: not is_running(pid))
    assert until(lambda: not is_open(port))
    loads = [event for event in seen if isinstance(event, Advance)]
    assert loads[-1].done_bytes == loads[-1].total_bytes


@pytest.mark.parametrize("kind", BOTH)
def test_the_effort_reaches_the_prompt(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    with start(kind, tiny_plan, tmp_path, effort="low") as server:
        server.wait_ready()
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
        request = urllib.request.Request(f"{server.address.url}/apply-template", body)
        with urllib.request.urlopen(request, timeout=30) as answer:
            prompt = json.load(answer)["prompt"]
    assert "low" in prompt
    assert "max`" not in prompt.rpartition("Now the system")[2]


@pytest.mark.parametrize("kind", BOTH)
def test_without_the_key_nobody_is_answered(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("# ours\nsecret-1\n")
    with start(kind, tiny_plan, tmp_path, api_key_file=str(keys), key="secret-1") as server:
        server.wait_ready()
        assert not any("secret-1" in part for part in Path(f"/proc/{server.pid}/cmdline").read_text().split("\0"))
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, body)
        caught.value.close()
        assert caught.value.code == 401
        assert post(server, body, key="secret-1")["choices"]


@pytest.mark.parametrize("kind", BOTH)
def test_a_web_page_of_elsewhere_is_not_allowed_to_read_answers(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    with start(kind, tiny_plan, tmp_path) as server:
        server.wait_ready()
        request = urllib.request.Request(f"{server.address.url}/v1/models", headers={"Origin": "https://evil.example"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            allowed = answer.headers.get("Access-Control-Allow-Origin")
    assert allowed not in {"*", "https://evil.example"}


@pytest.mark.parametrize("kind", BOTH)
def test_a_missing_shard_is_explained_by_the_engines_own_line(
    kind: str, tiny: Path, tiny_plan: Plan, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in sorted(tiny.glob("*.gguf")):
        (broken / file.name).symlink_to(file)
    gone = tiny_plan.model.files[2].name
    (broken / gone).unlink()
    with start(kind, tiny_plan, tmp_path, folder=str(broken)) as server, pytest.raises(ServerError) as caught:
        server.wait_ready()
    assert caught.value.code == "shard-missing"
    assert gone in (caught.value.cause or "")
    assert "engine.log" in (caught.value.hint or "")


def test_a_taken_port_is_refused_before_anything_starts(tiny_plan: Plan, tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(MachineError) as caught:
            start("embedded", tiny_plan, tmp_path, port=other.getsockname()[1])
    assert caught.value.code == "port-in-use"
    assert not (tmp_path / "engine.log").exists()


@pytest.mark.parametrize("kind", BOTH)
def test_the_engine_dies_with_a_killed_supervisor(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    """SIGKILL leaves the supervisor no chance to clean up; the kernel has to."""
    engine = real_engine(kind)
    write_plan(tiny_plan, tmp_path / "plan.json")
    port = free_port()
    made = command(
        tiny_plan, engine, profile=load_serving("kimi-k3"), port=port, plan_file=str(tmp_path / "plan.json"),
        known_flags=known_flags(engine, os.environ), environ=os.environ,
    )  # fmt: skip
    code = (
        "import sys, time; from pathlib import Path; from kimigguf.engines.supervise import Child\n"
        f"child = Child.start({list(made.argv)!r}, {dict(made.environ)!r}, Path({str(tmp_path / 'log')!r}))\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        try:
            assert until(lambda: is_open(port))
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait()
            assert until(lambda: not is_running(pid))
            assert until(lambda: not is_open(port))
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
