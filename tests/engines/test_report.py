"""The engine's own memory report: read, set beside the ledger, and unknown with a reason where there is none."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.plans import make_plan

from kimigguf.engines.command import Command, command
from kimigguf.engines.engine import EngineKind, FoundEngine
from kimigguf.engines.report import Columns, Comparison, compare, memory_arguments, parse_report, report_tool, verify
from kimigguf.engines.serving import load_serving
from kimigguf.gguf_file.shards import ShardSet, find_set, read_set
from kimigguf.hardware.snapshot import Machine, Ram
from kimigguf.memory.ledger import Column, Component, Ledger, Row, Source
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import Settings
from kimigguf.placement.plan import Plan, plan_for, planned_model
from kimigguf.units import GIB, MIB

REPORT = """\
load_backend: loaded CPU backend
RPC0 39136 848 488
RPC1 19168 458 532
Host 508340 0 364
"""
"""As llama-fit-params -fitp on of llama.cpp 0c1e57098 prints it for K3 over two loopback RPC devices."""


def row(device: int | None, size_bytes: int, column: Column) -> Row:
    return Row(component=Component.TRUNK, device=device, size_bytes=size_bytes, source=Source.HEADER, column=column)


def ledger_of(*rows: Row) -> Ledger:
    return Ledger(devices=("gpu0", "gpu1"), rows=rows)


def found(path: str | None, kind: EngineKind = EngineKind.LLAMA_SERVER) -> FoundEngine:
    return FoundEngine(kind=kind, path=path, version="v", build=11434, supports_k3=True, backends=("cpu",))


def test_every_device_and_the_host_are_read_and_noise_is_not() -> None:
    report = parse_report(REPORT)
    assert list(report) == ["RPC0", "RPC1", "Host"]
    assert report["RPC1"] == Columns(model_bytes=19168 * MIB, context_bytes=458 * MIB, compute_bytes=532 * MIB)


def test_equal_numbers_agree_and_what_lies_beside_the_engine_is_left_out() -> None:
    report = parse_report(REPORT)
    rows = [
        row(device, size, column)
        for device, name in ((0, "RPC0"), (1, "RPC1"), (None, "Host"))
        for column, size in (
            (Column.MODEL, report[name].model_bytes),
            (Column.CONTEXT, report[name].context_bytes),
            (Column.COMPUTE, report[name].compute_bytes),
            (Column.BESIDE, 99 * GIB),
        )
    ]
    comparison = compare(ledger_of(*rows), report, ("RPC0", "RPC1"))
    assert comparison.agrees is True
    assert [device.name for device in comparison.devices] == ["gpu0", "gpu1", "host"]
    assert {device.difference_bytes for device in comparison.devices} == {0}


@pytest.mark.parametrize(("percent", "agrees"), [(1.9, True), (2.1, False), (-1.9, True), (-2.1, False)])
def test_two_percent_on_one_device_is_the_limit_in_both_directions(percent: float, agrees: bool) -> None:
    engine = {"RPC0": Columns(model_bytes=10 * GIB, context_bytes=0, compute_bytes=0)}
    engine["Host"] = Columns(model_bytes=0, context_bytes=0, compute_bytes=0)
    ledger = Ledger(devices=("gpu0",), rows=(row(0, int(10 * GIB * (1 + percent / 100)), Column.MODEL),))
    assert compare(ledger, engine, ("RPC0",)).agrees is agrees


def test_a_few_mib_on_an_almost_empty_device_are_rounding() -> None:
    engine = {"Host": Columns(model_bytes=8 * MIB, context_bytes=0, compute_bytes=2 * MIB)}
    assert compare(Ledger(devices=(), rows=(row(None, 14 * MIB, Column.MODEL),)), engine, ()).agrees is True


def test_what_the_ledger_does_not_know_is_no_disagreement_and_no_agreement() -> None:
    engine = {"Host": Columns(model_bytes=900 * MIB, context_bytes=MIB, compute_bytes=500 * MIB)}
    buffer = replace(row(None, 0, Column.COMPUTE), size_bytes=None)

    def compared(model_bytes: int) -> Comparison:
        rows = (row(None, model_bytes, Column.MODEL), row(None, MIB, Column.CONTEXT), buffer)
        return compare(Ledger(devices=(), rows=rows), engine, ())

    assert compared(900 * MIB).agrees is None
    assert "compute" in compared(900 * MIB).why_unknown
    assert compared(700 * MIB).agrees is False, "the weights are known, and differ"


def test_a_device_that_the_report_does_not_name_makes_it_unknown() -> None:
    comparison = compare(ledger_of(), parse_report(REPORT), ("CUDA0", "RPC1"))
    assert comparison.agrees is None
    assert "CUDA0" in str(comparison.reason)


def test_only_the_arguments_that_the_tool_knows_are_passed_with_their_values() -> None:
    argv = ("--model", "m.gguf", "--host", "127.0.0.1", "--fit", "off", "--metrics", "--threads", "-1", "--no-repack")
    known = frozenset({"--model", "--fit", "--threads", "--no-repack"})
    kept = ("--model", "m.gguf", "--fit", "off", "--threads", "-1", "--no-repack")
    assert memory_arguments(argv, known) == kept


def test_the_tool_is_looked_for_beside_the_server_and_behind_its_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name in ("llama-server", "llama-fit-params"):
        (tmp_path / "real" / name).touch()
    (tmp_path / "llama-server").symlink_to(tmp_path / "real" / "llama-server")
    assert report_tool(found(str(tmp_path / "llama-server"))) == (str(tmp_path / "real" / "llama-fit-params"),)
    assert report_tool(found("/opt/llama", EngineKind.LLAMA)) == ("/opt/llama", "fit-params")
    assert report_tool(found(str(tmp_path / "elsewhere" / "llama-server"))) is None


def tiny_shards(folder: Path) -> ShardSet:
    return read_set(find_set(folder))


@pytest.mark.parametrize("kind", [EngineKind.EMBEDDED, EngineKind.LLAMA_CPP_PYTHON, EngineKind.LLAMA_SERVER])
def test_an_engine_without_a_report_is_unknown_with_the_reason(kind: EngineKind, tiny: Path) -> None:
    argv = Command(argv=("x", "--model", "m"), environ={})
    comparison = verify(make_plan(), tiny_shards(tiny), found(None, kind), argv, environ={})
    assert comparison.agrees is None
    assert "no memory report" in str(comparison.reason)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "--help"),
        (
            'if [ "$1" = --help ]; then echo "--model --fit"; else echo "error: no such device" >&2; fi',
            "no such device",
        ),
        ('if [ "$1" = --help ]; then echo "--model"; else echo "GPU7 1 2 3"; fi', "Host"),
    ],
)
def test_a_tool_that_fails_or_talks_nonsense_is_unknown_with_its_own_words(
    tmp_path: Path, tiny: Path, tiny_plan: Plan, script: str, reason: str
) -> None:
    for name in ("llama-server", "llama-fit-params"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    argv = Command(argv=("llama-server", "--model", "m.gguf"), environ={})
    server = found(str(tmp_path / "llama-server"))
    comparison = verify(tiny_plan, tiny_shards(tiny), server, argv, environ={"PATH": "/usr/bin:/bin"})
    assert comparison.agrees is None
    assert reason in str(comparison.reason)


@pytest.mark.native
def test_the_native_engine_agrees_on_a_tiny_model_and_its_stubs_are_gone(
    tmp_path: Path, tiny: Path, native_bin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shards = tiny_shards(tiny)
    machine = Machine(name="m", source="test", ram=Ram(total_bytes=64 * GIB), accelerators=())
    wanted = Settings(context_tokens=4096)
    plan = plan_for(ModelSpec.from_shards(shards), machine, wanted, model=planned_model(shards, folder=str(tiny)))
    assert isinstance(plan, Plan)
    server = found(str(native_bin / "llama-server"))
    argv = command(plan, server, profile=load_serving("kimi-k3"))
    comparison = verify(plan, shards, server, argv, environ={"PATH": "/usr/bin:/bin"})
    assert comparison.agrees is True, comparison
    assert "--fit" in comparison.argv
    assert list(tmp_path.iterdir()) == []
