"""What makes a server's memory grow is named from its own log, and what nobody told stays unknown."""

from pathlib import Path

import pytest

from kimigguf.engines import footprint
from kimigguf.engines.footprint import (
    Baseline,
    Growth,
    Held,
    Resident,
    growth,
    parse_held,
    parse_resident,
    planned,
    read_held,
    read_resident,
)
from kimigguf.memory.ledger import Column, Component, Ledger, Row, Source
from kimigguf.units import GIB, MIB

START = (
    b"0.00.009.1 I srv    load_model: prompt cache is enabled, size limit: 1024 MiB\n"
    b"0.00.009.2 I srv    load_model: context checkpoints enabled, max = 4, min spacing = 256\n"
)
# One slot's turn as llama-server (build 11434, log level 4) prints it on a tiny K3, shortened; then a second slot's.
TURN = (
    b"0.22.1 I slot launch_slot_: id  1 | task 301 | processing task, is_child = 0\n"
    b"0.22.2 I slot   operator(): id  1 | task 301 | checking checkpoint with [1867, 1867] against 80...\n"
    b"0.22.3 I slot create_check: id  1 | task 301 | superseding context checkpoint at n_tokens = 59\n"
    b"0.22.4 I slot create_check: id  1 | task 301 | created context checkpoint 1 of 4 (pos_min = 58, pos_max = 58, "
    b"n_tokens = 59, size = 0.285 MiB)\n"
    b"0.3 I slot create_check: id  1 | task 301 | created context checkpoint 2 of 4 (pos_min = 1355, pos_max = 1355, "
    b"n_tokens = 1356, size = 0.285 MiB)\n"
    b"1.05.1 I slot      release: id  1 | task 301 | stop processing: n_tokens = 1883, truncated = 0\n"
    b"1.05.2 I srv        update:  - cache state: 6 prompts, 9.018 MiB (limits: 1024.000 MiB, 8192 tokens, 98 est)\n"
    b"1.05.3 I srv        update:    - prompt 0x556bc8857020:     528 tokens, checkpoints:  2,     1.023 MiB\n"
)
OTHER = (
    b"1.06.1 I slot launch_slot_: id  0 | task 316 | processing task, is_child = 0\n"
    b"1.06.2 I slot create_check: id  0 | task 316 | created context checkpoint 3 of 4 (pos_min = 9, pos_max = 9, "
    b"n_tokens = 10, size = 0.250 MiB)\n"
)
ERASED = (
    b"1.07.1 I slot   operator(): id  0 | task 331 | erased invalidated context checkpoint (pos_min = 9, pos_max = 9, "
    b"n_tokens = 10, n_swa = 0, pos_next = 5, size = 0.250 MiB)\n"
    b"1.07.2 W slot create_check: id  0 | task 331 | erasing old context checkpoint (pos_min = 1, pos_max = 1, "
    b"n_tokens = 2, size = 0.250 MiB)\n"
)
CLEARED = b"1.08.1 I slot prompt_clear: id  1 | task -1 | clearing prompt with 1883 tokens\n"


def test_what_each_slot_and_the_cache_hold_is_read_from_the_log() -> None:
    held = parse_held(START + TURN + OTHER)
    assert held == Held(
        checkpoint_bytes=round((2 * 0.285 + 3 * 0.25) * MIB),
        prompt_cache_bytes=round(9.018 * MIB),
        requests=2,
        finished=1,
    )


def test_checkpoints_that_were_dropped_are_held_no_longer() -> None:
    assert parse_held(START + OTHER + ERASED).checkpoint_bytes == 0.25 * MIB
    assert parse_held(START + TURN + CLEARED).checkpoint_bytes == 0


def test_nothing_said_is_nothing_held_only_where_the_log_would_say_it() -> None:
    assert parse_held(START) == Held(checkpoint_bytes=0, prompt_cache_bytes=0, requests=0, finished=0)
    quiet = parse_held(b"I srv: loading\n")  # an engine that logs less
    assert quiet == Held()
    assert parse_held(START, whole=False) == Held()  # and the end of a log does not tell what stood before it


def test_a_log_too_long_to_hold_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(START + TURN * 50 + OTHER)
    whole = read_held(log)
    monkeypatch.setattr(footprint, "_WINDOW_BYTES", len(TURN) + len(OTHER))
    monkeypatch.setattr(footprint, "_CHUNK_BYTES", 37)  # so that every word is cut in two somewhere
    assert read_held(log) == whole
    assert (whole.requests, whole.finished) == (51, 50)
    assert read_held(tmp_path / "none") == Held()


STATUS = (
    "Name:\tllama-server\nVmRSS:\t  45064 kB\nRssAnon:\t   29860 kB\nRssFile:\t   15200 kB\nRssShmem:\t  4 kB\n"
    "VmSwap:\t  8 kB\n"
)


def test_a_processs_own_memory_is_told_from_the_files_that_it_maps() -> None:
    assert parse_resident(STATUS) == Resident(
        anonymous_bytes=29864 << 10, file_bytes=15200 << 10, swapped_bytes=8 << 10
    )
    assert parse_resident("VmRSS:\t 45064 kB\n") is None  # before kernel 4.5
    assert parse_resident(None) is None
    assert read_resident(2**22 + 1) is None  # no process has such an id


def resident(anonymous: int) -> Resident:
    return Resident(anonymous_bytes=anonymous, file_bytes=0)


def test_growth_is_shared_out_among_its_causes() -> None:
    before = Baseline(resident=resident(1000), held=Held(checkpoint_bytes=100, prompt_cache_bytes=50))
    now = Held(checkpoint_bytes=400, prompt_cache_bytes=250)
    added = Growth(total_bytes=700, checkpoint_bytes=300, prompt_cache_bytes=200, unexplained_bytes=200)
    assert growth(before, resident(1700), now) == added
    swapped = Resident(anonymous_bytes=1200, file_bytes=0, swapped_bytes=500)
    assert growth(before, swapped, now) == added  # what was swapped out is still its own


@pytest.mark.parametrize(
    ("before", "now_resident", "held"),
    [
        (None, resident(1), Held(checkpoint_bytes=1, prompt_cache_bytes=1)),
        (Baseline(resident=None, held=Held(checkpoint_bytes=1, prompt_cache_bytes=1)), resident(1), Held()),
        (Baseline(resident=resident(1), held=Held(checkpoint_bytes=1)), None, Held(checkpoint_bytes=1)),
        (Baseline(resident=resident(1), held=Held(checkpoint_bytes=1)), resident(1), Held(checkpoint_bytes=1)),
    ],
)
def test_what_is_not_known_is_laid_at_nobodys_door(
    before: Baseline | None, now_resident: Resident | None, held: Held
) -> None:
    assert growth(before, now_resident, held).unexplained_bytes is None


def row(component: Component, size: int | None, device: int | None = None) -> Row:
    return Row(component=component, device=device, size_bytes=size, source=Source.ASSUMED, column=Column.BESIDE)


def test_the_plans_own_allowance_stands_beside_it() -> None:
    ledger = Ledger(devices=("gpu0",), rows=(row(Component.CHECKPOINTS, 2 * GIB), row(Component.CHECKPOINTS, GIB, 0)))
    assert planned(ledger, Component.CHECKPOINTS) == 2 * GIB
    assert planned(ledger, Component.PROMPT_CACHE) == 0
    assert planned(Ledger(devices=(), rows=(row(Component.PROMPT_CACHE, None),)), Component.PROMPT_CACHE) is None
