"""Arguments that a user hands on to llama-server: taken as they are, unless they would undo what the plan stands on."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Final

from kimigguf.engines.engine import EngineKind
from kimigguf.engines.tls import CERTIFICATE_FLAG, KEY_FLAG
from kimigguf.errors import UsageError
from kimigguf.memory import server_flags
from kimigguf.memory.flags import spelled

_PLACED: Final = "the plan places every tensor; llama.cpp's fitting gives up in silence where the two are mixed"
_COUNTED: Final = "the plan's memory stands on it"
_OURS: Final = "kimigguf gives it, and watches the server by it"
_OPEN: Final = "it lets a model or a web page act on this machine"
_REASONS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    _PLACED: (
        "ask the plan instead: kimigguf plan",
        (
            "-ngl", "--gpu-layers", "--n-gpu-layers", "-ts", "--tensor-split", "-ot", "--override-tensor", "-cmoe",
            "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn", "-sm", "--split-mode", "-mg", "--main-gpu",
            "-dev", "--device", "--rpc", "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx", "--no-host",
            "--op-offload", "--no-op-offload", "--mmproj-offload", "--no-mmproj-offload", "-mmdev", "--mmproj-device",
            "-otd", "--override-tensor-draft", "--spec-draft-override-tensor", "-cmoed", "--cpu-moe-draft",
            "--spec-draft-cpu-moe", "-ncmoed", "--n-cpu-moe-draft", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe",
            "-devd", "--device-draft", "--spec-draft-device", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
            "--spec-draft-ngl",
            "--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling", "-bs", "--backend-sampling",
        ),
    ),
    _COUNTED: (
        "serve and plan have options for it: --context, --slots, and those of kimigguf plan",
        (
            "-c", "--ctx-size", "-np", "--parallel", "-b", "--batch-size", "-ub", "--ubatch-size", "-ctk",
            "--cache-type-k", "-ctv", "--cache-type-v", "-fa", "--flash-attn", "-ctxcp", "--ctx-checkpoints",
            "--swa-checkpoints", "-cram", "--cache-ram", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "-kvo",
            "--kv-offload", "-nkvo", "--no-kv-offload", "--kv-unified-per-slot", "--repack", "-nr", "--no-repack",
            "-lm", "--load-mode",
            "--mlock", "--mmap", "--no-mmap", "--swa-full", "-mm", "--mmproj", "-mmu", "--mmproj-url", "-md",
            "--spec-draft-model", "--model-draft", "--spec-type", "--spec-default", "-ctkd", "--cache-type-k-draft",
            "--spec-draft-type-k", "-ctvd", "--cache-type-v-draft", "--spec-draft-type-v", "--lora", "--lora-scaled",
            "--control-vector", "--control-vector-scaled", "-lzm", "--lazy-mode", "--override-kv",
        ),
    ),
    "reusing a middle part of a prompt corrupts K3's recurrent state": ("leave it out", ("--cache-reuse",)),
    _OURS: (
        "use the options of kimigguf serve",
        (
            "-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-dr",
            "--docker-repo", "-a", "--alias", "--host", "--port", "--api-prefix", "-lv", "--verbosity",
            "--log-verbosity", "--log-file", "--log-disable", "--log-jsonl", "--models-dir",
            "--models-preset", "--no-metrics",
        ),
    ),
    "every user of this machine can read a command line": ("use --api-key-file FILE of kimigguf serve", ("--api-key",)),
    "every user of this machine can read a command line, and the engine fetches nothing": (
        "kimigguf download reads HF_TOKEN from the environment",
        ("-hft", "--hf-token"),
    ),
    "it fetches another model, unchecked, and serves it in place of K3": (
        "name what to serve: kimigguf serve QUANT",
        (
            "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "--embd-gemma-default", "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default", "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
        ),
    ),
    "it would let other people or pages in": (
        "use the options of kimigguf serve",
        ("--api-key-file", "--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials", "--reuse-port"),
    ),
    _OPEN: (
        "run tools in a client of your own",
        (
            "--tools", "--tools-runtime", "-ag", "--agent", "--ui-mcp-proxy", "--webui-mcp-proxy",
            "--mcp-servers-config", "--mcp-servers-json", "--media-path", "--path", "--props",
        ),
    ),
}  # fmt: skip
"""Flags of llama-server (build 11434) that are refused: by reason, with what to do instead."""

WRITTEN: Final = frozenset({"--slot-save-path", "--log-prompts-dir", "--lookup-cache-dynamic", "-lcd"})
"""Flags with a folder that the engine writes to, or with a file in one."""
READ: Final = frozenset(
    {
        KEY_FLAG, CERTIFICATE_FLAG, "--chat-template-file", "--json-schema-file", "-jf", "--grammar-file",
        "--lookup-cache-static", "-lcs", "--ui-config-file", "--webui-config-file", "--video-ffmpeg-dir",
    }
)  # fmt: skip
"""Flags with a file or folder that the engine reads."""
_LOCKING: Final = "mmap+mlock"
"""The one way of loading that takes what the plan counts: it keeps in memory what lies there anyway."""


def reason_against(flag: str) -> tuple[str, str] | None:
    """Why a flag may not be handed on, and what to do instead; None for one that may."""
    return next(((reason, instead) for reason, (instead, flags) in _REASONS.items() if flag in flags), None)


def absolute(extra: Sequence[str]) -> tuple[str, ...]:
    """The arguments with their files and folders as they can be named from any folder; all others as they are."""
    pairs = zip(("", *extra), extra, strict=False)
    return tuple(str(Path(word).absolute()) if spelled(flag) in READ | WRITTEN else word for flag, word in pairs)


def check_extra(extra: Sequence[str], kind: EngineKind) -> None:
    """Refuse arguments that may not be handed on.

    Raises:
        UsageError: ``flag-undoes-plan`` with the reason; ``engine-takes-no-arguments`` for an engine without a command
            line of its own.
    """
    if extra and kind not in {EngineKind.LLAMA_SERVER, EngineKind.LLAMA}:
        raise UsageError(
            f"the engine {kind} takes no arguments of llama-server's",
            code="engine-takes-no-arguments",
            hint="use --engine llama-server, or leave out what stands after --",
        )
    for word, value in zip_longest(extra, extra[1:]):
        flag = spelled(word.partition("=")[0])
        if flag in {"-lm", "--load-mode"} and value == _LOCKING:
            continue
        if (found := reason_against(flag)) is not None:
            reason, instead = found
            raise UsageError(f"{flag} cannot be handed on", code="flag-undoes-plan", cause=reason, hint=instead)


def check_known(extra: Sequence[str], known: Collection[str] | None) -> None:
    """Refuse a long flag that the engine would end over, before anything is started.

    Args:
        extra: What is handed on.
        known: The long flags of the engine's ``--help``; None, or nothing of short ones, refuses nothing.

    Raises:
        UsageError: ``engine-flag-unknown`` with the flags that are nearest.
    """
    if known is None:
        return
    for before, word in zip(("", *extra), extra, strict=False):
        if not word.startswith("--") or spelled(before) in server_flags.WITH_VALUE or spelled(word) in known:
            continue
        flag, equals, value = word.partition("=")
        nearest = get_close_matches(flag, sorted(known), n=2, cutoff=0.75)
        if equals and spelled(flag) in known:
            hint = f"write it as two words: -- {flag} {value}"
        else:
            hint = "check what stands after --" + (f": did you mean {' or '.join(nearest)}?" if nearest else "")
        raise UsageError(
            f"the engine has no option {word}",
            code="engine-flag-unknown",
            cause="it is not among those that its --help lists, so the engine would not start",
            hint=hint,
        )
