"""What goes wrong with llama.cpp, by the words it says about it: a table, the most telling entries first.

The words are llama.cpp's own (build 11434 and, for what is older, 10434), read in its source or seen in its logs.
"""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Words in a log and what they mean. ``may_pass``: another try could succeed."""

    pattern: re.Pattern[str]
    code: str
    message: str
    hint: str
    may_pass: bool = False


def symptom(pattern: str, code: str, message: str, hint: str, *, may_pass: bool = False) -> Symptom:
    return Symptom(pattern=re.compile(pattern, re.IGNORECASE), code=code, message=message, hint=hint, may_pass=may_pass)


LESS_MEMORY: Final = (
    "free memory on that device, or plan again with a smaller --context or --ubatch: kimigguf plan QUANT"
)
FATAL: Final = (
    symptom(
        r"the kernel killed it|out of memory: Killed process \d+ \((?:llama|python|kimigguf)",
        "oom-killed",
        "the kernel killed the engine because memory ran out",
        LESS_MEMORY,
    ),
    symptom(
        r"illegal split file idx",
        "not-first-shard",
        "the engine was given a shard that is not the first",
        "name any shard or the folder to kimigguf serve: it finds the first one itself",
    ),
    symptom(
        r"failed to open GGUF file .*No such file",
        "shard-missing",
        "a shard of the set is missing",
        "run: kimigguf verify QUANT, then kimigguf download QUANT",
    ),
    symptom(
        r"data is not within the file bounds|model is corrupted or incomplete|failed to read|invalid magic",
        "shard-damaged",
        "a shard is cut short or is no GGUF",
        "run: kimigguf verify QUANT - it names the shard - then kimigguf download QUANT",
    ),
    symptom(
        r"unknown model architecture",
        "engine-too-old",
        "the engine does not know this model's architecture",
        "use llama.cpp build 10448 or later, or --engine embedded",
    ),
    symptom(
        r"has invalid ggml type|invalid ggml type|unknown (?:ggml )?type",
        "tensor-type-unknown",
        "the files hold a tensor type that this engine cannot read",
        "choose another quant (kimigguf recommend), or the fork of llama.cpp that made this one",
    ),
    symptom(
        r"tensors expected|wrong number of tensors|missing tensor|check_tensor_dims|has wrong shape",
        "layout-mismatch",
        "the files do not have the tensors that the engine expects for this architecture",
        "they may come from before the final layout: run kimigguf download QUANT again, and update the engine",
    ),
    symptom(
        r"different K .* and V .* cache types|V cache quantization requires flash",
        "cache-types-differ",
        "the engine refuses this combination of KV cache types",
        "leave the cache types to the plan: --kv-type sets both",
    ),
    symptom(
        r"server is built without SSL support",
        "no-tls",
        "the engine was built without TLS, and was given a key and a certificate",
        "use a llama.cpp built with OpenSSL (--engine-path DIR), a TLS proxy in front, or ssh -N -L",
    ),
    symptom(
        r"couldn't bind|address already in use|bind HTTP server socket",
        "port-in-use",
        "the port is taken by another program",
        "choose another with --port",
    ),
    symptom(
        r"invalid argument: |error while handling argument|unknown argument",
        "engine-flag-unknown",
        "the engine does not know one of the options it was given",
        "check what stands after --; if the option that is named is not there, update the engine, or use --engine "
        "embedded",
    ),
    symptom(
        r"out of memory(?!: Killed process)|insufficient memory|OutOfDeviceMemory|failed to allocate|unable to allocate"
        r"|bad_alloc|cannot allocate memory",
        "out-of-memory",
        "the engine could not get the memory it needs",
        LESS_MEMORY,
    ),
    symptom(
        r"failed to fit params",
        "not-fitted",
        "the engine could not fit the model and would have gone on without",
        LESS_MEMORY,
    ),
    symptom(
        r"error while loading shared libraries|symbol lookup error|version `GLIBC|no kernel image|cannot open shared",
        "engine-unusable",
        "the engine does not run on this machine: a library or a kernel for this hardware is missing",
        "install its libraries, or use --engine embedded",
    ),
    symptom(
        r"what\(\): +Resource temporarily unavailable",
        "no-threads",
        "the engine may not start a thread: a limit of processes or of address space stands against it",
        "raise it: ulimit -u unlimited; ulimit -v unlimited; or TasksMax= and LimitAS= of the systemd unit",
    ),
    # Before the accelerators' own errors: what is not handled ends the same way each time.
    symptom(
        r"GGML_ASSERT\(|terminate called|libc\+\+abi: terminating|pure virtual method called",
        "aborted",
        "the engine gave up: a check of its own failed, or an error that it does not handle",
        "see the log; another build of the engine may not have the fault: --engine-path DIR",
    ),
    symptom(
        r"CUDA error|ROCm error|ggml_cuda_error|hipError|vk::\w+Error|device lost",
        "device-error",
        "the accelerator's driver reported an error",
        "see the log; a restart helps where another program disturbed the device",
        may_pass=True,
    ),
    symptom(
        r"failed to create.?context",
        "no-context",
        "the engine loaded the model but could not create its context",
        LESS_MEMORY,
    ),
    symptom(
        r"the embedded engine did not start|failed to load model|error loading model",
        "load-failed",
        "the engine could not load the model",
        "run: kimigguf verify QUANT; if the set is whole, see the log",
    ),
)

SERVING: Final = (
    symptom(
        r"exceeds the available context size|Context size has been exceeded|failed to find a memory slot"
        r"|truncated = 1\b|context shift is disabled",
        "context-full",
        "requests are longer than a slot's context: short ones work, long ones fail",
        "serve with a larger --context, or fewer --slots: they share it",
    ),
    symptom(
        r"failed to decode, ret = -3|Compute error\.",
        "compute-failed",
        "a batch could not be computed: memory that fitted a short prompt did not fit a long one",
        "plan again with a smaller --ubatch, and serve without --no-selftest: it tries a full batch first",
    ),
    symptom(
        r"slot context shift|reusing chunk with size",
        "history-cut",
        "parts of a conversation are moved or dropped in the cache, which K3's recurrent state does not survive: later "
        "turns answer something else",
        "serve with --cache-reuse 0 and without --context-shift, as kimigguf serve does, and with enough --context",
    ),
    symptom(
        r"Failed to parse messages",
        "bad-messages",
        "a client sends messages that the server cannot read",
        "send back the assistant's message whole, as the server gave it: with reasoning_content and tool_calls",
    ),
    symptom(
        r"Failed to parse tool call arguments as JSON|Failed to parse tools|Failed to parse input at pos",
        "bad-tool-call",
        "a tool call or a tool's description is no valid JSON",
        "look at the request in the client's log; the arguments of a call go back as the string that came",
    ),
    symptom(
        r"thinking_effort|Unsupported.*effort",
        "bad-effort",
        "a client asks for a thinking effort that the template does not know",
        "low, high and max are the ones that K3 knows",
    ),
    symptom(
        r"Invalid API Key|Unauthorized",
        "bad-key",
        "a client calls without the right API key",
        "give the client the key that stands in the file of --api-key-file",
    ),
    symptom(
        r"\bnans? (?:detected|found|in (?:the )?(?:logits|output|tensor))|(?:found|encountered|contains?) nan\b",
        "not-a-number",
        "the model computes no numbers any more: answers are gibberish",
        "with CUDA 13.2.0 or 13.2.1 use an engine built with another version; else: kimigguf verify QUANT",
    ),
    symptom(
        r"Remote RPC server crashed|Failed to connect to \S+:\d+",
        "worker-lost",
        "an RPC worker died or cannot be reached",
        "see that worker's log and memory; RPC belongs on loopback or a network you trust",
    ),
)
"""What a running server's log shows of requests that fail."""
SLOW: Final = (
    symptom(
        r"^kimigguf \S+: memory pressure: ",
        "memory-pressure",
        "memory ran short while it served; once it is used up, the kernel ends the engine",
        "end what else uses memory, or serve with a smaller --context, fewer --slots or a smaller quant",
    ),
    symptom(
        r"^kimigguf \S+: the server lives .* it hangs",
        "hung",
        "the server lived and did not answer for a while",
        "see the lines before it; if the disk or the accelerator stood still: kimigguf restart",
    ),
    symptom(
        r"no usable GPU found|compiled without (?:GPU )?support for GPU|compiled without GPU support",
        "no-gpu",
        "the engine uses no GPU",
        "use an engine built for this GPU: --engine-path DIR",
    ),
    symptom(
        r"fused Gated Delta Net \([a-z]+\) not supported",
        "not-fused",
        "KDA layers run unfused, because a part of one lies on another device",
        "place whole layers on a device and leave experts on the host: kimigguf plan does",
    ),
    symptom(
        r"numa_balancing is enabled",
        "numa-balancing",
        "the kernel moves memory between sockets while the model runs: half the speed",
        "echo 0 | sudo tee /proc/sys/kernel/numa_balancing",
    ),
    symptom(
        r"failed to mlock",
        "not-locked",
        "the model could not be locked in memory, so parts of it may be dropped and read again",
        "raise the limit: ulimit -l unlimited",
    ),
    symptom(
        r"CPU_REPACK model buffer size",
        "repacked",
        "experts were copied into anonymous memory: twice the bytes, and no paging from disk",
        "serve without repacking: kimigguf serve does unless the plan says otherwise",
    ),
    symptom(
        r"CORS allows all origins",
        "open-to-pages",
        "every web page that is open in a browser on this machine can talk to the server",
        "start it with kimigguf serve, or with --cors-origins localhost",
    ),
    symptom(
        r"cache reuse is not supported",
        "cache-reuse",
        "somebody asked for partial prompt reuse, which K3's recurrent state does not allow",
        "leave --cache-reuse at 0",
    ),
)
"""What works, and worse than it could."""
