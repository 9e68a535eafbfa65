"""Each check before a start, by what it must say."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import native_folder
from fakes.plans import make_plan

from kimigguf.download.store import FileState, StoredFile, StoredSet
from kimigguf.engines.engine import Build, EngineKind, FoundEngine
from kimigguf.engines.evidence import State
from kimigguf.engines.preflight import (
    LockLimit,
    check_configs,
    check_cuda,
    check_files,
    check_locking,
    check_log_room,
    check_numa,
    check_plan,
    check_spread,
    check_swap,
    check_threads,
    judge_log_room,
    parse_locks,
    parse_processors,
    read_surroundings,
)
from kimigguf.hardware.host import Host
from kimigguf.hardware.snapshot import Cpu
from kimigguf.memory.ledger import Column, Component, Ledger, Row, Source
from kimigguf.placement.plan import Plan
from kimigguf.units import GIB, MIB

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         8388608              8388608              bytes
Max address space         unlimited            unlimited            bytes
"""
"""/proc/self/limits of a login on Debian 12, shortened."""
STATUS = "Name:\tcat\nCapInh:\t0000000000000000\nCapEff:\t{mask}\nCapBnd:\t000001ffffffffff\n"
LOCKING = ("llama-server", "--load-mode", "mmap+mlock")


def engine(
    *, kind: EngineKind = EngineKind.LLAMA_SERVER, built: Build | None = None, warnings: tuple[str, ...] = ()
) -> FoundEngine:
    return FoundEngine(
        kind=kind, path="/x", version="v", build=1, supports_k3=True, backends=None, built=built, warnings=warnings
    )


def planned(host_bytes: int, *, streamed_bytes: int = 0) -> Plan:
    """A plan that keeps so much of the model in RAM."""
    plan = make_plan()
    row = Row(
        component=Component.EXPERTS, device=None, size_bytes=host_bytes, source=Source.HEADER, column=Column.MODEL
    )
    return replace(plan, ledger=Ledger(devices=(), rows=(row,)), streamed_bytes=streamed_bytes)


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


def test_a_log_folder_below_one_that_nobody_may_look_into_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def closed(path: Any, **options: Any) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    assert str(tmp_path) in check_log_room(tmp_path / "closed" / "kimigguf").evidence


def test_a_full_log_disk_is_named_with_a_way_out() -> None:
    check = judge_log_room(5 * MIB, Path("/var"))
    assert (check.state, check.blocks) == (State.FAILED, False)
    assert "XDG_STATE_HOME" in str(check.hint)
    assert judge_log_room(5 * GIB, Path("/var")).hint is None


def test_swap_that_could_not_be_read_is_not_taken_for_none() -> None:
    assert check_swap(None).state is State.UNKNOWN


def test_a_cuda_build_that_computes_wrongly_is_told_only_where_cuda_is_used() -> None:
    broken = engine(warnings=("it was built with CUDA 13.2.0, which computes wrongly",))
    assert check_cuda(broken, uses_cuda=False) == ()
    (check,) = check_cuda(broken, uses_cuda=True)
    assert (check.state, check.hint is not None) == (State.FAILED, True)
    assert "13.2.0" in check.evidence
    assert check_cuda(engine(built=Build(cuda_version="12.8.93")), uses_cuda=True)[0].state is State.PASSED
    assert check_cuda(engine(built=Build()), uses_cuda=True)[0].state is State.UNKNOWN
    assert check_cuda(engine(), uses_cuda=True)[0].state is State.UNKNOWN


@pytest.mark.parametrize(
    ("limits", "mask", "wanted"),
    [
        (LIMITS, "0000000000000000", LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB)),
        (LIMITS, "000001ffffffffff", LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB, exempt=True)),
        (LIMITS, "00000000a80425fb", LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB)),  # Docker's default
        (
            LIMITS.replace("8388608              8388608", "65536                unlimited"),
            "0",
            LockLimit(soft_bytes=65536, hard_bytes=None),
        ),
        ("", "0", None),
        (None, "0", None),
    ],
)
def test_the_limit_on_locked_memory_is_read_with_the_right_to_pass_it(
    limits: str | None, mask: str, wanted: LockLimit | None
) -> None:
    assert parse_locks(limits, STATUS.format(mask=mask)) == wanted


def test_no_word_about_locking_where_nobody_asked_for_it() -> None:
    assert check_locking(planned(600 * GIB), ("llama-server", "--load-mode", "mmap"), None) == ()


@pytest.mark.parametrize(
    ("limit", "state", "hint"),
    [
        (None, State.UNKNOWN, None),
        (LockLimit(soft_bytes=None, hard_bytes=None), State.PASSED, None),
        (LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB, exempt=True), State.PASSED, None),
        (LockLimit(soft_bytes=8 * MIB, hard_bytes=None), State.FAILED, "ulimit -l unlimited"),
        (LockLimit(soft_bytes=8 * MIB, hard_bytes=700 * GIB), State.FAILED, f"ulimit -l {600 << 20}"),
        (
            LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB),
            State.FAILED,
            "sudo prlimit --pid $$ --memlock=unlimited:unlimited",
        ),
    ],
)
def test_a_model_that_would_silently_stay_unlocked_is_told_with_what_raises_the_limit(
    limit: LockLimit | None, state: State, hint: str | None
) -> None:
    (check,) = check_locking(planned(600 * GIB), LOCKING, limit)
    assert (check.state, check.hint, check.blocks) == (state, hint, False)


def test_locking_what_has_no_room_in_memory_stops_the_start() -> None:
    (check,) = check_locking(planned(600 * GIB, streamed_bytes=90 * GIB), LOCKING, None)
    assert (check.state, check.blocks) == (State.FAILED, True)
    assert "90.0 GiB" in check.evidence


def test_the_hint_for_a_limit_raises_it_for_this_very_shell() -> None:
    done = subprocess.run(
        ["sh", "-c", "ulimit -l 64; prlimit --pid $$ --memlock=128000:128000 && ulimit -l"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"this user may not raise a limit: {done.stderr.strip()}")
    assert done.stdout.strip() == "125"


def test_llama_cpps_own_configuration_file_cannot_undo_a_plan_unseen() -> None:
    argv = ("llama-server", "--model", "x", "--temp", "1.0")
    text = "threads = 8\ntemp = 0.2\n[*]\nn-cpu-moe = 3\nngl = 4\n[other]\nctx-size = 5\n"
    (check,) = check_configs(engine(), [("/etc/llama.cpp/config.ini", text)], argv)
    assert check.state is State.FAILED
    assert "does not stand with --n-cpu-moe, --ngl" in check.evidence
    assert "--ctx-size" not in check.evidence, "a section that no program reads by itself"
    assert "--temp" not in check.evidence, "the command line says it"
    (harmless,) = check_configs(engine(), [("/etc/x", "threads = 8\n")], argv)
    assert (harmless.state, "--threads" in harmless.evidence) == (State.PASSED, True)
    assert check_configs(engine(kind=EngineKind.EMBEDDED), [("/etc/x", text)], argv) == ()


def test_the_system_is_read_where_it_says_these_things(tmp_path: Path) -> None:
    for name, text in {
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/self/limits": LIMITS,
        "proc/self/status": STATUS.format(mask="0"),
        "home/kim/.config/llama.cpp/config.ini": "threads = 8\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_surroundings({"HOME": "/home/kim"}, Host(root=tmp_path))
    assert found.locks == LockLimit(soft_bytes=8 * MIB, hard_bytes=8 * MIB)
    assert found.configs == (("/home/kim/.config/llama.cpp/config.ini", "threads = 8"),)
    assert check_numa(2, found.numa_balancing)[0].state is State.FAILED
    bare = read_surroundings({"HOME": "/home/kim"}, Host(root=tmp_path / "proc"))
    assert (bare.numa_balancing, bare.locks, bare.configs) == (None, None, ())


def test_threads_on_two_nodes_are_unknown_until_the_engine_is_told() -> None:
    assert check_spread(1, engine(), ()) == ()
    (check,) = check_spread(2, engine(), ("llama-server",))
    assert (check.state, check.hint) == (State.UNKNOWN, "add at the end: -- --numa distribute")
    assert check_spread(2, engine(), ("llama-server", "--numa", "distribute"))[0].state is State.PASSED
    assert check_spread(2, engine(kind=EngineKind.EMBEDDED), ())[0].hint is None


@pytest.mark.parametrize(
    ("quota", "processors", "argv", "threads", "fewer"),
    [
        (8.0, 64, (), 32, 8),  # docker run --cpus 8
        (None, 4, (), 32, 4),  # taskset, --cpuset-cpus
        (1.5, 64, ("--threads", "2"), 2, 1),
        (0.5, None, ("-t", "4"), 4, 1),
        (8.0, 64, ("--threads", "-1"), 32, 8),
    ],
)
def test_more_threads_than_processors_that_a_container_leaves(
    quota: float | None, processors: int | None, argv: tuple[str, ...], threads: int, fewer: int
) -> None:
    cpu = Cpu(cores=32, threads=64, quota_cores=quota)
    (check,) = check_threads(cpu, processors, engine(), argv)
    assert check.state is State.FAILED
    assert not check.blocks
    assert check.evidence.startswith(f"{threads} threads on ")
    assert check.hint == f"add at the end: -- --threads {fewer}"
    embedded = check_threads(cpu, processors, engine(kind=EngineKind.EMBEDDED), argv)[0].hint
    assert embedded is not None
    assert f"--engine llama-server and at the end -- --threads {fewer}" in embedded


@pytest.mark.parametrize(
    ("cpu", "processors", "argv"),
    [
        (Cpu(cores=32, threads=64), 64, ()),
        (Cpu(cores=32, threads=64, quota_cores=32.0), None, ()),
        (Cpu(cores=32, threads=64, quota_cores=8.0), 64, ("--threads", "8")),
        (Cpu(), None, ()),
        (Cpu(quota_cores=8.0), None, ()),  # how many cores there are is unknown
    ],
)
def test_as_many_threads_as_processors_are_nothing_to_speak_of(
    cpu: Cpu, processors: int | None, argv: tuple[str, ...]
) -> None:
    assert check_threads(cpu, processors, engine(), argv) == ()


@pytest.mark.parametrize(
    ("status", "count"),
    [
        ("Cpus_allowed:\tff\nCpus_allowed_list:\t0-3,8,10-11\n", 7),
        ("Cpus_allowed_list:\t5\n", 1),
        ("Name:\tcat\n", None),
        (None, None),
    ],
)
def test_the_processors_that_a_process_may_use_are_counted(status: str | None, count: int | None) -> None:
    assert parse_processors(status) == count


def test_this_process_may_use_the_processors_that_the_kernel_says() -> None:
    assert read_surroundings({}).processors == len(os.sched_getaffinity(0))


@pytest.mark.native
@pytest.mark.engine
def test_the_real_server_does_read_that_configuration_file(tmp_path: Path) -> None:
    """What makes the check worth its line: an option of the file is in force without a word on the command line."""
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text("no-such-option = 1\nctx-size = nonsense\n")
    done = subprocess.run(
        [str(native_folder() / "llama-server"), "--model", "/nonexistent.gguf", "--port", "0"],
        env={"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "using config file" in done.stdout + done.stderr or "stoi" in done.stdout + done.stderr
