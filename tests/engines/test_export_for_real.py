"""Exported files given to the real llama-server: it starts by them, answers, and has what the flags would give it."""

import json
import os
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import real_engine
from fakes.processes import ONE_THREAD, free_port, until

from kimigguf.engines.command import VARIABLES, command
from kimigguf.engines.discover import known_flags
from kimigguf.engines.export import Service
from kimigguf.engines.export_docker import docker_script
from kimigguf.engines.export_files import environment, preset, shell_script
from kimigguf.engines.export_systemd import systemd_unit
from kimigguf.engines.serving import load_serving
from kimigguf.placement.plan import Plan

pytestmark = [pytest.mark.native, pytest.mark.engine]
BARE = {"PATH": "/usr/bin:/bin", **ONE_THREAD}


@pytest.fixture
def made(tiny_plan: Plan) -> Service:
    engine, port = real_engine("llama-server"), free_port()
    profile = load_serving("kimi-k3", {})
    known = known_flags(engine, dict(os.environ))
    return Service(
        plan=tiny_plan,
        command=command(
            tiny_plan, engine, profile=profile, port=port, known_flags=known, extra=("--threads", "2", "--no-warmup")
        ),
        devices=(),
        variables={**{s.flag: s.variable for s in profile.settings if s.variable}, **VARIABLES},
        environ={},
        host="127.0.0.1",
        port=port,
        remake="kimigguf plan tiny",
    )


@contextmanager
def started(argv: list[str], folder: Path, *, text: str = "", environ: dict[str, str] | None = None) -> Iterator[Path]:
    """A program that runs while the block does, with ``text`` on its standard input; gives its log."""
    log = folder / "log"
    (folder / "stdin").write_text(text)
    with log.open("wb") as out, (folder / "stdin").open("rb") as stdin:
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=out, stderr=out, cwd=folder, env=environ or BARE, start_new_session=True
        )
        try:
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def ask(port: int, path: str, body: object = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def is_ready(port: int) -> bool:
    try:
        return bool(ask(port, "/health")["status"] == "ok")
    except OSError:
        return False


def answers(port: int, log: Path) -> str:
    """What the model says; fails with the log where nobody answers."""
    assert until(lambda: is_ready(port), seconds=60), log.read_text(errors="replace")[-3000:]
    body = {"model": "kimi-k3", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    reply = ask(port, "/v1/chat/completions", body)
    assert reply["usage"]["completion_tokens"] == 4
    return json.dumps(reply["choices"][0]["message"])


def settings(port: int) -> dict[str, Any]:
    """What a server says of itself, without what differs at each start."""
    props = ask(port, "/props")
    props.pop("media_marker")
    props["default_generation_settings"].pop("id", None)
    props["default_generation_settings"]["params"].pop("seed", None)
    return dict(props)


def buffers(log: Path) -> list[str]:
    """The sizes that the engine reports, and the marks of how it was told to load."""
    text = log.read_text(errors="replace")
    return re.findall(r"(\w+ (?:\w+ )?buffer size *= *[\d.]+ MiB|n_ctx(?:_seq)? += \d+|n_threads = \d+)", text)


def test_the_shell_script_starts_it_by_sh(made: Service, tmp_path: Path) -> None:
    with started(["sh"], tmp_path, text=shell_script(made).text) as log:
        assert answers(made.port, log)


def test_the_environment_gives_it_every_setting_that_the_flags_give_it(made: Service, tmp_path: Path) -> None:
    for name in ("flags", "env"):
        (tmp_path / name).mkdir()
    with started([*made.command.argv], tmp_path / "flags") as log:
        said = answers(made.port, log)
        by_flags, sizes = settings(made.port), buffers(log)
    export = environment(made)
    (tmp_path / "env" / "kimi-k3.env").write_text(export.text)
    start = next(line for line in export.text.splitlines() if line.startswith("# Start, in a shell: "))
    with started(["sh", "-c", start.partition(": ")[2]], tmp_path / "env") as log:
        assert answers(made.port, log) == said
        by_environment = settings(made.port)
        assert buffers(log) == sizes
        assert len(sizes) > 4
    assert by_environment == by_flags
    assert by_environment["model_alias"] == "kimi-k3"
    assert by_environment["default_generation_settings"]["params"]["top_k"] == 0


def test_the_preset_is_loaded_by_the_router_and_the_model_answers_through_it(made: Service, tmp_path: Path) -> None:
    export = preset(made)
    (tmp_path / "kimi-k3.ini").write_text(export.text)
    start = next(line for line in export.text.splitlines() if line.startswith("; Start: ")).removeprefix("; Start: ")
    environ = {**BARE, "HOME": str(tmp_path), "LLAMA_CACHE": str(tmp_path)}
    with started(shlex.split(start), tmp_path, environ=environ) as log:
        assert until(lambda: is_ready(made.port), seconds=60), log.read_text()
        loaded = until(
            lambda: any(
                model["id"] == "kimi-k3" and model["status"]["value"] == "loaded"
                for model in ask(made.port, "/v1/models")["data"]
            ),
            seconds=60,
        )
        assert loaded, log.read_text()[-3000:]
        assert answers(made.port, log)
        props = ask(made.port, "/props?model=kimi-k3")
        assert props["default_generation_settings"]["n_ctx"] == made.plan.settings.context_tokens
        assert (props["total_slots"], props["default_generation_settings"]["params"]["top_k"]) == (1, 0)
        asked = ask(made.port, "/v1/models")["data"][0]["status"]["args"]
        for words in (["--device", "none"], ["--fit", "off"], ["--cache-reuse", "0"], ["--threads", "2"]):
            assert asked[asked.index(words[0]) + 1] == words[1]
        assert {"--no-repack", "--no-op-offload", "--metrics", "--offline"} <= set(asked)


def test_the_unit_s_command_starts_it(made: Service, tmp_path: Path) -> None:
    """As systemd would: words by its quoting, variables in braces replaced, no shell."""
    key = tmp_path / "api-key"
    key.write_text("secret\n")
    argv = (*made.command.argv, "--api-key-file", "/etc/elsewhere")
    unit = systemd_unit(replace(made, command=replace(made.command, argv=argv), api_key_file="/etc/elsewhere")).text
    line = unit.replace(" \\\n", " ").partition("ExecStart=")[2].partition("\n")[0]
    words = [
        word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).replace("$$", "$").replace("%%", "%")
        for word in shlex.split(line)
    ]
    with started(words, tmp_path) as log:
        assert until(lambda: is_ready(made.port), seconds=60), log.read_text()[-3000:]
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(made.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        caught.value.close()
        assert caught.value.code == 401, "the key of the credential is asked for"


def test_the_containers_arguments_start_it(made: Service, tmp_path: Path) -> None:
    """The image cannot be had here: its program is llama-server, and it gets these arguments over these mounts."""
    words = shlex.split(docker_script(made).text.replace("\\\n", " ").splitlines()[-1])
    image = next(index for index, word in enumerate(words) if word.startswith("ghcr.io/"))
    arguments = words[image + 1 :]
    source = next(word for word in words if word.startswith("type=bind")).split(",")[1].removeprefix("src=")
    inside = {"--model": "/models", "--host": "0.0.0.0", "--port": "8080"}
    outside = {"--model": source, "--host": "127.0.0.1", "--port": str(made.port)}
    for flag, value in inside.items():
        place = arguments.index(flag) + 1
        assert value in arguments[place]
        arguments[place] = arguments[place].replace(value, outside[flag])
    with started([made.program[0], *arguments], tmp_path, environ={**BARE, "LLAMA_ARG_HOST": "0.0.0.0"}) as log:
        assert answers(made.port, log)


def test_every_variable_is_one_of_the_real_server_for_that_flag(made: Service) -> None:
    done = subprocess.run([made.program[0], "--help"], capture_output=True, text=True, check=True)
    entries = re.split(r"^(?=-[\w-])", done.stdout, flags=re.MULTILINE)[1:]
    said: dict[str, list[str]] = {}
    for entry in entries:
        head = re.match(r"(?:--?[\w.-]+,\s+)*--?[\w.-]+", entry)
        assert head is not None
        variables = re.findall(r"\(env: (\w+)\)", " ".join(entry.split()))
        said |= dict.fromkeys(re.findall(r"--?[\w.-]+", head[0]), variables)
    for flag, variable in made.variables.items():
        assert variable.replace("LLAMA_ARG_NO_", "LLAMA_ARG_") in said[flag], flag
