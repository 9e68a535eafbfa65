"""Measurements as files: what bench keeps reads back equal, and only what matches is ever shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimigguf import profile_files
from kimigguf.catalogue.profiles import load_model
from kimigguf.errors import MachineError
from kimigguf.hardware.fingerprint import Card, Fingerprint, fingerprint, is_such
from kimigguf.hardware.machines import load_machine
from kimigguf.speed.measured import (
    BENCH,
    KIND,
    MeasuredModel,
    MeasuredSettings,
    PeakMemory,
    Run,
    Where,
    in_words,
    load_runs,
    matching,
    save,
)
from kimigguf.speed.samples import Clock, Speed, Spread, Warmth

SIZE = 648_872_012_448
BOX = Fingerprint(cpu="AMD EPYC 9355", ram_bytes=768 << 30, cards=(Card(name="RTX", total_bytes=96 << 30),))
RUN = Run(
    source=BENCH,
    date="2026-11-30T10:00:00Z",
    engine="llama.cpp b11434-0c1e57098",
    clock=Clock.SERVER,
    machine=BOX,
    model=MeasuredModel(quant="UD-IQ1_M", architecture="kimi-k3", size_bytes=SIZE, parameters=None),
    settings=MeasuredSettings(context_tokens=32768, slots=1),
    memory=(PeakMemory(where="host", what="resident", size_bytes=1 << 39),),
    speeds=(
        Speed(
            depth_tokens=4096,
            warmth=Warmth.COLD,
            prompt_tokens=4608,
            cached_tokens=0,
            decode_tokens_per_second=Spread(median=4.25, lowest=4.0, highest=4.5, count=3),
        ),
    ),
)


def told(run: Run, machine: Fingerprint = BOX, *, size: int = SIZE, here: bool = True) -> list[Where]:
    return [one.where for one in matching({"a.toml": run}, machine, "UD-IQ1_M", size, is_this_one=here)]


def test_what_is_kept_reads_back_equal(tmp_path: Path) -> None:
    environ = {"KIMIGGUF_PROFILES": str(tmp_path)}
    path = save(RUN, environ)
    assert path.parent == tmp_path / KIND
    assert load_runs(environ).runs[str(path)] == RUN


def test_two_runs_of_one_second_are_two_files_and_none_is_half_written(tmp_path: Path) -> None:
    environ = {"KIMIGGUF_PROFILES": str(tmp_path)}
    first, second = save(RUN, environ), save(replace(RUN, note="again"), environ)
    assert first != second
    assert sorted((tmp_path / KIND).iterdir()) == sorted([first, second])
    assert load_runs(environ).runs[str(first)].note is None


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / KIND).touch()
    with pytest.raises(MachineError) as caught:
        save(RUN, {"KIMIGGUF_PROFILES": str(tmp_path)})
    assert caught.value.code == "cannot-write"


def test_a_broken_measurement_is_told_and_costs_only_itself(tmp_path: Path) -> None:
    environ = {"KIMIGGUF_PROFILES": str(tmp_path)}
    path = save(RUN, environ)
    (tmp_path / KIND / "bad.toml").write_text('source = "x"\nspeeds = "fast"\n')
    found = load_runs(environ)
    assert str(path) in found.runs
    (problem,) = found.problems
    assert "bad.toml" in problem
    assert "speeds" in problem


@pytest.mark.parametrize(
    ("changes", "machine", "expected"),
    [
        ({}, BOX, [Where.HERE]),
        # MemTotal is less than the modules hold, and a driver reports less than the card is rated at.
        (
            {},
            replace(BOX, ram_bytes=755 * 2**30, cards=(Card(name="RTX", total_bytes=97_887 << 20),)),
            [Where.HERE],
        ),
        ({}, replace(BOX, ram_bytes=512 << 30), []),
        ({}, replace(BOX, ram_bytes=None), []),
        ({}, replace(BOX, cpu="AMD EPYC 7302"), []),
        ({}, replace(BOX, cards=()), []),
        ({}, replace(BOX, cards=None), []),
        ({}, replace(BOX, cards=(Card(name="GTX", total_bytes=96 << 30),)), []),
        ({}, replace(BOX, cards=BOX.cards + BOX.cards if BOX.cards else None), []),
        ({"model": replace(RUN.model, quant="UD-IQ1_S")}, BOX, []),
        # The tiny K3 of the tests is called UD-IQ1_M as well, and does 1,000 tokens a second.
        ({"model": replace(RUN.model, size_bytes=6_213_280)}, BOX, []),
        ({"model": replace(RUN.model, size_bytes=None)}, BOX, []),
        ({"model": replace(RUN.model, size_bytes=SIZE - 7_000_000)}, BOX, [Where.HERE]),
        ({"speeds": ()}, BOX, []),
        ({"machine": replace(BOX, cards=None)}, BOX, []),
        ({"machine": Fingerprint(cards=())}, Fingerprint(cards=(), ram_bytes=1 << 40), []),
        ({"source": "https://example.com/1"}, BOX, [Where.ELSEWHERE]),
        (
            {"source": "https://example.com/1", "machine": replace(BOX, cpu=None, ram_bytes=None)},
            BOX,
            [Where.ELSEWHERE],
        ),
    ],
)
def test_a_run_is_shown_only_for_the_machine_and_files_it_was_made_with(
    changes: dict[str, object], machine: Fingerprint, expected: list[Where]
) -> None:
    run = replace(RUN, **changes)  # type: ignore[arg-type]  # names and types are the test's own
    assert told(run, machine) == expected


def test_a_described_machine_is_not_called_this_one() -> None:
    assert told(RUN, here=False) == [Where.ON_SUCH]


def test_ones_own_latest_run_comes_before_older_ones_and_before_reports() -> None:
    runs = {
        "older": replace(RUN, date="2026-11-29"),
        "latest": RUN,
        "report": replace(RUN, source="https://example.com/1", date="2027-01-01"),
        "undated": replace(RUN, date=None),
    }
    (only,) = matching(runs, BOX, "UD-IQ1_M", SIZE, is_this_one=True)
    assert only.file == "latest"


def test_one_figure_stands_for_both_turns_of_a_depth_and_its_ends_are_told_only_where_they_are_apart() -> None:
    (cold,) = RUN.speeds
    steady = Spread(median=9.0, lowest=8.9, highest=9.2, count=3)
    rows = (
        replace(cold, depth_tokens=0, decode_tokens_per_second=steady),
        replace(cold, depth_tokens=0, warmth=Warmth.WARM),
        replace(cold, warmth=Warmth.WARM),
        replace(cold, depth_tokens=9000, decode_tokens_per_second=None),
    )
    assert in_words(replace(RUN, speeds=rows)).startswith(
        "9.0 tok/s at depth 0, 4.2 (4.0-4.5) tok/s at depth 4,096 (context"
    )


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (RUN, "4.2 (4.0-4.5) tok/s at depth 4,096 (context 32,768, llama.cpp b11434-0c1e57098, 2026-11-30)"),
        (
            Run(
                source="https://example.com/1",
                machine=BOX,
                model=RUN.model,
                speeds=tuple(
                    Speed(warmth=warmth, decode_tokens_per_second=Spread(median=rate))
                    for warmth, rate in ((Warmth.COLD, 0.23), (Warmth.WARM, 5.1))
                ),
            ),
            "0.23 tok/s cold, 5.1 tok/s warm (https://example.com/1)",
        ),
    ],
)
def test_a_run_in_a_line_says_at_which_depth_and_told_by_whom(run: Run, text: str) -> None:
    assert in_words(run) == text


SHIPPED = [
    path
    for name in profile_files.names(KIND, {"KIMIGGUF_PROFILES": ""})
    if (path := profile_files.shipped() / KIND / f"{name}.toml").is_file()
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_measurement_names_its_source_and_fits_its_machine_file(path: Path) -> None:
    run = profile_files.load(path, Run)
    assert run.source.startswith("https://")
    assert any(speed.decode_tokens_per_second for speed in run.speeds)
    assert run.machine.name is not None
    assert is_such(run.machine, fingerprint(load_machine(run.machine.name)))
    known = {quant.name: quant.size_bytes for quant in load_model().quants}
    if run.model.quant in known and run.model.size_bytes is not None:
        assert abs(run.model.size_bytes - known[run.model.quant]) < known[run.model.quant] // 100


def test_some_measurements_are_shipped() -> None:
    assert len(SHIPPED) >= 4
