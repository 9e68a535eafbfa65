"""``serve --ollama-api``: Ollama's own clients, Python's and JavaScript's, on a K3 that kimigguf serves."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.processes import free_port, is_open, until
from ollama import Client

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "required": ["town"], "properties": {"town": {"type": "string"}}},
    },
}
CHAT_JS = """
import { Ollama } from 'ollama'
const ollama = new Ollama({ host: process.argv[2] })
const messages = [{ role: 'user', content: 'Hello' }]
const whole = await ollama.chat({ model: 'kimi-k3', messages, options: { num_predict: 6 } })
let lines = 0, thinking = ''
for await (const part of await ollama.chat({ model: 'kimi-k3', messages, stream: true, options: { num_predict: 6 } })) {
  lines += 1
  thinking += part.message.thinking ?? ''
}
console.log(JSON.stringify({ counted: whole.eval_count, reason: whole.done_reason, lines, thinking }))
"""


@dataclass(slots=True, kw_only=True)
class Served:
    process: "subprocess.Popen[str]"
    port: int
    ollama_port: int
    errors: Path
    output: Path

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self.ollama_port}"


def start(tiny: Path, home: Path, *more: str) -> Served:
    """Start it, and wait until it is ready or has ended."""
    port, ollama_port = free_port(), free_port()
    argv = [
        sys.executable, "-m", "kimigguf", "serve", str(tiny), "--engine", "embedded", "--port", str(port),
        "--context", "4096", "--no-selftest", "--ollama-port", str(ollama_port), *more,
    ]  # fmt: skip
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    out, err = home / "out", home / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(argv, env=environ, stdout=stdout, stderr=stderr, text=True, start_new_session=True)
    assert until(lambda: "Ctrl-C stops it" in out.read_text() or process.poll() is not None, seconds=120)
    return Served(process=process, port=port, ollama_port=ollama_port, errors=err, output=out)


@pytest.fixture
def server(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    running = start(tiny("UD-IQ1_M"), tmp_path)
    try:
        assert running.process.poll() is None, running.errors.read_text()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.wait(30)


def test_ollamas_python_client_runs_its_surface_and_ctrl_c_leaves_no_port(server: Served) -> None:
    assert f"OLLAMA_HOST={server.host}" in server.output.read_text()
    options = {"num_predict": 6}
    with Client(host=server.host, timeout=60) as client:
        assert [model.model for model in client.list().models] == ["kimi-k3:latest"]
        assert "thinking" in (client.show("kimi-k3").capabilities or ())
        assert client.ps().models[0].context_length == 4096
        whole = client.chat("kimi-k3", HELLO, options=options)
        assert whole.message.thinking
        assert (whole.done_reason, whole.eval_count) == ("length", 6)
        parts = list(client.chat("kimi-k3", [*HELLO, whole.message, *HELLO], stream=True, options=options))
        assert "".join(part.message.thinking or "" for part in parts)
        assert parts[-1].done
        assert client.generate("kimi-k3", "Hello", options=options).eval_count == 6
        # A tool makes the prompt longer, so it reached the template.
        tooled = client.chat("kimi-k3", HELLO, tools=[TOOL], options=options)
        assert (tooled.prompt_eval_count or 0) > (whole.prompt_eval_count or 0)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 130
    assert not is_open(server.ollama_port)
    assert not is_open(server.port)
    assert "Traceback" not in server.errors.read_text()


def test_an_answer_under_way_does_not_keep_it_from_stopping(server: Served) -> None:
    with Client(host=server.host, timeout=60) as client:
        stream = iter(client.chat("kimi-k3", HELLO, stream=True, options={"num_predict": 3000}))
        next(stream)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130
    assert not is_open(server.ollama_port)
    assert "Traceback" not in server.errors.read_text()


def test_a_killed_engine_takes_the_bridge_with_it(server: Served) -> None:
    import psutil

    engines = psutil.Process(server.process.pid).children()
    for engine in engines:
        engine.kill()
    assert engines
    assert server.process.wait(30) == 6
    assert not is_open(server.ollama_port)


def test_npms_ollama_client_chats_whole_and_streamed(server: Served, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm or node is not installed")
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    (folder / "chat.js").write_text(CHAT_JS)
    try:
        got = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "ollama"],
            cwd=folder, capture_output=True, text=True, timeout=15, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip("npm install ollama took more than 15 s")
    if got.returncode:
        pytest.skip(f"npm cannot install ollama: {got.stderr[-200:]}")
    done = subprocess.run(
        [node, "chat.js", server.host], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["counted"], answer["reason"]) == (6, "length")
    assert answer["lines"] > 1
    assert answer["thinking"]
