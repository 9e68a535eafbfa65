"""Which way is taken and why, and that each takes of the disk what was predicted, by blocks, within one percent."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.disk_use import DiskUse
from fakes.gguf_set import write_set
from fakes.ollama import serve
from fakes.ollama_store import Ollama
from fakes.sources import source_of
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.errors import MachineError
from kimigguf.events import ignore
from kimigguf.gguf_file.read import read_header
from kimigguf.ollama import link
from kimigguf.ollama.disk import need_merged
from kimigguf.ollama.merged import merged
from kimigguf.ollama.registration import Registration, plan, register
from kimigguf.ollama.source import Source
from kimigguf.ollama.ways import Candidate, Route, choose

OLD, NEW = "0.34.2", "0.35.1"


@pytest.fixture(autouse=True)
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system of the temporary folder can clone must not decide."""
    monkeypatch.setattr(link, "_clone", lambda _source, _target, _folder: False)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return source_of(write_set(tmp_path / "sets" / "UD-IQ1_S", size_bytes=1_000_000))


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no second file system that can be written here")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


def planned(stand_in: Ollama, source: Source, **told: Any) -> Registration:
    return plan(source, {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}, **told)


def takes(
    stand_in: Ollama, source: Source, registration: Registration, *, apart: Path | None = None
) -> tuple[int, int, int]:
    """Register, and hold what it took at the peak, afterwards and settled against what was predicted."""
    need, allowed = registration.need, source.size_bytes // 100
    beside = apart or source.files[0].path.parent
    together = [stand_in.folder] if apart else [stand_in.folder, beside]
    with ExitStack() as stack:
        use = stack.enter_context(DiskUse(*together))
        work = stack.enter_context(DiskUse(beside)) if apart else None
        stand_in.watch = use.look
        register(registration, ignore, environ={})
        after = use.now_bytes()
    assert use.peak_bytes == pytest.approx(need.peak_bytes, abs=allowed)
    assert after == pytest.approx(need.after_bytes, abs=allowed)
    if work is not None:
        assert work.peak_bytes == pytest.approx(need.work_bytes, abs=allowed)
        assert work.now_bytes() < allowed
    stand_in.restart()
    settled = use.now_bytes()
    assert settled == pytest.approx(need.settled_bytes, abs=allowed)
    assert list(stand_in.models()) == ["kimi-k3:ud-iq1_s"]
    assert not list(beside.rglob("*.part"))
    return tuple(round(size / source.size_bytes) for size in (use.peak_bytes, after, settled))  # type: ignore[return-value]  # three of them


def test_shards_that_ollama_keeps_are_linked_and_take_nothing(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=NEW) as stand_in:
        registration = planned(stand_in, source)
        assert (registration.chosen.route, registration.link) == (Route.SHARDS, True)
        assert "keeps the shards" in registration.survey.reason
        assert takes(stand_in, source, registration) == (0, 0, 0)


def test_shards_that_ollama_keeps_are_sent_once(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=NEW) as stand_in:
        assert takes(stand_in, source, planned(stand_in, source, copy=True)) == (1, 1, 1)


def test_a_clone_takes_nothing_either(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system here can clone: a second name for the file stands in for one."""

    def clone(original: Path, target: Path, _folder: object) -> bool:
        os.link(original, target)
        return True

    monkeypatch.setattr(link, "_clone", clone)
    for version, expected in ((NEW, (0, 0, 0)), (OLD, (1, 1, 1))):
        with serve(tmp_path / version, version=version) as stand_in:
            assert takes(stand_in, source, planned(stand_in, source)) == expected


def test_an_ollama_that_merges_gets_the_merged_file_as_a_link(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source)
        assert (registration.chosen.route, registration.link) == (Route.MERGED, True)
        assert "takes 3.0 MB at the peak; the shards as they are would take 6.0 MB" in registration.survey.reason
        assert takes(stand_in, source, registration) == (1, 1, 1)
        assert stand_in.received_bytes == 0
        (blob,) = [path for path in stand_in.blobs.iterdir() if path.stat().st_size > source.size_bytes // 2]
        assert len(read_header(blob).tensors) == 3
        assert blob.stat().st_nlink == 1
        found = source.files[0].path.parent.rglob("*.gguf")
        assert sorted(path.name for path in found) == [file.name for file in source.files]


def test_where_nothing_may_be_linked_the_merged_file_is_sent_and_removed(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source, copy=True)
        assert (registration.chosen.route, registration.link) == (Route.MERGED, False)
        assert "not linked: --copy was given" in registration.survey.reason
        assert takes(stand_in, source, registration) == (2, 1, 1)


def test_a_merged_file_on_another_disk_is_counted_there(tmp_path: Path, source: Source, other_disk: Path) -> None:
    with serve(other_disk / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source, copy=True)
        assert registration.need.work_bytes == merged([file.path for file in source.files]).size_bytes
        assert takes(stand_in, source, registration, apart=source.files[0].path.parent) == (1, 1, 1)


def test_shards_on_another_disk_are_merged_where_the_result_can_be_linked(
    tmp_path: Path, source: Source, other_disk: Path
) -> None:
    with serve(other_disk / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source)
        assert registration.link
        assert registration.survey.work is not None
        assert registration.survey.work.folder == stand_in.folder / ".kimigguf"
        assert takes(stand_in, source, registration) == (1, 1, 1)


@pytest.mark.parametrize(("copy", "expected"), [(True, (3, 2, 1)), (False, (2, 1, 1))])
def test_where_there_is_no_place_to_merge_ollama_does_it(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch, copy: bool, expected: tuple[int, int, int]
) -> None:
    monkeypatch.setattr("kimigguf.ollama.workplace._look_at", lambda _path, _folder: None)
    with serve(tmp_path / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source, copy=copy)
        assert registration.chosen.route is Route.SHARDS
        assert "no folder to merge in" in registration.survey.reason
        assert takes(stand_in, source, registration) == expected


def test_what_an_earlier_run_has_merged_is_not_predicted_again(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=OLD) as stand_in:
        job = planned(stand_in, source).survey.job
        assert job is not None
        header = len(merged(job.files).header)
        job.folder.mkdir()
        job.part.write_bytes(bytes(header) + source.files[1].path.read_bytes()[-1_000_000:])
        registration = planned(stand_in, source)
        assert registration.need.peak_bytes == pytest.approx(2_000_000, abs=20_000)
        need = registration.need
        with DiskUse(stand_in.folder, job.folder) as use:
            register(registration, ignore, environ={})
        assert use.peak_bytes == pytest.approx(need.peak_bytes, abs=30_000)
        assert use.now_bytes() == pytest.approx(need.after_bytes, abs=30_000)


def test_a_set_that_ollama_has_merged_takes_nothing_under_a_second_name(tmp_path: Path, source: Source) -> None:
    with serve(tmp_path / "models", version=OLD) as stand_in:
        register(planned(stand_in, source), ignore, environ={})
        second = planned(stand_in, source, name="again")
        assert (second.need.peak_bytes, second.need.present_bytes > source.size_bytes // 2) == (0, True)
        with DiskUse(stand_in.folder, source.files[0].path.parent) as use:
            register(second, ignore, environ={})
        assert use.peak_bytes < source.size_bytes // 100
        assert sorted(stand_in.models()) == ["again:latest", "kimi-k3:ud-iq1_s"]


def test_without_room_for_any_way_nothing_is_taken_and_the_third_way_is_named(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("storage", "workplace"):
        monkeypatch.setattr(f"kimigguf.ollama.{module}.shutil.disk_usage", lambda _path: SimpleNamespace(free=1_000))
    with serve(tmp_path / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source)
        with DiskUse(stand_in.folder, source.files[0].path.parent) as use, pytest.raises(MachineError) as error:
            register(registration, ignore, environ={})
        assert (error.value.code, use.peak_bytes) == ("ollama-no-space", 0)
        assert "--ollama-api" in (error.value.hint or "")


def test_room_for_one_way_only_decides(tmp_path: Path, source: Source, other_disk: Path) -> None:
    """Merging beside the shards and sending would fit Ollama's disk, but not the shards'."""
    with serve(other_disk / "models", version=OLD) as stand_in:
        registration = planned(stand_in, source, copy=True)
        assert registration.survey.work is not None
        tight = registration.survey.candidates[1]
        assert choose([registration.survey.candidates[0], replace(tight, work_short_bytes=1)]).route is Route.SHARDS


def test_a_full_merge_folder_is_refused_with_what_is_missing_there(
    source: Source, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(other_disk / "models", version=OLD) as stand_in:
        monkeypatch.setattr(
            "kimigguf.ollama.storage.shutil.disk_usage",
            lambda path: SimpleNamespace(free=5_000_000 if str(path).startswith(str(other_disk)) else 2_000_000),
        )
        registration = planned(stand_in, source, copy=True)
        with pytest.raises(MachineError) as error:
            register(registration, ignore, environ={})
    assert error.value.code == "ollama-no-space"
    assert "2.0 MB free in" in error.value.message


@given(
    size=st.integers(1, 1 << 41),
    share=st.floats(0, 1),
    present=st.booleans(),
    linked=st.booleans(),
    apart=st.booleans(),
)
def test_no_moment_takes_more_than_the_peak(size: int, share: float, present: bool, linked: bool, apart: bool) -> None:
    found = need_merged(size, begun_bytes=int(size * share), present=present, linked=linked, apart=apart and not linked)
    assert found.peak_bytes >= max(found.after_bytes, found.send_bytes, 0)
    assert found.peak_bytes + found.work_bytes <= 2 * size
    assert found.send_bytes + found.present_bytes + found.linked_bytes == size


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 1, None])), min_size=1, max_size=4))
def test_a_way_without_room_is_taken_only_if_there_is_none_with(told: list[tuple[int, int, int | None]]) -> None:
    base = need_merged(100, begun_bytes=0, present=False, linked=True, apart=False)
    ways = [
        Candidate(
            route=Route.SHARDS,
            need=replace(base, peak_bytes=peak, after_bytes=after),
            link=True,
            how="",
            short_bytes=short,
        )
        for peak, after, short in told
    ]
    chosen = choose(ways)
    able = [way for way in ways if way.fits is not False]
    assert chosen in (able or ways)
    assert chosen.need.peak_bytes == min(way.need.peak_bytes for way in able or ways)
