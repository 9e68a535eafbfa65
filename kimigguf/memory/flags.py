"""What a llama-server command line means for memory: its flags, read by llama.cpp's own rules (``common/arg.cpp``)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Final

from kimigguf.errors import UsageError
from kimigguf.memory import server_flags
from kimigguf.memory.dealing import chosen, deal, overridden
from kimigguf.memory.layout import HOST, LayerPlace, Layout
from kimigguf.memory.model import LayerKind, ModelSpec
from kimigguf.memory.settings import KvType, Settings
from kimigguf.units import MIB

_EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE: Final = r"\.ffn_(up|down|gate)\."
_AUTO_SLOTS: Final = 4
"""What ``-np -1`` and no ``-np`` mean to llama-server; the slots then share one cache."""
_MAX_SLOTS: Final = 256
_MAX_TOKENS: Final = 1 << 31
_MAX_SHARE: Final = 1e30
"""More than any number of bytes, and less than what 32 bits of a float hold."""
_TRUE: Final = frozenset({"on", "enabled", "true", "1"})
_FALSE: Final = frozenset({"off", "disabled", "false", "0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A command line as memory sees it.

    ``ignored`` lists flags that say nothing about memory, with their values; ``notes`` what a user should know about
    those that do. ``projector`` is the path given to ``--mmproj``.
    """

    settings: Settings
    layout: Layout
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    projector: str | None


@dataclass(slots=True)
class _Given:
    """Flag values as they pile up; the names are llama.cpp's."""

    context: int = 0
    slots: int = -1
    batch: int = 2048
    ubatch: int = 512
    key_type: str = "f16"
    value_type: str = "f16"
    flash: str = "auto"
    gpu_layers: int = -1
    split: tuple[float, ...] = ()
    split_mode: str = "layer"
    main_gpu: int = 0
    devices: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    kv_offload: bool = True
    repack: bool = True
    checkpoints: int = 32
    cache_mib: int = 8192
    unified: bool | None = None
    per_slot: int = 0
    op_offload: bool = True
    rpc: tuple[str, ...] = ()
    fit: bool = True
    projector: str | None = None


def _number(text: str) -> int:
    return int(text)


def _split(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) for part in re.split(r"[,/]+", text))
    if not all(0 <= share < _MAX_SHARE for share in shares):
        raise ValueError(text)
    return shares


def _servers(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _layers(text: str) -> int:
    return {"auto": -1, "all": -2}[text] if text in {"auto", "all"} else int(text)


def _switch(text: str) -> str:
    lowered = text.lower()
    if lowered in _TRUE:
        return "on"
    if lowered in _FALSE:
        return "off"
    if lowered in {"auto", "-1"}:
        return "auto"
    raise ValueError(text)


def _cache_type(text: str) -> str:
    return KvType(text).value


def _split_mode(text: str) -> str:
    if text not in {"none", "layer", "row", "tensor"}:
        raise ValueError(text)
    return text


_VALUES: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    **dict.fromkeys(("-c", "--ctx-size"), ("context", _number)),
    **dict.fromkeys(("-np", "--parallel"), ("slots", _number)),
    **dict.fromkeys(("-b", "--batch-size"), ("batch", _number)),
    **dict.fromkeys(("-ub", "--ubatch-size"), ("ubatch", _number)),
    **dict.fromkeys(("-ctk", "--cache-type-k"), ("key_type", _cache_type)),
    **dict.fromkeys(("-ctv", "--cache-type-v"), ("value_type", _cache_type)),
    **dict.fromkeys(("-fa", "--flash-attn"), ("flash", _switch)),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), ("gpu_layers", _layers)),
    **dict.fromkeys(("-ts", "--tensor-split"), ("split", _split)),
    **dict.fromkeys(("-sm", "--split-mode"), ("split_mode", _split_mode)),
    **dict.fromkeys(("-mg", "--main-gpu"), ("main_gpu", _number)),
    **dict.fromkeys(("-dev", "--device"), ("devices", str)),
    **dict.fromkeys(("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), ("checkpoints", _number)),
    **dict.fromkeys(("-cram", "--cache-ram"), ("cache_mib", _number)),
    **dict.fromkeys(("-mm", "--mmproj"), ("projector", str)),
    "--kv-unified-per-slot": ("per_slot", _number),
    "--rpc": ("rpc", _servers),
}
_SWITCHES: Final[Mapping[str, tuple[str, bool | None]]] = {
    **dict.fromkeys(("-kvo", "--kv-offload"), ("kv_offload", True)),
    **dict.fromkeys(("-nkvo", "--no-kv-offload"), ("kv_offload", False)),
    "--repack": ("repack", True),
    **dict.fromkeys(("-nr", "--no-repack"), ("repack", False)),
    "--op-offload": ("op_offload", True),
    "--no-op-offload": ("op_offload", False),
    **dict.fromkeys(("-kvu", "--kv-unified"), ("unified", True)),
    **dict.fromkeys(("-no-kvu", "--no-kv-unified"), ("unified", False)),
    **dict.fromkeys(("--no-mmproj", "--no-mmproj-auto"), ("projector", None)),
}
_UNCOUNTED: Final = frozenset(
    (
        "-md",
        "--model-draft",
        "--spec-draft-model",
        "-hfd",
        "--hf-repo-draft",
        "--lora",
        "--lora-scaled",
        "--control-vector",
    )
)
"""Flags that bring further weights."""


def spelled(flag: str) -> str:
    """The flag as llama.cpp looks it up: in long ones an underscore counts as a dash (``--ctx_size``)."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def parse(
    argv: Sequence[str],
    spec: ModelSpec,
    *,
    devices: int = 0,
    weights: Sequence[int] = (),
    takes_over: bool = False,
) -> Parsed:
    """What ``argv`` (llama-server's flags, without the program) asks for on a host with so many devices.

    ``weights`` are the devices' free bytes, by which layers are split where ``-ts`` does not say; equal if not given.
    ``takes_over`` says that the first device runs large batches of what lies on the host, as GPUs do and RPC servers do
    not.

    Raises:
        UsageError: ``unknown-flag``, ``bad-flag`` for a value that llama-server refuses too, ``unsupported-flag`` for
            a split that is not modelled, ``mixed-cache-types`` and ``needs-flash-attention`` for caches that fail.
    """
    given, ignored = _read(argv)
    notes: list[str] = []
    settings = _settings(given, spec, notes)
    layout = _layout(given, spec, devices, weights)
    if given.flash == "auto" and not _keeps_flash_attention(spec, settings, layout):
        settings = replace(settings, flash_attention=False)
        notes.append("-fa auto ends up off here: attention would not run on its layer's device")
    _check_cache(settings)
    if takes_over and given.op_offload and layout.devices:
        settings = replace(settings, offload_operations=True)
    notes += [
        f"{flag} takes memory of its own that is not counted here"
        for flag in dict.fromkeys(word.partition(" ")[0] for word in ignored)
        if flag in _UNCOUNTED
    ]
    if older := [flag for flag in ignored if flag in server_flags.OLDER]:
        notes.append(
            f"{', '.join(older)}: build {server_flags.BUILD} has --load-mode instead and does not start with it"
        )
    if spec.context_max_tokens is not None and settings.stream_tokens > spec.context_max_tokens:
        notes.append(
            f"a slot's context of {settings.stream_tokens:,} tokens is above the {spec.context_max_tokens:,} that the"
            " model was trained for: llama-server caps it there, and takes the memory for all of it"
        )
    if given.fit and devices:
        notes.append(
            "without -fit off llama-server may change what the command line leaves open; this is the line as it stands"
        )
    return Parsed(
        settings=settings, layout=layout, ignored=tuple(ignored), notes=tuple(notes), projector=given.projector
    )


def _read(argv: Sequence[str]) -> tuple[_Given, list[str]]:
    given, ignored = _Given(), []
    words = iter(_single_words(argv))
    pending: str | None = next(words, None)
    while pending is not None:
        flag, pending = spelled(pending), next(words, None)
        if flag in _SWITCHES:
            name, value = _SWITCHES[flag]
            setattr(given, name, value)
        elif flag in {"-cmoe", "--cpu-moe"}:
            given.overrides += ((_EXPERTS, "CPU"),)
        elif flag in _VALUES or flag in _OVERRIDING or flag in {"-fit", "--fit"}:
            if pending is None:
                raise UsageError(f"{flag} needs a value", code="bad-flag")
            _set(given, flag, pending)
            pending = next(words, None)
        else:
            values = _value_count(flag)
            taken = [word for word in (pending, *islice(words, max(values - 1, 0))) if word is not None][:values]
            if len(taken) < values:
                raise UsageError(f"{flag} needs {'a value' if values == 1 else 'two values'}", code="bad-flag")
            ignored.append(" ".join((flag, *taken)))
            pending = next(words, None) if values else pending
    return given, ignored


def _value_count(flag: str) -> int:
    """How many words behind it llama-server takes with a flag that says nothing about memory.

    Raises:
        UsageError: ``unknown-flag``: llama-server does not have it, and would not start.
    """
    if flag in server_flags.WITH_TWO_VALUES:
        return 2
    if flag in server_flags.WITH_VALUE:
        return 1
    if flag in server_flags.BARE or flag in server_flags.OLDER:
        return 0
    nearest = get_close_matches(flag, sorted(server_flags.ALL), n=3)
    raise UsageError(
        f"llama-server has no flag {flag}",
        code="unknown-flag",
        cause=f"flags are those of llama-server build {server_flags.BUILD}, the one that memory is counted for",
        hint=(f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "llama-server --help lists them all; leave out one that only another build has",
    )


_OVERRIDING: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(("-ot", "--override-tensor"), None),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe"), _EXPERTS),
    **dict.fromkeys(("-ncffn", "--n-cpu-ffn"), _DENSE),
}


def _single_words(argv: Sequence[str]) -> list[str]:
    """``--flag=value`` is one unknown word to llama.cpp's parser; what is meant is clear, so it is taken as two."""
    words: list[str] = []
    for word in argv:
        given, equals, value = word.partition("=")
        name = spelled(given)
        if equals and name.startswith("--") and name in server_flags.WITH_VALUE:
            words += [name, value]
        else:
            words.append(word)
    return words


def _set(given: _Given, flag: str, text: str) -> None:
    try:
        if flag in {"-fit", "--fit"}:
            given.fit = _switch(text) == "on"
        elif flag in {"-ot", "--override-tensor"}:
            given.overrides += tuple(_override(part) for part in text.split(",") if part)
        elif flag in _OVERRIDING:
            count = min(int(text), 4096)
            if count < 0:
                raise ValueError(text)  # noqa: TRY301 -- refused exactly as a value that is no number
            layers = "|".join(map(str, range(count)))
            given.overrides += ((rf"blk\.(?:{layers}){_OVERRIDING[flag]}", "CPU"),) if count else ()
        else:
            name, convert = _VALUES[flag]
            setattr(given, name, convert(text))
    except (ValueError, re.error) as error:
        raise UsageError(
            f"{flag} {text!r} is no value that llama-server takes", code="bad-flag", cause=str(error)
        ) from error


def _override(text: str) -> tuple[str, str]:
    pattern, equals, target = text.partition("=")
    if not equals:
        raise ValueError("a pattern, = and a buffer type are needed, such as exps=CPU")
    re.compile(pattern)
    return pattern, target


def _settings(given: _Given, spec: ModelSpec, notes: list[str]) -> Settings:
    if given.key_type != given.value_type:
        latent = any(layer.kind is LayerKind.MLA for layer in spec.layers)
        raise UsageError(
            f"-ctk {given.key_type} with -ctv {given.value_type}"
            + (" fails when the context is created" if latent else " is not modelled"),
            code="mixed-cache-types",
            hint=f"give both the same type: -ctk {given.key_type} -ctv {given.key_type}",
        )
    kv_type = KvType(given.key_type)
    automatic = given.slots < 0
    slots = _AUTO_SLOTS if automatic else given.slots
    if automatic:
        notes.append("without -np llama-server opens 4 slots that share one cache")
    context = given.context or (slots * given.per_slot if given.per_slot > 0 else 0) or spec.context_max_tokens or 0
    batch = given.batch
    for flag, value, most in (
        ("-np", slots, _MAX_SLOTS),
        ("-c", context, _MAX_TOKENS),
        ("-b", batch, _MAX_TOKENS),
        ("-ub", given.ubatch or batch, _MAX_TOKENS),
    ):
        if not 0 < value < most:
            raise UsageError(f"{flag} {value} is no value that llama-server takes", code="bad-flag")
    return Settings(
        context_tokens=context,
        slots=slots,
        batch_tokens=batch,
        ubatch_tokens=given.ubatch or batch,
        kv_type=kv_type,
        flash_attention=given.flash != "off",
        checkpoints=max(given.checkpoints, 0),
        prompt_cache_bytes=max(given.cache_mib, 0) * MIB,
        prompt_cache_is_capped=given.cache_mib >= 0,
        repack=given.repack,
        kv_offload=given.kv_offload,
        unified_cache=automatic if given.unified is None or automatic else given.unified,
    )


def _check_cache(settings: Settings) -> None:
    if settings.kv_type.is_quantized and not settings.flash_attention:
        raise UsageError(
            f"a {settings.kv_type} cache needs flash attention",
            code="needs-flash-attention",
            hint="use -fa on, or -ctk f16 -ctv f16",
        )


def _layout(given: _Given, spec: ModelSpec, devices: int, weights: Sequence[int]) -> Layout:
    used = list(range(devices))
    if given.devices is not None:
        used = chosen(given.devices, devices)
    if given.split_mode == "none" and used:
        if not 0 <= given.main_gpu < len(used):
            raise UsageError(f"-mg {given.main_gpu}: there are {len(used)} devices", code="bad-flag")
        used = [used[given.main_gpu]]
    elif given.split_mode in {"row", "tensor"} and len(used) > 1:
        raise UsageError(
            f"-sm {given.split_mode} is not modelled: llama.cpp does not support it for this model",
            code="unsupported-flag",
            hint="use -sm layer",
        )
    free = [weights[device] for device in used] if weights else []
    places = deal(len(spec.layers), len(used), free, gpu_layers=given.gpu_layers, shares=given.split)
    layout = Layout(
        devices=tuple(f"gpu{device}" for device in used),
        layers=tuple(LayerPlace(trunk=place, experts=place) for place in places[:-1]),
        head=places[-1],
        overridden=bool(given.overrides),
    )
    return overridden(layout, spec, given.overrides, given.rpc) if given.overrides else layout


def _keeps_flash_attention(spec: ModelSpec, settings: Settings, layout: Layout) -> bool:
    """Whether ``-fa auto`` stays on: llama.cpp drops it when attention would run on another device than its layer.

    Attention runs where its cache lies or, with the cache on the host, where the matrix behind it does.
    """
    moved = dict(layout.moved)
    return all(
        (settings.kv_offload and place.trunk is not HOST)
        or moved.get(f"blk.{layer.index}.attn_v_b.weight", place.trunk) == place.trunk
        for layer, place in zip(spec.layers, layout.layers, strict=True)
        if layer.kind is LayerKind.MLA
    )
