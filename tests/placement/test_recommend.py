"""The right quant for the machine, for the reason given."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigguf.catalogue.profiles import load_model
from kimigguf.hardware.machines import load_machine
from kimigguf.hardware.snapshot import Accelerator, Disk, DiskKind, Machine, MemoryKind, Ram
from kimigguf.memory.settings import Settings
from kimigguf.placement.budget import budget
from kimigguf.placement.recommend import RECOMMENDABLE, Fit, Prefer, Recommendation, Verdict, need_by_margin, recommend
from kimigguf.units import GB, GIB, TIB

K3 = load_model("kimi-k3")
ORDER = [Fit.FITS_VRAM, Fit.FITS, Fit.TIGHT, Fit.BELOW_MARGIN, Fit.STREAMS_FROM_DISK, Fit.DOES_NOT_FIT]


def ask(machine: Machine, *, context: int = 32768, prefer: Prefer = Prefer.QUALITY) -> Recommendation:
    return recommend(K3, budget(machine), machine.disks, Settings(context_tokens=context), prefer)


def verdict_of(answer: Recommendation, quant: str) -> Verdict:
    return next(verdict for verdict in answer.verdicts if verdict.quant == quant)


def machine(
    ram: int | None = 768 * GIB, gpus: tuple[int, ...] = (), *, unified: bool = False, disk: int | None = 4 * 10**12
) -> Machine:
    kind = MemoryKind.UNIFIED if unified else MemoryKind.DISCRETE
    disks = None if disk is None else (Disk(mount="/", kind=DiskKind.NVME, free_bytes=disk),)
    return Machine(
        name="made up",
        source="test",
        ram=Ram(total_bytes=ram),
        accelerators=tuple(Accelerator(name="GPU", memory_kind=kind, total_bytes=gpu) for gpu in gpus),
        disks=disks,
    )


@pytest.mark.parametrize(
    ("name", "recommended", "notes"),
    [
        ("8x-b200", "UD-Q8_K_XL", {"UD-Q2_K_XL": Fit.FITS_VRAM}),
        ("epyc-768g-rtx-pro-6000", "UD-IQ2_XXS", {"UD-Q2_K_XL": Fit.BELOW_MARGIN}),
        ("epyc-1536g-cpu", "UD-Q2_K_XL", {"UD-Q4_K_XL": Fit.BELOW_MARGIN}),
        ("mac-studio-512g", None, {"UD-IQ1_S": Fit.STREAMS_FROM_DISK}),
        ("laptop-64g", None, {"UD-IQ1_S": Fit.DOES_NOT_FIT}),
    ],
)
def test_the_shipped_machines_get_the_right_quant(name: str, recommended: str | None, notes: dict[str, Fit]) -> None:
    answer = ask(load_machine(name))
    assert answer.recommended == recommended
    assert {quant: verdict_of(answer, quant).fit for quant in notes} == notes


def test_prefer_speed_takes_the_best_quant_that_is_all_in_vram() -> None:
    answer = ask(load_machine("8x-b200"), prefer=Prefer.SPEED)
    in_vram = [verdict.quant for verdict in answer.verdicts if verdict.fit is Fit.FITS_VRAM]
    assert answer.recommended == "UD-Q2_K_XL"
    assert "UD-Q2_K_XL" in in_vram
    assert "UD-Q4_K_XL" not in in_vram


def test_prefer_speed_without_vram_takes_the_fewest_bytes_per_token() -> None:
    assert ask(machine(2 * TIB), prefer=Prefer.SPEED).recommended == "UD-IQ1_S"


def test_below_margin_names_the_missing_gb() -> None:
    this = load_machine("epyc-768g-rtx-pro-6000")
    verdict = verdict_of(ask(this), "UD-Q2_K_XL")
    missing = (verdict.need_low_bytes or 0) - (budget(this).total_bytes or 0)
    assert f"{missing / GB:.1f} GB" in verdict.reasons[0]


def test_unified_memory_is_counted_once() -> None:
    have = budget(load_machine("mac-studio-512g"))
    assert have.vram_bytes == 0
    assert have.total_bytes is not None
    assert have.total_bytes <= 512 * GIB


def test_no_quant_fits_a_laptop_and_the_way_out_is_named() -> None:
    ways = " ".join(ask(load_machine("laptop-64g")).ways_out)
    assert "hosted API" in ways
    assert "https://" in ways
    assert "more memory would run UD-IQ1_S" in ways


def test_a_machine_that_can_stream_is_told_which_quant() -> None:
    assert any("UD-IQ1_S streams from disk" in way for way in ask(load_machine("mac-studio-512g")).ways_out)


def test_fork_only_quants_are_unsupported_however_much_memory_there_is() -> None:
    answer = ask(machine(64 * TIB))
    for quant in ("UD-Q1_0", "UD-TQ1_0", "UD-TQ2_0"):
        verdict = verdict_of(answer, quant)
        assert verdict.fit is Fit.UNSUPPORTED
        assert any("Unsloth" in reason for reason in verdict.reasons)


def test_the_margin_is_on_top_of_the_weights_not_a_share_of_capacity() -> None:
    assert K3.margin is not None
    low, high = need_by_margin(594_040_923_616, K3.margin)
    assert (round(low / GB, 1), round(high / GB, 1)) == (653.4, 683.1)
    low, high = need_by_margin(1_508_668_683_104, K3.margin)
    assert (round(low / GB, 1), round(high / GB, 1)) == (1659.5, 1735.0)


@pytest.mark.parametrize(
    ("total_gb", "fit"),
    [
        (684, Fit.FITS),
        (683, Fit.TIGHT),
        (654, Fit.TIGHT),
        (653, Fit.BELOW_MARGIN),
        (595, Fit.BELOW_MARGIN),
        (594, Fit.STREAMS_FROM_DISK),
    ],
)
def test_verdicts_change_exactly_where_the_rule_says(total_gb: int, fit: Fit) -> None:
    have = replace(budget(machine()), ram_bytes=total_gb * GB)
    answer = recommend(K3, have, machine().disks, Settings(), Prefer.QUALITY)
    assert verdict_of(answer, "UD-IQ1_S").fit is fit


def test_a_long_context_binds_by_the_ledger_and_says_so() -> None:
    # 64 slots of a 1M context: far above what 15 % of UD-IQ1_S leaves.
    have = replace(budget(machine()), ram_bytes=700 * GB)
    long = Settings(context_tokens=1_048_576, slots=64, checkpoints=32)
    verdict = verdict_of(recommend(K3, have, machine().disks, long, Prefer.QUALITY), "UD-IQ1_S")
    assert verdict.fit is Fit.BELOW_MARGIN
    assert "ledger" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("this", "fit"),
    [
        (machine(None), Fit.UNKNOWN),
        (machine(512 * GIB, disk=None), Fit.UNKNOWN),
        (machine(512 * GIB, disk=10**11), Fit.DOES_NOT_FIT),
        (machine(32 * GIB), Fit.DOES_NOT_FIT),
        (machine(None, (192 * GIB,) * 8), Fit.FITS_VRAM),
    ],
)
def test_what_is_unknown_stays_unknown(this: Machine, fit: Fit) -> None:
    assert verdict_of(ask(this), "UD-IQ1_S").fit is fit


def test_memory_nobody_could_read_is_no_reason_for_a_no() -> None:
    for accelerators in (None, (Accelerator(name="GPU", memory_kind=MemoryKind.DISCRETE),)):
        this = replace(machine(512 * GIB), accelerators=accelerators)
        answer = ask(this)
        assert verdict_of(answer, "UD-IQ1_S").fit is Fit.UNKNOWN
        assert not any("more memory would run" in way for way in answer.ways_out)


def test_files_that_are_here_need_no_room_to_stream_from() -> None:
    this = machine(512 * GIB, disk=10**9)
    answer = recommend(K3, budget(this), this.disks, Settings(), Prefer.QUALITY, here={"UD-IQ1_S": "/models/UD-IQ1_S"})
    assert verdict_of(answer, "UD-IQ1_S").fit is Fit.STREAMS_FROM_DISK
    assert verdict_of(answer, "UD-IQ1_M").fit is Fit.DOES_NOT_FIT


def test_a_model_no_engine_runs_is_unsupported_with_its_reason() -> None:
    pro = load_model("kimi-k3.1-pro")
    answer = recommend(pro, budget(machine(8 * TIB)), (), Settings(), Prefer.QUALITY)
    assert [verdict.fit for verdict in answer.verdicts] == [Fit.UNSUPPORTED]
    assert "DSA" in answer.verdicts[0].reasons[0]
    assert answer.recommended is None


@settings(max_examples=12, deadline=None)
@given(
    ram=st.integers(min_value=8, max_value=4096),
    more=st.integers(min_value=0, max_value=1024),
    gpus=st.lists(st.integers(min_value=8, max_value=288), max_size=8),
    context=st.sampled_from([4096, 32768, 1_048_576]),
)
def test_more_memory_never_worsens_a_verdict(ram: int, more: int, gpus: list[int], context: int) -> None:
    cards = tuple(gpu * GIB for gpu in gpus)
    small, large = (
        ask(machine(ram * GIB, cards), context=context),
        ask(machine((ram + more) * GIB, cards), context=context),
    )
    for before, after in zip(small.verdicts, large.verdicts, strict=True):
        if before.fit in ORDER:
            assert ORDER.index(after.fit) <= ORDER.index(before.fit)


@settings(max_examples=12, deadline=None)
@given(ram=st.integers(min_value=8, max_value=4096), prefer=st.sampled_from(list(Prefer)))
def test_only_what_fits_is_ever_recommended(ram: int, prefer: Prefer) -> None:
    answer = ask(machine(ram * GIB), prefer=prefer)
    if answer.recommended is None:
        assert not any(verdict.fit in RECOMMENDABLE for verdict in answer.verdicts)
        assert answer.ways_out
    else:
        assert verdict_of(answer, answer.recommended).fit in RECOMMENDABLE
