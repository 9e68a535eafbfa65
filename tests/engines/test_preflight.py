"""Each check before a start, by what it must say."""

from pathlib import Path

import pytest

from kimigguf.download.store import FileState, StoredFile, StoredSet
from kimigguf.engines.evidence import State
from kimigguf.engines.preflight import check_files, check_log_room, check_numa, check_plan, check_swap
from kimigguf.units import GIB


def test_files_without_a_manifest_are_unknown_not_good() -> None:
    file = StoredFile(
        name="a.gguf", path=Path("a.gguf"), size_bytes=5, sha256=None, state=FileState.UNVERIFIED, done_bytes=5
    )
    check = check_files(StoredSet(folder=Path(), files=(file,)))
    assert check.state is State.UNKNOWN
    assert not check.blocks


def test_a_plan_that_no_longer_holds_stops_the_start_with_what_changed() -> None:
    check = check_plan(["RAM: the plan needs 600 GiB, and 500 GiB are usable now"])
    assert check.blocks
    assert check.state is State.FAILED
    assert "500 GiB" in check.evidence
    assert check.hint
    assert check_plan([]).state is State.PASSED


@pytest.mark.parametrize(
    ("nodes", "balancing", "state"),
    [(2, "1", State.FAILED), (2, "0", State.PASSED), (2, None, State.UNKNOWN), (1, "1", None), (None, "1", None)],
)
def test_page_migration_between_memory_nodes_is_named(
    nodes: int | None, balancing: str | None, state: State | None
) -> None:
    checks = check_numa(nodes, balancing)
    assert [check.state for check in checks] == ([] if state is None else [state])
    assert not any(check.blocks for check in checks)


def test_swap_is_told_and_stops_nothing() -> None:
    assert check_swap(0).state is State.PASSED
    assert check_swap(8 * GIB).state is State.UNKNOWN
    assert "8.0 GiB" in check_swap(8 * GIB).evidence


def test_room_for_logs_is_looked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    check = check_log_room(tmp_path / "not" / "yet")
    assert str(tmp_path) in check.evidence
