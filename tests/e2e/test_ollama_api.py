"""``serve --ollama-api``: Ollama's own clients, Python's and JavaScript's, on a K3 and a model that talks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import real_engine
from fakes.processes import ONE_THREAD, free_port, is_open, until
from fakes.served import small_model
from ollama import Client, ResponseError

pytestmark = pytest.mark.engine

HELLO = [{"role": "user", "content": "Hello"}]
EMBEDS = ("--", "--embeddings", "--pooling", "last")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "required": ["town"], "properties": {"town": {"type": "string"}}},
    },
}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You call functions. The functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""SmolLM2's own knows no tools; with this one, and three calls to go by, it makes one that llama-server parses."""
CLIENT_JS = """
import { Ollama } from 'ollama'
const ollama = new Ollama({ host: process.argv[2] })
const model = process.argv[3]
const listed = (await ollama.list()).models.map(found => found.name)
const messages = [{ role: 'user', content: 'Count from one to twenty.' }]
const whole = await ollama.chat({ model, messages, options: { num_predict: 6, temperature: 0 } })
let lines = 0, text = ''
const options = { num_predict: 6, temperature: 0 }
for await (const part of await ollama.chat({ model, messages, stream: true, options })) {
  lines += 1
  text += (part.message.thinking ?? '') + part.message.content
}
let refused = ''
try { await ollama.pull({ model: 'other' }) } catch (error) { refused = error.message }
const said = (whole.message.thinking ?? '') + whole.message.content
const { eval_count: counted, done_reason: reason } = whole
console.log(JSON.stringify({ listed, counted, reason, lines, text, said, refused }))
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


def start(target: Path, home: Path, *more: str, engine: str = "embedded") -> Served:
    """Start it, and wait until it is ready or has ended."""
    port, ollama_port = free_port(), free_port()
    argv = [
        sys.executable, "-m", "kimigguf", "serve", str(target), "--engine", engine, "--port", str(port),
        "--context", "4096", "--no-selftest", "--ollama-port", str(ollama_port), *more,
    ]  # fmt: skip
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), **ONE_THREAD}
    if engine == "llama-server":
        environ["KIMIGGUF_LLAMA_SERVER"] = real_engine("llama-server").path or ""
    out, err = home / "out", home / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(argv, env=environ, stdout=stdout, stderr=stderr, text=True, start_new_session=True)
    assert until(lambda: "Ctrl-C stops it" in out.read_text() or process.poll() is not None, seconds=120)
    return Served(process=process, port=port, ollama_port=ollama_port, errors=err, output=out)


@contextmanager
def kept(running: Served) -> Iterator[Served]:
    """It, ready, and stopped at the end."""
    try:
        assert running.process.poll() is None, running.errors.read_text()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            running.process.wait(30)


@pytest.fixture
def server(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    with kept(start(tiny("UD-IQ1_M"), tmp_path)) as running:
        yield running


@pytest.fixture(scope="module")
def k3(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny K3 on llama-server, with embeddings."""
    with kept(start(tiny("UD-IQ1_M"), tmp_path_factory.mktemp("k3"), *EMBEDS, engine="llama-server")) as running:
        yield running


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 on llama-server, with embeddings and a template that knows tools."""
    home = tmp_path_factory.mktemp("smol")
    (home / "tools.jinja").write_text(TEMPLATE)
    more = ("--alias", "smol", *EMBEDS, "--chat-template-file", str(home / "tools.jinja"))
    with kept(start(small_model()[0], home, *more, engine="llama-server")) as running:
        yield running


@pytest.fixture(scope="module")
def npm_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that uses npm's ollama; skips where npm or the package cannot be had."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm or node is not installed")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    (folder / "client.js").write_text(CLIENT_JS)
    try:
        got = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "ollama"],
            cwd=folder, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip("npm install ollama took more than 30 s")
    if got.returncode:
        pytest.skip(f"npm cannot install ollama: {got.stderr[-200:]}")
    return folder / "client.js"


@pytest.mark.native
@pytest.mark.parametrize(
    ("which", "model", "capabilities"),
    [
        ("k3", "kimi-k3", ["completion", "tools", "thinking", "embedding"]),
        ("smol", "smol", ["completion", "tools", "embedding"]),
    ],
)
def test_ollamas_python_client_runs_its_whole_surface(
    which: str, model: str, capabilities: list[str], request: pytest.FixtureRequest
) -> None:
    running: Served = request.getfixturevalue(which)
    options = {"num_predict": 6, "temperature": 0}
    with Client(host=running.host, timeout=60) as client:
        assert [found.model for found in client.list().models] == [f"{model}:latest"]
        shown = client.show(model)
        assert shown.capabilities == capabilities
        assert shown.template
        assert client.ps().models[0].context_length == 4096

        whole = client.chat(model, HELLO, options=options)
        parts = list(client.chat(model, HELLO, stream=True, options=options))
        for kind in ("content", "thinking"):
            streamed = "".join(getattr(part.message, kind) or "" for part in parts)
            assert streamed == (getattr(whole.message, kind) or "")
        assert whole.message.content or whole.message.thinking
        assert (parts[-1].done, parts[-1].eval_count) == (True, whole.eval_count)
        again = client.chat(model, [*HELLO, whole.message, *HELLO], options=options)
        assert (again.prompt_eval_count or 0) > (whole.prompt_eval_count or 0)
        likely = client.chat(model, HELLO, options=options, logprobs=True, top_logprobs=2)
        assert len(likely.logprobs or ()) >= 1

        assert client.generate(model, "Hello", options=options).eval_count
        assert "".join(
            part.response or "" for part in client.generate(model, "1 2 3", raw=True, stream=True, options=options)
        )

        vectors = client.embed(model, ["a cat", "a kitten", "a tax form"]).embeddings
        assert len(vectors) == 3
        assert all(sum(value * value for value in vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
        assert len(client.embed(model, "a cat", dimensions=8).embeddings[0]) == 8
        assert len(client.embeddings(model, "a cat").embedding) == len(vectors[0])

        for call in (client.pull, client.push, client.delete):
            with pytest.raises(ResponseError, match="does not manage models"):
                call(model)
        with pytest.raises(ResponseError, match="does not manage models"):
            client.copy(model, "mine")
        with pytest.raises(ResponseError, match="does not manage models"):
            client.create("mine", from_=model)
        with pytest.raises(ResponseError, match="not found"):
            client.chat("other", HELLO)


@pytest.mark.native
@pytest.mark.parametrize(("which", "model"), [("k3", "kimi-k3"), ("smol", "smol")])
def test_an_answer_keeps_to_json_and_to_a_schema(which: str, model: str, request: pytest.FixtureRequest) -> None:
    running: Served = request.getfixturevalue(which)
    schema = {"type": "object", "required": ["sure"], "properties": {"sure": {"type": "boolean"}}}
    asked = [{"role": "user", "content": 'Is the sky blue? Answer as JSON, {"sure": true} or {"sure": false}.'}]
    # A grammar lets a model of random weights put up to 22 blanks in each gap: all of them must have room.
    options = {"num_predict": 200, "temperature": 0}
    with Client(host=running.host, timeout=60) as client:
        for think in (None, False):
            told = client.chat(model, asked, format=schema, think=think, options=options)
            assert json.loads(told.message.content or "")["sure"] in {True, False}
        made = client.generate(model, "Is the sky blue?", format=schema, stream=True, options=options)
        assert json.loads("".join(part.response or "" for part in made))["sure"] in {True, False}
        assert (client.chat(model, asked, format="json", options=options).message.content or "").startswith("{")


@pytest.mark.native
def test_a_call_comes_back_and_its_result_is_heard(smol: Served) -> None:
    def exchange(town: str) -> list[dict[str, Any]]:
        call = {"function": {"name": "weather", "arguments": {"town": town}}}
        return [
            {"role": "user", "content": f"Weather in {town}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "weather", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ]

    before = [message for town in ("Bergen", "Rome", "Cairo") for message in exchange(town)]
    asked = [*before, {"role": "user", "content": "Weather in Oslo?"}]
    options = {"num_predict": 60, "temperature": 0}
    with Client(host=smol.host, timeout=60) as client:
        reply = client.chat("smol", asked, tools=[TOOL], options=options)
        assert reply.message.tool_calls is not None
        (call,) = reply.message.tool_calls
        assert (call.function.name, dict(call.function.arguments)) == ("weather", {"town": "Oslo"})
        parts = list(client.chat("smol", asked, tools=[TOOL], options=options, stream=True))
        assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [[call]]
        result = {"role": "tool", "tool_name": "weather", "content": "rain"}
        last = client.chat("smol", [*asked, reply.message, result], tools=[TOOL], options=options)
        assert "rain" in (last.message.content or "").lower()


@pytest.mark.native
@pytest.mark.parametrize(("which", "model"), [("k3", "kimi-k3"), ("smol", "smol")])
def test_npms_ollama_client_lists_chats_and_streams(
    which: str, model: str, request: pytest.FixtureRequest, npm_client: Path
) -> None:
    running: Served = request.getfixturevalue(which)
    done = subprocess.run(
        ["node", npm_client.name, running.host, model],
        cwd=npm_client.parent, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["listed"] == [f"{model}:latest"]
    assert (answer["counted"], answer["reason"]) == (6, "length")
    assert answer["lines"] > 1
    assert answer["text"] == answer["said"] != ""
    assert "kimigguf download" in answer["refused"]


def test_the_embedded_engine_answers_too_and_ctrl_c_leaves_no_port(server: Served) -> None:
    assert f"OLLAMA_HOST={server.host}" in server.output.read_text()
    options = {"num_predict": 6}
    with Client(host=server.host, timeout=60) as client:
        assert client.show("kimi-k3").capabilities == ["completion", "tools", "thinking"]
        whole = client.chat("kimi-k3", HELLO, options={**options, "num_ctx": 1_000_000})
        assert whole.message.thinking
        assert (whole.done_reason, whole.eval_count) == ("length", 6)
        # A tool makes the prompt longer, so it reached the template; and so does what it answered.
        tooled = client.chat("kimi-k3", HELLO, tools=[TOOL], options=options)
        assert (tooled.prompt_eval_count or 0) > (whole.prompt_eval_count or 0)
        call = {"function": {"name": "weather", "arguments": {"town": "Oslo"}}}
        made = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
        told = client.chat("kimi-k3", [*HELLO, *made], tools=[TOOL], options=options)
        assert (told.prompt_eval_count or 0) > (tooled.prompt_eval_count or 0)
        with pytest.raises(ResponseError, match="--engine llama-server"):
            client.embed("kimi-k3", "a")
    assert "1000000 asked, the engine was started with 4096" in server.errors.read_text()
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
