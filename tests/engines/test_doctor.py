"""The doctor names the cause in logs as the field knows them, and claims nothing about logs that show none.

The lines are llama.cpp's (build 11434 on a tiny K3, or its source); what needs other hardware is built from them.
"""

import pytest

from kimigguf.engines.doctor import Finding, Severity, _kinds, examine_log, examine_server, in_order

BEFORE = "0.00.002.002 I srv  llama_server: initializing ...\n0.00.003.486 I srv    load_model: loading model 'k3'\n"
FAILED = (
    "0.00.006.112 E llama_model_load_from_file_impl: failed to load model\n"
    "0.00.006.114 E srv    load_model: failed to load model, 'k3.gguf'\n"
    "0.00.006.489 E srv  llama_server: exiting due to model loading error\n"
)
LOAD = "llama_model_load: error loading model: "
KERNEL = (
    "the kernel killed it: its control group's limit of 64.0 GiB was reached "
    "(Memory cgroup out of memory: Killed process 7 (llama-server))"
)
FATAL_LOGS = [
    (
        LOAD + "illegal split file idx: 1 (file: k3-2), model must be loaded with the first split",
        "not-first-shard",
    ),
    ("gguf_init_from_file: failed to open GGUF file 'k3-3.gguf' (No such file or directory)", "shard-missing"),
    (LOAD + "tensor 'blk.2.x' data is not within the file bounds, model is corrupted or incomplete", "shard-damaged"),
    ("gguf_init_from_reader: invalid magic characters: 'S???', expected 'GGUF'", "shard-damaged"),
    (LOAD + "unknown model architecture: 'kimi-k3'", "engine-too-old"),
    ("gguf_init: tensor 'x' has invalid ggml type 66. should be in [0, 43)", "tensor-type-unknown"),
    (LOAD + "wrong number of tensors; expected 2760, got 2573", "layout-mismatch"),
    (LOAD + "missing tensor 'blk.0.attn_res_score.weight'", "layout-mismatch"),
    ("llama_init_from_model: model does not support different K (q8_0) and V (f16) cache types", "cache-types-differ"),
    ("srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port-in-use"),
    ("error: invalid argument: --cors-origins", "engine-flag-unknown"),
    ("ggml_cuda: allocating 39136.00 MiB on device 0: cudaMalloc failed: out of memory", "out-of-memory"),
    ("ggml_vulkan: Device memory allocation of size 1073741824 failed. ErrorOutOfDeviceMemory", "out-of-memory"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "out-of-memory"),
    # Real: the host's memory runs out while the graph is reserved; an assertion is what it dies of.
    ("ggml_aligned_malloc: insufficient memory (attempted to allocate 394.82 MB)", "out-of-memory"),
    # Real: under a limit of threads or of address space.
    ("  what():  Resource temporarily unavailable", "no-threads"),
    # Real: the supervisor's own line, with the kernel's in it.
    (
        "kimigguf 2026-11-30T10:12:01Z: the engine ended while serving: killed by SIGKILL; " + KERNEL,
        "oom-killed",
    ),
    (LOAD + "mmap failed: Cannot allocate memory", "out-of-memory"),
    ("llama_context: failed to allocate compute buffers", "out-of-memory"),
    ("common_fit_params: failed to fit params to free device memory: n_gpu_layers already set by user", "not-fitted"),
    (
        "llama-server: error while loading shared libraries: libcudart.so.13: cannot open",
        "engine-unusable",
    ),
    ("CUDA error: an illegal memory access was encountered", "device-error"),
]
OTHER_LOGS = [
    ("I slot release: id  0 | task 9 | stop processing: n_tokens = 8192, truncated = 1", "context-full"),
    ("W slot update_slots: id 0 | slot context shift, n_keep = 0, n_left = 4095, n_discard = 2047", "history-cut"),
    ("I slot: reusing chunk with size 512, shifting KV cache [900, 1412) -> [388, 900)", "history-cut"),
    ("LOG: encountered NaN - aborting", "not-a-number"),
    (
        "W srv: request (9000 tokens) exceeds the available context size (8192 tokens), try",
        "context-full",
    ),
    ("E srv  update_slots: Context size has been exceeded. off = 0", "context-full"),
    ("E srv    send_error: task id = 7, error: Compute error.", "compute-failed"),
    ("E srv: Failed to parse messages: Expected 'content' or 'tool_calls'", "bad-messages"),
    ("E srv: Failed to parse tool call arguments as JSON: unexpected end of input", "bad-tool-call"),
    ("E Unsupported thinking_effort=medium; supported values are low, high, and max.", "bad-effort"),
    ("W srv: Unauthorized: Invalid API Key", "bad-key"),
    ("E sampling: found nan in logits", "not-a-number"),
    ("ggml-rpc.cpp:35: Remote RPC server crashed or returned malformed response", "worker-lost"),
    ("warning: no usable GPU found, --gpu-layers option will be ignored", "no-gpu"),
    ("W sched_reserve: fused Gated Delta Net (chunked) not supported, set to disabled", "not-fused"),
    ("W /proc/sys/kernel/numa_balancing is enabled, this has been observed to impair performance", "numa-balancing"),
    ("W warning: failed to mlock 1000-byte buffer (after previously locking 0 bytes): Cannot", "not-locked"),
    ("I load_tensors:   CPU_REPACK model buffer size = 58000.00 MiB", "repacked"),
    ("W srv: security: no API key is set and CORS allows all origins (see https://x)", "open-to-pages"),
    ("W slot: cache reuse is not supported - ignoring n_cache_reuse = 256", "cache-reuse"),
]
HEALTHY = [
    "0.1 I srv    load_model: loading model '/models/nan/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf'",
    "1.1 I slot      release: id  1 | task 301 | stop processing: n_tokens = 1883, truncated = 0",
    "0.1 I srv  llama_server: initializing ...",
    "0.1 I load_tensors:   CPU_Mapped model buffer size =     1.20 MiB",
    "0.1 I llama_kv_cache:        CPU KV buffer size =     1.25 MiB",
    "0.1 I srv          init: model loaded",
    "0.1 I srv  llama_server: listening on http://127.0.0.1:8080",
    "0.1 I slot print_timing: id  0 | task 0 | prompt eval time = 89.82 ms / 345 tokens",
    "0.1 I srv  update_slots: all slots are idle",
    "0.1 I slot launch_slot_: id  0 | task 4 | processing task",
    "0.1 W load: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect",
    "0.1 I srv          init: chat template supports preserving reasoning, it is enabled by default",
    "",
]


@pytest.mark.parametrize(("line", "code"), FATAL_LOGS)
def test_the_cause_of_a_death_is_named_and_not_its_echoes(line: str, code: str) -> None:
    findings = examine_log(f"{BEFORE}0.00.005.632 E {line}\n{FAILED}")
    assert [finding.code for finding in findings if finding.severity is Severity.FATAL] == [code]
    assert findings[0].evidence in line
    assert findings[0].hint


@pytest.mark.parametrize(("line", "code"), OTHER_LOGS)
def test_what_fails_or_slows_a_living_server_is_named(line: str, code: str) -> None:
    (finding,) = examine_log(f"{BEFORE}0.9 {line}\n0.9 {line}\n")
    assert finding.code == code
    assert finding.severity is not Severity.FATAL
    assert finding.times == 2


@pytest.mark.parametrize("line", HEALTHY)
def test_nothing_is_claimed_about_a_log_without_symptoms(line: str) -> None:
    assert examine_log(BEFORE + line) == ()


def test_a_failed_load_without_a_word_why_is_still_a_failed_load() -> None:
    assert [finding.code for finding in examine_log(BEFORE + FAILED)] == ["load-failed"]


def test_llama_cpps_own_defaults_are_found_on_a_running_k3() -> None:
    params = {"temperature": 0.8, "top_k": 40, "min_p": 0.05}
    props = {"default_generation_settings": {"params": params}, "chat_template": "chatml", "total_slots": 4}
    assert [finding.code for finding in examine_server(props, is_k3=True)] == ["sampling", "template", "slots"]
    assert examine_server(props, is_k3=False) == ()


def test_a_server_as_kimigguf_starts_it_shows_nothing() -> None:
    params = {"temperature": 1.0, "top_k": 0, "min_p": 0.0}
    template = "<|open|> <|close|> <|end_of_msg|>"
    props = {"default_generation_settings": {"params": params}, "chat_template": template, "total_slots": 1}
    assert examine_server(props, is_k3=True) == ()
    assert examine_server({}, is_k3=True) == ()


def test_what_the_supervisor_wrote_into_the_log_is_read_again() -> None:
    text = (
        "kimigguf 2026-11-30T10:12:01Z: memory pressure: 12 % of the last 60 s stalled, the cgroup has 3.1 GiB left\n"
        "kimigguf 2026-11-30T10:12:31Z: the server lives (process 7) and does not answer /health: it hangs\n"
        "kimigguf 2026-11-30T10:13:31Z: memory pressure is over: 0 % of the last 60 s stalled\n"
    )
    found = {finding.code: finding for finding in examine_log(text)}
    assert set(found) == {"memory-pressure", "hung"}
    assert found["memory-pressure"].times == 1
    assert "3.1 GiB left" in found["memory-pressure"].evidence


@pytest.mark.parametrize(("architecture", "codes"), [("kimi-k3", ["no-parser"]), ("llama", [])])
def test_an_engine_that_knows_k3s_layers_and_not_its_format_is_found(architecture: str, codes: list[str]) -> None:
    text = f"0.1 I print_info: arch           = {architecture}\n0.2 I srv operator(): chat format: Content-only\n"
    assert [finding.code for finding in examine_log(text)] == codes


def test_of_two_findings_of_one_cause_the_first_is_shown_and_the_gravest_lead() -> None:
    def finding(code: str, severity: Severity, evidence: str) -> Finding:
        return Finding(code=code, severity=severity, message="", evidence=evidence, hint="")

    slow, fatal = finding("a", Severity.WORSE, "log"), finding("b", Severity.FATAL, "log")
    assert in_order((slow, finding("a", Severity.WORSE, "asked"), fatal)) == (fatal, slow)


def test_a_log_of_weeks_is_read_once_a_kind_of_line_and_every_line_is_counted() -> None:
    """Some fifty patterns on every line of such a log would take a minute."""
    line = "0.22.1 I slot update_slots: id  1 | task {} | prompt processing progress, n_tokens = 2048\n"
    bad = "srv    operator(): Invalid API Key from 10.0.0.{}\n"
    text = "".join(line.format(n) + (bad.format(n) if n % 1000 == 0 else "") for n in range(20_000))
    assert len(_kinds(text)) == 2
    (finding,) = examine_log(text)
    assert (finding.code, finding.times, finding.evidence) == ("bad-key", 20, bad.format(0).strip())
