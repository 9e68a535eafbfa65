"""Logs of real failures (llama.cpp build 11434 and 10434 on a tiny K3) and texts of those that need hardware."""

import signal

import pytest

from kimigguf.engines.diagnose import Exit, diagnose, server_error, told_end
from kimigguf.engines.oom import Kills, explain

LOAD = "0.00.003.589 E srv    load_model: failed to load model, 'k3-00001-of-00005.gguf'\n"


CASES = {
    "not-first-shard": "llama_model_load: error loading model: illegal split file idx: 1 (file: k3-2.gguf), "
    "model must be loaded with the first split",
    "shard-missing": "gguf_init_from_file: failed to open GGUF file 'k3-3.gguf' (No such file or directory)",
    "shard-damaged": "llama_model_load: error loading model: tensor 'blk.2.ffn_routed_down.weight' data is not within "
    "the file bounds, model is corrupted or incomplete",
    "shard-damaged ": "gguf_init_from_reader: invalid magic characters: 'S???', expected 'GGUF'",
    "engine-too-old": "llama_model_load: error loading model: unknown model architecture: 'kimi-k3'",
    "tensor-type-unknown": "gguf_init_from_file: tensor 'blk.1.ffn_up_exps.weight' has invalid ggml type 66. should be "
    "in [0, 43)",
    "no-tls": "srv          init: the server is built without SSL support",
    "port-in-use": "srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18084",
    "cache-types-differ": "llama_init_from_model: model does not support different K (q8_0) and V (f16) cache types",
    "engine-flag-unknown": "error: invalid argument: --nonsense",
    "out-of-memory": "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 39136.00 MiB on device 0: cudaMalloc "
    "failed: out of memory",
    "not-fitted": "common_fit_params: failed to fit params to free device memory: n_gpu_layers already set by user",
    "engine-unusable": "llama-server: error while loading shared libraries: libcudart.so.13: cannot open shared object",
    "aborted": "/src/ggml/src/ggml.c:3129: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed",
    "aborted ": "terminate called after throwing an instance of 'std::out_of_range'",
    "layout-mismatch": "llama_model_load: error loading model: wrong number of tensors; expected 2760, got 2573",
}


@pytest.mark.parametrize(("code", "line"), CASES.items())
def test_the_line_that_matters_is_found_among_those_that_repeat_the_failure(line: str, code: str) -> None:
    before = "0.00.002.002 I srv  llama_server: initializing ...\n"
    after = "0.00.006.096 E srv  llama_server: exiting due to model loading error\n"
    stamp = "" if code in {"engine-flag-unknown", "engine-unusable"} else "0.00.003.582 E "
    found = diagnose(f"{before}{stamp}{line}\n{LOAD}{after}", Exit(code=1))
    assert found.code == code.strip()
    assert found.line is not None
    assert found.line in line  # without llama.cpp's time stamp
    assert len(found.line) > 20
    assert found.hint
    assert not found.may_pass


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, "killed"),
        (signal.SIGABRT, "aborted"),
        (signal.SIGILL, "illegal-instruction"),
        (signal.SIGBUS, "file-changed"),
    ],
)
def test_a_signal_without_words_is_explained(number: signal.Signals, code: str) -> None:
    found = diagnose("0.1 I load_tensors: loading\n", Exit(signal_number=number))
    assert found.code == code
    assert not found.may_pass


def test_a_disturbed_accelerator_may_recover_though_the_engine_aborts_over_it() -> None:
    log = "0.9 E CUDA error: unspecified launch failure\n/src/ggml-cuda.cu:103: CUDA error\n"
    assert diagnose(log, Exit(signal_number=signal.SIGABRT)).may_pass


def test_an_unknown_end_shows_the_last_error_and_claims_no_cause() -> None:
    found = diagnose("0.0.1 I all well\n0.0.2 E something odd happened\n0.0.3 I cleaning up\n", Exit(code=3))
    assert found.code == "server-died"
    assert found.line is not None
    assert "something odd" in found.line
    assert "exit code 3" in found.message
    assert diagnose("", Exit(code=1)).line is None


def test_the_error_names_the_log_and_exits_with_6() -> None:
    error = server_error(LOAD, Exit(code=1), log_path="/var/log/k.log", while_doing="loading")
    assert error.exit_code == 6
    assert "/var/log/k.log" in (error.hint or "")
    assert "loading" in error.message


def test_a_signal_number_the_platform_does_not_know_is_still_shown() -> None:
    assert str(Exit(signal_number=250)) == "killed by signal 250"
    assert diagnose("", Exit(signal_number=250)).code == "server-died"


def test_a_kill_that_was_not_for_memory_is_not_blamed_on_it() -> None:
    nobody = Kills(in_group=0, on_machine=0)
    error = server_error(
        "", Exit(signal_number=signal.SIGKILL), log_path=None, while_doing="serving", killer=explain(nobody, nobody)
    )
    assert error.code == "killed"
    assert "out of memory" not in f"{error.message} {error.hint}"
    assert "plan" not in (error.hint or "")
    assert "somebody else" in (error.cause or "")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("serving: killed by SIGKILL", "killed"),
        ("serving: killed by SIGKILL; no kill meanwhile, so somebody else sent the signal", "killed"),
        ("loading: killed by SIGILL", "illegal-instruction"),
        ("serving: killed by signal 250", "server-died"),
        ("testing itself: exit code 1", "server-died"),
    ],
)
def test_the_line_that_a_supervisor_leaves_is_understood(said: str, code: str) -> None:
    line = f"kimigguf 2026-11-30T12:00:00Z: the engine ended while {said}"
    found = told_end(f"all well\n{line}\n")
    assert found is not None
    assert (found.code, found.line) == (code, line)
    assert found.hint
    assert told_end("the engine ended while serving: killed by SIGKILL\n") is None  # a model's words, not ours
