import hashlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.gguf_set import write_set
from gguf import GGUFReader

from kimigguf.errors import IntegrityError, MachineError
from kimigguf.events import Advance, Event, Notice, Step, ignore
from kimigguf.gguf_file.read import read_header
from kimigguf.ollama.merge import Job, Record, check, merge, split_tool
from kimigguf.ollama.merged import merged


@pytest.fixture
def job(shards: tuple[Path, ...], tmp_path: Path) -> Job:
    return Job(files=shards, folder=tmp_path / "work", name="UD-IQ1_S")


def script(path: Path, body: str) -> Path:
    """A program that is called as llama-gguf-split is: ``--merge FIRST OUT``."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def progress(said: list[Event], activity: str) -> list[int]:
    return [event.done_bytes for event in said if isinstance(event, Advance) and event.activity == activity]


def is_record_of(record: Record, job: Job) -> None:
    data = job.whole.read_bytes()
    assert (record.size_bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert sorted(path.name for path in job.folder.iterdir()) == ["UD-IQ1_S.gguf", "UD-IQ1_S.json", "lock"]


def test_the_merged_file_holds_every_key_and_tensor_of_the_shards(job: Job) -> None:
    is_record_of(merge(job, {}, ignore), job)
    whole, parts = GGUFReader(job.whole), [GGUFReader(path) for path in job.files]
    expected = {tensor.name: tensor for part in parts for tensor in part.tensors}
    assert [tensor.name for tensor in whole.tensors] == list(expected)
    assert all(np.array_equal(tensor.data, expected[tensor.name].data) for tensor in whole.tensors)
    keys, first = read_header(job.whole).metadata, read_header(job.files[0]).metadata
    assert {key: value for key, value in keys.items() if key != "split.count"} == {
        key: value for key, value in first.items() if key != "split.count"
    }
    assert keys["split.count"] == 0


@pytest.mark.native
def test_llama_gguf_split_and_kimigguf_write_the_same_bytes(
    tiny: Callable[[str], Path], native_bin: Path, tmp_path: Path
) -> None:
    files = tuple(sorted(tiny("UD-IQ1_M").glob("*.gguf")))
    tool = split_tool({"KIMIGGUF_LLAMA_SERVER": str(native_bin)})
    assert tool == native_bin / "llama-gguf-split"
    theirs = Job(files=files, folder=tmp_path / "theirs", name="UD-IQ1_S", tool=tool)
    ours = Job(files=files, folder=tmp_path / "ours", name="UD-IQ1_S")
    is_record_of(merge(theirs, {}, ignore), theirs)
    merge(ours, {}, ignore)
    assert theirs.whole.read_bytes() == ours.whole.read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.7, 0.999, 1.0])
def test_a_merge_that_was_interrupted_goes_on_where_it_was(job: Job, tmp_path: Path, share: float) -> None:
    merge(replace(job, folder=tmp_path / "other"), {}, ignore)
    whole = (tmp_path / "other" / "UD-IQ1_S.gguf").read_bytes()
    job.folder.mkdir()
    begun = round(len(whole) * share)
    header = len(merged(job.files).header)
    # Neither program writes the header before everything else is there.
    job.part.write_bytes((bytes(min(header, begun)) + whole[header:begun])[:begun])
    said: list[Event] = []
    merge(replace(job, tool=Path("/no/such/tool")), {}, said.append)
    assert job.whole.read_bytes() == whole
    assert min(progress(said, "merge")) >= begun
    assert any(isinstance(event, Step) and "continued" in event.text for event in said)


def test_what_was_begun_of_other_shards_is_not_continued_into_a_mixture(job: Job) -> None:
    plan = merged(job.files)
    job.folder.mkdir()
    job.part.write_bytes(b"\x5a" * (plan.size_bytes // 2))
    said: list[Event] = []
    is_record_of(merge(job, {}, said.append), job)
    assert any(isinstance(event, Notice) and "merging again" in event.text for event in said)
    check(job.whole, plan, ignore)


def test_a_file_without_its_header_is_never_called_whole(job: Job) -> None:
    seen: list[bytes] = []

    def look(event: Event) -> None:
        if isinstance(event, Advance) and event.activity == "merge" and event.done_bytes != event.total_bytes:
            seen.append(job.part.read_bytes()[:4])
            assert not job.whole.exists()

    merge(job, {}, look)
    assert set(seen) <= {b"", bytes(4)}
    assert seen


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (-1, "blk.2.ffn_norm.weight is not what"),
        (8, "keys or its tensor table"),  # the number of tensors
        (300, "keys or its tensor table"),
    ],
)
def test_one_wrong_byte_is_found(job: Job, at: int, told: str) -> None:
    merge(job, {}, ignore)
    data = bytearray(job.whole.read_bytes())
    data[at] ^= 1
    job.whole.write_bytes(data)
    with pytest.raises(IntegrityError) as error:
        check(job.whole, merged(job.files), ignore)
    assert told in (error.value.cause or "") or error.value.code in {"bad-header", "bad-tensor"}


def test_a_cut_file_is_found(job: Job) -> None:
    merge(job, {}, ignore)
    job.whole.write_bytes(job.whole.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="not what its shards hold"):
        check(job.whole, merged(job.files), ignore)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('head -c {size} /dev/urandom > "$3"', "merging again"),
        (
            'head -c 70000 /dev/zero > "$3"; echo "iostream error"; exit 1',
            "gave up, so kimigguf merges itself: iostream",
        ),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "SIGKILL"),
        ("true", "exit code 0"),
    ],
)
def test_what_a_tool_fails_to_merge_is_found_out_and_merged_without_it(
    job: Job, tmp_path: Path, body: str, told: str
) -> None:
    tool = script(tmp_path / "tool", body.replace("{size}", str(merged(job.files).size_bytes)))
    said: list[Event] = []
    is_record_of(merge(replace(job, tool=tool), {"PATH": "/usr/bin:/bin"}, said.append), job)
    check(job.whole, merged(job.files), ignore)
    assert any(isinstance(event, Notice) and told in event.text for event in said)


def test_ctrl_c_ends_the_tool_and_leaves_nothing_that_looks_whole(job: Job, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    tool = script(tmp_path / "tool", f'head -c 5000 /dev/zero > "$3"; echo $$ > {pid}; exec sleep 60')

    def interrupt() -> None:
        while not pid.exists() or not pid.read_text().strip():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        merge(replace(job, tool=tool), {"PATH": "/usr/bin:/bin"}, ignore)
    thread.join()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert not job.whole.exists()
    is_record_of(merge(job, {}, ignore), job)


def test_a_finished_merge_is_not_done_again_and_forgotten_when_a_shard_changes(job: Job) -> None:
    record = merge(job, {}, ignore)
    said: list[Event] = []
    assert merge(job, {}, said.append) == record
    assert said == []
    job.clear()
    assert job.record() == record
    job.files[1].touch()
    assert job.record() is None
    assert merge(job, {}, said.append).sha256 == record.sha256
    assert progress(said, "merge")


def test_an_interruption_between_the_record_and_the_name_costs_no_second_merge(job: Job) -> None:
    record = merge(job, {}, ignore)
    job.whole.rename(job.part)
    said: list[Event] = []
    assert merge(job, {}, said.append) == record
    assert said == []
    assert job.whole.exists()


def test_two_merges_of_one_set_do_not_write_into_each_other(job: Job) -> None:
    def another(_event: Event) -> None:
        with pytest.raises(MachineError, match="is being worked on"):
            merge(job, {}, ignore)

    merge(job, {}, another)


def test_a_full_disk_keeps_what_is_merged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kimigguf.ollama.merge._to_disk", full)
    with pytest.raises(MachineError) as error:
        merge(job, {}, ignore)
    assert error.value.code == "disk-full"
    assert job.part.exists()
    assert not job.whole.exists()


def test_the_tool_is_found_beside_the_server_and_on_path_and_is_none_where_there_is_none(tmp_path: Path) -> None:
    real, links = tmp_path / "real", tmp_path / "links"
    for folder in (real, links):
        folder.mkdir()
    server, tool = script(real / "llama-server", ""), script(real / "llama-gguf-split", "")
    (links / "llama-server").symlink_to(server)
    assert split_tool({"KIMIGGUF_LLAMA_SERVER": str(server)}) == tool
    assert split_tool({"KIMIGGUF_LLAMA_SERVER": str(real)}) == tool
    assert split_tool({"PATH": str(links)}) == tool
    assert split_tool({"PATH": str(tmp_path)}) is None
    server.unlink()
    assert split_tool({"PATH": str(real)}) == tool


def test_shards_that_were_split_by_size_merge_too(tmp_path: Path) -> None:
    files = write_set(tmp_path / "set", tensors=9, size_bytes=4_100)
    job = Job(files=files, folder=tmp_path / "work", name="UD-IQ1_S")
    is_record_of(merge(job, {}, ignore), job)
