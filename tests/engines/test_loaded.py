"""What the engine says it took: log lines of llama.cpp build 11434 (the RPC ones from two loopback workers)."""

import pytest
from fakes.plans import make_layout, make_plan

from kimigguf.engines.loaded import compare_loaded, devices_in, parse_log
from kimigguf.units import MIB

HOST_ONLY = """
0.00.007.640 I load_tensors:   CPU_Mapped model buffer size =     1.20 MiB
0.00.007.641 I load_tensors:   CPU_Mapped model buffer size =     2.59 MiB
0.00.007.925 I llama_context:        CPU  output buffer size =     0.50 MiB
0.00.008.187 I llama_kv_cache:        CPU KV buffer size =     1.25 MiB
0.00.009.152 I llama_memory_recurrent:        CPU RS buffer size =     0.25 MiB
0.00.020.000 I sched_reserve:        CPU compute buffer size =    20.00 MiB
0.00.024.501 I sched_reserve:        CPU compute buffer size =    10.50 MiB
"""
TWO_DEVICES = """
0.1 I load_tensors:   CPU_Mapped model buffer size =   100.00 MiB
0.1 I load_tensors:        CUDA0 model buffer size =   400.00 MiB
0.1 I load_tensors:        CUDA1 model buffer size =   200.00 MiB
0.1 I llama_kv_cache:      CUDA0 KV buffer size =    10.00 MiB
0.1 I llama_memory_recurrent:      CUDA1 RS buffer size =    20.00 MiB
0.1 I llama_context:  CUDA_Host  output buffer size =     0.62 MiB
0.1 I sched_reserve:      CUDA0 compute buffer size =    30.00 MiB
0.1 I sched_reserve:      CUDA1 compute buffer size =    40.00 MiB
0.1 I sched_reserve:  CUDA_Host compute buffer size =     5.00 MiB
"""


def test_the_files_of_a_mapped_model_add_up_and_the_last_reservation_counts() -> None:
    report = parse_log(HOST_ONLY, ())
    assert report is not None
    host = report["Host"]
    assert host.model_bytes == round(3.79 * MIB)
    assert host.context_bytes == round(1.5 * MIB)
    assert host.compute_bytes == 11 * MIB


def test_pinned_host_memory_is_not_counted_on_the_device() -> None:
    report = parse_log(TWO_DEVICES, ("CUDA0", "CUDA1"))
    assert report is not None
    assert report["CUDA0"].total_bytes == 440 * MIB
    assert report["CUDA1"].total_bytes == 260 * MIB
    assert report["Host"].compute_bytes == round(5.62 * MIB)


def test_a_remote_device_is_found_by_the_name_before_its_address() -> None:
    log = "I load_tensors: RPC0[127.0.0.1:50961] model buffer size =     4.18 MiB\n"
    report = parse_log(log, ("RPC0",))
    assert report is not None
    assert report["RPC0"].model_bytes == round(4.18 * MIB)


def test_a_device_that_took_more_than_planned_is_named_with_both_numbers() -> None:
    plan = make_plan(layout=make_layout([0, 1], head=1, devices=2))
    compared = compare_loaded(plan, TWO_DEVICES, ("CUDA0", "CUDA1"))
    assert compared.agrees is False  # this plan's ledger is empty
    assert [device.name for device in compared.devices] == ["gpu0", "gpu1", "host"]
    assert compared.devices[0].difference_bytes == -440 * MIB


def test_a_log_without_buffers_is_unknown_and_not_agreement() -> None:
    compared = compare_loaded(make_plan(), "0.1 I loading\n", ())
    assert compared.agrees is None
    assert compared.reason is not None


@pytest.mark.parametrize(
    ("buffers", "devices"),
    [
        (
            ("CUDA0 model", "CPU_Mapped model", "CPU_REPACK model", "RPC0[127.0.0.1:50052] model", "CUDA_Host compute"),
            ("CUDA0", "RPC0"),
        ),
        (("CPU model",), ()),
        ((), ()),
    ],
)
def test_devices_are_named_by_the_log_alone_where_no_plan_says_them(
    buffers: tuple[str, ...], devices: tuple[str, ...]
) -> None:
    assert devices_in("".join(f"load_tensors:  {buffer} buffer size = 5.00 MiB\n" for buffer in buffers)) == devices
