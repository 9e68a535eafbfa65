"""What gives way: the order, no further than needed, and always told."""

from kimigguf.memory.settings import Settings
from kimigguf.placement.give_way import lower
from kimigguf.units import GIB

FULL = Settings(context_tokens=131072, slots=2, checkpoints=8, prompt_cache_bytes=2 * GIB, ubatch_tokens=2048)


def cost(settings: Settings) -> int:
    return (
        settings.checkpoints * 100
        + settings.prompt_cache_bytes * 1000 // GIB
        + settings.ubatch_tokens
        + settings.context_tokens // 10
    )


def test_checkpoints_give_way_first_and_only_as_many_as_needed() -> None:
    found, words, fits = lower(FULL, lambda s: cost(s) <= cost(FULL) - 250, context_floor_tokens=8192)
    assert fits
    assert (found.checkpoints, found.prompt_cache_bytes, found.context_tokens) == (5, 2 * GIB, 131072)
    assert words == ("context checkpoints per slot: 5 instead of 8",)


def test_then_the_prompt_cache_then_the_batch_and_the_context_last() -> None:
    target = cost(FULL) - 700 - 2000 - 1984 - 5000
    found, words, fits = lower(FULL, lambda s: cost(s) <= target, context_floor_tokens=8192)
    assert fits
    assert (found.checkpoints, found.prompt_cache_bytes, found.ubatch_tokens) == (1, 0, 64)
    assert 8192 < found.context_tokens < 131072
    assert found.context_tokens % 1024 == 0
    assert cost(found) <= target
    assert [line.partition(":")[0] for line in words] == [
        "context checkpoints per slot",
        "prompt cache",
        "ubatch",
        "context",
    ]


def test_the_context_never_goes_below_the_floor_and_the_answer_is_then_no() -> None:
    found, words, fits = lower(FULL, lambda _: False, context_floor_tokens=10_000)
    assert not fits
    assert found.context_tokens == 10_000
    assert words[-1] == "context: 10,000 tokens instead of 131,072 tokens"


def test_a_context_below_the_floor_is_not_raised_to_it() -> None:
    found, _, fits = lower(Settings(context_tokens=4096), lambda _: False, context_floor_tokens=8192)
    assert not fits
    assert found.context_tokens == 4096


def test_slots_and_the_number_format_of_the_cache_never_change() -> None:
    found, _, _ = lower(FULL, lambda _: False, context_floor_tokens=1024)
    assert (found.slots, found.kv_type, found.flash_attention) == (FULL.slots, FULL.kv_type, FULL.flash_attention)
