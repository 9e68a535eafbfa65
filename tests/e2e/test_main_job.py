"""The main job on real input: one command, from a hub to two answered turns, and nothing left behind.

The hub is on loopback and holds tiny random K3 shards under the real names; client, engine and server are real.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from fakes.catalogue import without_facts
from fakes.engines import BOTH, native_folder
from fakes.hub import Hub, serve
from fakes.processes import ONE_THREAD, free_port, is_open, until, with_word
from openai import OpenAI

from kimigguf.catalogue.profiles import load_model

QUANT = "UD-IQ1_M"
REPOSITORY = load_model().repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    assert REPOSITORY.id is not None
    tiny_k3.write(root / REPOSITORY.id / QUANT, quant=QUANT)
    return root


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    assert REPOSITORY.commit is not None
    with serve(repository, commit=REPOSITORY.commit) as running:
        yield running


@dataclass(slots=True, kw_only=True)
class House:
    """One user's machine: folders of its own, a port, and the hub that its environment names."""

    home: Path
    hub_url: str
    engine: str = "embedded"
    port: int = field(default_factory=free_port)
    tested: bool = False
    """Whether serve tests itself before it says ready: once is enough for all of these tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environ(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HF_ENDPOINT": self.hub_url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "KIMIGGUF_MODELS": str(self.home / "models"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            **without_facts(self.home),
            **ONE_THREAD,
        } | ({"KIMIGGUF_LLAMA_SERVER": str(native_folder())} if self.engine == "llama-server" else {})

    def argv(self, *more: str) -> list[str]:
        engine = ["--engine", self.engine, *([] if self.tested else ["--no-selftest"])]
        return [sys.executable, "-m", "kimigguf", "serve", QUANT, "--port", str(self.port), *engine, *more]

    def run(self, *more: str) -> "subprocess.CompletedProcess[str]":
        """Run it to its own end: for everything that must not get as far as serving."""
        return subprocess.run(
            self.argv(*more), env=self.environ(), capture_output=True, text=True, timeout=120, check=False
        )

    @contextlib.contextmanager
    def serving(self, *more: str) -> "Iterator[subprocess.Popen[str]]":
        """Run it until it is ready; what it says goes to files, as a full pipe would stop it."""
        out, err = self.home / "out", self.home / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                self.argv(*more), env=self.environ(), stdout=stdout, stderr=stderr, text=True, start_new_session=True
            )
        try:
            ready = until(lambda: "Ctrl-C stops it" in out.read_text() or process.poll() is not None, seconds=120)
            assert ready, err.read_text()
            assert process.poll() is None, err.read_text()
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def stop(self, process: "subprocess.Popen[str]", number: int = signal.SIGINT) -> int:
        process.send_signal(number)
        return process.wait(30)

    def said(self) -> str:
        return (self.home / "err").read_text()

    def shards(self) -> list[Path]:
        return sorted((self.home / "models").rglob("*.gguf"))

    def error(self, *more: str) -> tuple[int, dict[str, Any]]:
        """The exit code and the error as JSON."""
        done = self.run("--json", *more)
        records = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        errors = [record for record in records if record["schema"] == "kimigguf.error/1"]
        assert len(errors) == 1, done.stderr
        return done.returncode, errors[0]

    def left_behind(self) -> list[int]:
        return with_word(str(self.home))


def ask_twice(url: str) -> list[str]:
    """Two turns by the openai client, the second with the whole first message."""
    thoughts = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        for question in ("And again?", None):
            choice = client.chat.completions.create(model="kimi-k3", messages=messages, max_tokens=8).choices[0]
            message = choice.message.model_dump(exclude_none=True)
            thoughts.append(message["reasoning_content"])
            messages += [message, {"role": "user", "content": question}]
    return thoughts


@pytest.mark.parametrize("engine", BOTH)
def test_one_command_from_a_hub_to_two_turns_and_back_to_nothing(hub: Hub, tmp_path: Path, engine: str) -> None:
    house = House(home=tmp_path, hub_url=hub.url, engine=engine, tested=True)
    with house.serving() as process:
        assert all(ask_twice(house.url))
        assert house.stop(process) == 130
    assert until(lambda: not is_open(house.port))
    assert until(lambda: house.left_behind() == [])
    said = house.said()
    assert str(REPOSITORY.commit)[:12] in said
    assert len(house.shards()) > 2
    printed = (tmp_path / "out").read_text()
    assert "second turn" in printed
    for needed in (f"{house.url}/v1", "curl ", "from openai import OpenAI", "reasoning_content", "ssh -N -L"):
        assert needed in printed

    fetched = len(hub.gets(".gguf"))
    assert fetched >= len(house.shards())
    hub.requests.clear()
    house.tested = False
    with house.serving() as process:
        assert all(ask_twice(house.url))
        house.stop(process)
    assert hub.requests == []  # not even a listing: everything is here
    assert "hashing" not in house.said()  # nor read again: nothing has been touched


@pytest.fixture
def stocked(hub: Hub, tmp_path: Path) -> House:
    """A house that holds the verified set."""
    house = House(home=tmp_path, hub_url=hub.url)
    argv = [sys.executable, "-m", "kimigguf", "download", QUANT]
    subprocess.run(argv, env=house.environ(), check=True, capture_output=True, timeout=120)
    return house


@pytest.mark.engine
def test_a_flipped_byte_in_any_shard_is_found_before_the_engine_starts(stocked: House) -> None:
    for shard in stocked.shards():
        original = shard.read_bytes()
        with shard.open("r+b") as file:
            file.seek(len(original) - 100)
            file.write(bytes([original[-100] ^ 1]))
        code, error = stocked.error()
        assert code == 5
        assert shard.name in error["message"]
        assert error["hint"]
        shard.write_bytes(original)
    assert list((stocked.home / "state").rglob("*.log")) == []  # no engine was started
    with stocked.serving() as process:  # put back as it was, it is whole again
        stocked.stop(process)


@pytest.mark.engine
def test_a_missing_shard_without_download_is_named(stocked: House, hub: Hub) -> None:
    gone = stocked.shards()[1]
    gone.unlink()
    hub.requests.clear()
    code, error = stocked.error("--no-download")
    assert code == 5
    assert gone.name in error["message"]
    assert hub.requests == []
    with stocked.serving() as process:  # with the hub it is fetched, and it alone
        stocked.stop(process)
    assert {Path(request.file or "").name for request in hub.gets(".gguf")} == {gone.name}


@pytest.mark.engine
def test_a_shard_cut_short_is_named(stocked: House) -> None:
    cut = stocked.shards()[2]
    os.truncate(cut, cut.stat().st_size - 1000)
    code, error = stocked.error()
    assert code == 5
    assert cut.name in error["message"]


@pytest.mark.engine
def test_nothing_is_fetched_before_the_engine_is_known_to_do(hub: Hub, tmp_path: Path) -> None:
    house = House(home=tmp_path, hub_url=hub.url)
    code, error = house.error("--engine-path", str(tmp_path / "nothing"), "--engine", "llama-server")
    assert code == 3
    assert str(tmp_path / "nothing") in error["message"]
    assert "pip install" in error["hint"]
    assert hub.requests == []


def test_no_hub_says_what_works_without_it(tmp_path: Path) -> None:
    house = House(home=tmp_path, hub_url=f"http://127.0.0.1:{free_port()}")
    code, error = house.error()
    assert code == 4
    assert "kimigguf serve PATH" in error["hint"]


@pytest.mark.engine
def test_a_verified_set_is_served_without_a_hub(stocked: House) -> None:
    stocked.hub_url = f"http://127.0.0.1:{free_port()}"
    with stocked.serving() as process:
        assert all(ask_twice(stocked.url))
        stocked.stop(process)


def test_ctrl_c_while_downloading_leaves_nothing_that_looks_whole(hub: Hub, tmp_path: Path) -> None:
    hub.bytes_per_second = 200_000
    house = House(home=tmp_path, hub_url=hub.url)
    process = subprocess.Popen(
        house.argv(), env=house.environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert until(lambda: any((tmp_path / "models").rglob("*.part")), seconds=30)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    whole = {file.name: file.stat().st_size for file in house.shards()}
    listed = {file.name: file.stat().st_size for file in (hub.commits[str(REPOSITORY.commit)]).rglob("*.gguf")}
    assert len(whole) < len(listed)
    assert all(listed[name] == size for name, size in whole.items())
    assert house.left_behind() == []


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_service_or_a_closed_terminal_leaves_no_engine(stocked: House, number: int) -> None:
    with stocked.serving() as process:
        assert stocked.stop(process, number) == 130
    assert until(lambda: stocked.left_behind() == [])
    assert until(lambda: not is_open(stocked.port))


@pytest.mark.engine
def test_a_killed_serve_leaves_no_engine(stocked: House) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent was killed")
    with stocked.serving() as process:
        stocked.stop(process, signal.SIGKILL)
    assert until(lambda: stocked.left_behind() == [])
    assert until(lambda: not is_open(stocked.port))


@pytest.mark.engine
def test_an_engine_that_dies_while_serving_ends_serve_with_6(stocked: House) -> None:
    with stocked.serving() as process:
        (engine,) = [pid for pid in stocked.left_behind() if pid != process.pid]
        os.kill(engine, signal.SIGKILL)
        assert process.wait(30) == 6
    assert "SIGKILL" in stocked.said()
