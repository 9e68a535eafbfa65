"""What gives way when a run does not fit, in which order, and in words: never silently, and no further than it must.

First what only saves time (context checkpoints, then the prompt cache), then speed (the physical batch), and last what
a user would miss (the context), down to a stated floor.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from kimigguf.memory.settings import Settings
from kimigguf.units import MIB, memory

CHECKPOINTS_FLOOR: Final = 1
"""With none, a hybrid model reads a conversation again from its start whenever its end was changed."""
UBATCH_FLOOR_TOKENS: Final = 64
_PROMPT_CACHE_STEP_BYTES: Final = 64 * MIB
_CONTEXT_STEP_TOKENS: Final = 1024

_Fits: TypeAlias = Callable[[Settings], bool]
_Options: TypeAlias = Callable[[Settings], list[Settings]]
_Value: TypeAlias = Callable[[Settings], str]


def lower(settings: Settings, fits: _Fits, *, context_floor_tokens: int) -> tuple[Settings, tuple[str, ...], bool]:
    """The settings that fit with the least taken away, what was taken away in words, and whether they fit at all.

    ``fits`` must be monotone: what fits, fits with less. It is asked some dozen times.
    """
    knobs: tuple[tuple[str, _Options, _Value], ...] = (
        ("context checkpoints per slot", _fewer_checkpoints, lambda s: str(s.checkpoints)),
        ("prompt cache", _smaller_prompt_cache, lambda s: memory(s.prompt_cache_bytes)),
        ("ubatch", _smaller_ubatch, lambda s: f"{s.ubatch_tokens:,} tokens"),
        ("context", lambda s: _shorter_context(s, context_floor_tokens), lambda s: f"{s.context_tokens:,} tokens"),
    )
    words: list[str] = []
    for name, options_of, value in knobs:
        options = options_of(settings)
        if not options:
            continue
        before = settings
        settings, done = _least(options, fits)
        words.append(f"{name}: {value(settings)} instead of {value(before)}")
        if done:
            return settings, tuple(words), True
    return settings, tuple(words), False


def _least(options: Sequence[Settings], fits: _Fits) -> tuple[Settings, bool]:
    """The first of ``options`` (which take away more and more) that fits, or the last with False."""
    if not fits(options[-1]):
        return options[-1], False
    return options[bisect_left(options, 1, hi=len(options) - 1, key=lambda option: int(fits(option)))], True


def _fewer_checkpoints(settings: Settings) -> list[Settings]:
    values = range(settings.checkpoints - 1, CHECKPOINTS_FLOOR - 1, -1)
    return [replace(settings, checkpoints=value) for value in values]


def _smaller_prompt_cache(settings: Settings) -> list[Settings]:
    steps = -(-settings.prompt_cache_bytes // _PROMPT_CACHE_STEP_BYTES)
    return [replace(settings, prompt_cache_bytes=step * _PROMPT_CACHE_STEP_BYTES) for step in reversed(range(steps))]


def _smaller_ubatch(settings: Settings) -> list[Settings]:
    values, value = [], settings.ubatch_tokens // 2
    while value >= UBATCH_FLOOR_TOKENS:
        values.append(value)
        value //= 2
    return [replace(settings, ubatch_tokens=value) for value in values]


def _shorter_context(settings: Settings, floor_tokens: int) -> list[Settings]:
    highest = (settings.context_tokens - 1) // _CONTEXT_STEP_TOKENS
    values = [step * _CONTEXT_STEP_TOKENS for step in range(highest, 0, -1)]
    values = [value for value in values if value > floor_tokens]
    if settings.context_tokens > floor_tokens:
        values.append(floor_tokens)
    return [replace(settings, context_tokens=value) for value in values]
