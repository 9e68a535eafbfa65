"""Processor and memory from /proc and /sys."""

import pytest
from hardware.captures import Loader
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.hardware.host import Host
from kimigguf.hardware.linux import (
    parse_cpu_list,
    parse_cpuinfo,
    parse_meminfo,
    read_cpu,
    read_numa,
    read_ram,
)
from kimigguf.hardware.snapshot import NumaNode, Ram
from kimigguf.units import GIB, KIB, MIB


def test_a_real_virtual_machine_is_read_whole(capture: Loader) -> None:
    host = capture("vm-v1-no-limit")
    cpu, ram = read_cpu(host).cpu, read_ram(host).ram
    assert cpu is not None
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads) == ("AMD EPYC", 1, 2, 2)
    assert cpu.isa is not None
    assert {"avx2", "avx512f", "avx512_vnni", "avx512_bf16"} <= set(cpu.isa)
    assert "amx_tile" not in cpu.isa
    assert ram is not None
    assert ram.total_bytes == 24684092 * KIB
    assert ram.swap_total_bytes == 0
    assert read_cpu(host).system == "Debian GNU/Linux 12 (bookworm), kernel 6.18.44"


def test_an_arm_machine_gets_its_model_from_the_part_number_and_its_fast_cores_from_the_capacity(
    capture: Loader,
) -> None:
    cpu = read_cpu(capture("gb10")).cpu
    assert cpu is not None
    assert cpu.model == "Cortex-X925 + Cortex-A725"
    assert cpu.isa == ("neon", "dotprod", "i8mm", "bf16", "sve", "sve2")
    assert (cpu.sockets, cpu.cores, cpu.performance_cores) == (1, 2, 1)


def test_two_sockets_with_hyperthreads_are_not_counted_as_cores() -> None:
    blocks = [
        f"processor\t: {n}\nphysical id\t: {n % 2}\ncore id\t: {n // 4}\nmodel name\t: X\nflags\t: avx2"
        for n in range(8)
    ]
    cpu = parse_cpuinfo("\n\n".join(blocks))
    assert (cpu.sockets, cpu.cores, cpu.threads) == (2, 4, 8)


def test_hybrid_cores_of_intel_are_told_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("hybrid")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("processor : 0\nmodel name : Core Ultra\nflags : avx2 avx_vnni\n")
    for name, cpus in (("cpu_core", "0-3"), ("cpu_atom", "4-7")):
        (root / "sys/devices" / name).mkdir(parents=True)
        (root / "sys/devices" / name / "cpus").write_text(cpus)
    for n in range(4):
        folder = root / f"sys/devices/system/cpu/cpu{n}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{n // 2 * 2}-{n // 2 * 2 + 1}")
    cpu = read_cpu(Host(root=root, environ={})).cpu
    assert cpu is not None
    assert cpu.performance_cores == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal: 640 kB\n", Ram(total_bytes=640 * KIB)),  # a machine of 1990, and a kernel without MemAvailable
        ("MemTotal: 100 kB\nMemAvailable: 200 kB\n", Ram(total_bytes=100 * KIB)),  # cannot be
        ("MemTotal: 0 kB\n", Ram()),
        ("MemTotal: many kB\nMemAvailable: -5 kB\nSwapTotal:\n", Ram()),
        ("\0\xff garbage", Ram()),
        ("", Ram()),
        (
            "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nSwapTotal: 1024 kB\n"  # noqa: ISC004 -- one text
            "HugePages_Total: 16\nHugepagesize: 2048 kB\n",
            Ram(total_bytes=GIB, available_bytes=GIB // 2, swap_total_bytes=MIB, huge_pages_bytes=32 * MIB),
        ),
    ],
)
def test_absurd_lines_of_meminfo_are_unknown_and_nothing_else_is_lost(text: str, expected: Ram) -> None:
    assert parse_meminfo(text) == expected


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    ram, cpu = parse_meminfo(text), parse_cpuinfo(text)
    assert ram.available_bytes is None or ram.total_bytes is None or ram.available_bytes <= ram.total_bytes
    assert cpu.threads is None or cpu.threads > 0


def test_a_file_that_is_not_there_is_an_unknown_with_its_reason(capture: Loader) -> None:
    facts = read_ram(capture("docker-v1-hidden-parent"))
    assert facts.ram is None
    assert [(one.what, one.reason) for one in facts.unknown] == [("ram", "/proc/meminfo cannot be read")]


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpu_list("") == ()
    for garbage in ("0-x", "0-99999999999", "-3"):
        with pytest.raises(ValueError):
            parse_cpu_list(garbage)


def test_memory_without_processors_is_a_node_and_an_empty_node_is_none(capture: Loader) -> None:
    assert read_numa(capture("gb300")) == (
        NumaNode(index=0, total_bytes=516228096 * KIB, free_bytes=504000000 * KIB, cpus=72),
        NumaNode(index=1, total_bytes=262863872 * KIB, free_bytes=260000000 * KIB, cpus=0),
    )
    cpu = read_ram(capture("gb300")).cpu
    assert cpu is not None
    assert cpu.numa_nodes == 1


def test_kernel_switches_are_readable_although_they_refuse_large_reads() -> None:
    host = Host(environ={})
    if not host.exists("/proc/sys/kernel/osrelease"):
        pytest.skip("no /proc/sys here")
    assert host.text("/proc/sys/kernel/osrelease")


def test_the_governor_is_read_where_there_is_one_and_unknown_with_its_reason_elsewhere(capture: Loader) -> None:
    host = capture("vm-v1-no-limit")
    facts = read_cpu(host)
    assert facts.cpu is not None
    assert facts.cpu.governor is None
    assert "cpu.governor" in [one.what for one in facts.unknown]
    frequency = host.path("sys/devices/system/cpu/cpu0/cpufreq")
    frequency.mkdir(parents=True)
    (frequency / "scaling_governor").write_text("powersave\n")
    facts = read_cpu(host)
    assert facts.cpu is not None
    assert facts.cpu.governor == "powersave"
    assert "cpu.governor" not in [one.what for one in facts.unknown]
