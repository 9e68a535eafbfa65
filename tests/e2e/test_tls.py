"""A server with TLS from its start to its end: health, self-test, status, chat, Ollama's clients, all over https."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_k3
from fakes.certificates import make
from fakes.engines import native_folder
from fakes.processes import ONE_THREAD, free_port, until, with_word
from fakes.tls_engine import write_tls_engine

pytestmark = [pytest.mark.native, pytest.mark.engine]


def test_everything_that_asks_a_tls_server_is_answered_and_only_by_that_server(tmp_path: Path) -> None:
    engine = write_tls_engine(tmp_path / "bin" / "llama-server", native_folder() / "llama-server")
    files, port, ollama_port = make(tmp_path), free_port(), free_port()
    tiny_k3.write(tmp_path / "tiny")
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "KIMIGGUF_LLAMA_SERVER": str(engine),
        **ONE_THREAD,
    }

    def kimigguf(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kimigguf", *words],
            env=environ, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    out = tmp_path / "out"
    argv = ["serve", str(tmp_path / "tiny"), "--context", "4096", "--port", str(port)]
    argv += ["--ollama-api", "--ollama-port", str(ollama_port), "--", "--no-warmup"]
    argv += ["--ssl-key-file", str(files.key), "--ssl-cert-file", str(files.certificate)]
    with out.open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "kimigguf", *argv], env=environ, stdout=stdout, stderr=stdout, start_new_session=True
        )
        try:
            assert until(lambda: "Ctrl-C stops it" in out.read_text() or process.poll() is not None, seconds=120)
            shown = out.read_text()
            assert process.poll() is None, shown
            assert "PASSED  TLS" in shown
            assert "PASSED  long prompt" in shown, "the self-test speaks https"
            (server,) = json.loads(kimigguf("status", "--json").stdout)["servers"]
            assert (server["state"], server["url"]) == ("ready", f"https://127.0.0.1:{port}")
            assert server["slots"] == 1
            talk = kimigguf("chat", "--url", server["url"], "Hi", "--max-tokens", "4")
            assert talk.returncode == 0, talk.stderr
            assert kimigguf("chat", "Hi", "--max-tokens", "4").returncode == 0, "found without its address"
            # As it is shown, but for a short answer: random weights rarely end one by themselves.
            curl = shown.partition("  curl ")[2].partition("\n\n")[0].replace('"messages"', '"max_tokens":4,"messages"')
            said = subprocess.run(["sh", "-c", f"curl -sS {curl}"], capture_output=True, text=True, check=True).stdout
            assert json.loads(said)["choices"]
            bare = subprocess.run(
                shlex.split(f"curl -s https://127.0.0.1:{port}/health"), capture_output=True, check=False
            )
            assert bare.returncode == 60, "who was not told to does not trust it"
            tags = subprocess.run(
                ["curl", "-sS", f"http://127.0.0.1:{ollama_port}/api/tags"], capture_output=True, check=True
            )
            assert json.loads(tags.stdout)["models"][0]["name"] == "kimi-k3:latest"
            assert kimigguf("stop").returncode == 0
            process.wait(30)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert until(lambda: with_word(str(tmp_path)) == []), "nothing is left behind"


def test_an_engine_without_tls_is_refused_before_the_load(tmp_path: Path) -> None:
    files = make(tmp_path)
    tiny_k3.write(tmp_path / "tiny")
    argv = ["serve", str(tmp_path / "tiny"), "--port", str(free_port()), "--json", "--"]
    argv += ["--ssl-key-file", str(files.key), "--ssl-cert-file", str(files.certificate)]
    done = subprocess.run(
        [sys.executable, "-m", "kimigguf", *argv],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KIMIGGUF_LLAMA_SERVER": str(native_folder())},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    errors = [json.loads(line) for line in done.stderr.splitlines() if '"kimigguf.error/1"' in line]
    if not errors and done.returncode == 0:
        pytest.skip("this native engine has TLS")
    assert (done.returncode, errors[0]["code"]) == (3, "preflight-failed")
    assert "built without it" in errors[0]["cause"]
    assert "OpenSSL" in errors[0]["hint"]
