"""AMD's library as a second source: what it adds, and that its absence and its noise cost nothing."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hardware.captures import Loader

from kimigguf.hardware.amd import read_amd
from kimigguf.hardware.amd_smi import parse_reply
from kimigguf.hardware.host import CommandError

# provenance: constructed, from the AMD SMI Python reference: an MI300X
SAID = {
    "0000:05:00.0": {
        "asic_info": {"market_name": "AMD Instinct MI300X OAM"},
        "vram_info": {"vram_size": 196592, "vram_max_bandwidth": 5300},
        "ecc_enabled": 4095,
        "power": {"power_cap": 750000000},
    }
}


def test_amdsmi_adds_what_sys_does_not_tell_to_the_card_at_that_address(
    capture: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimigguf.hardware.amd_smi.find_spec", lambda _name: object())
    host = capture("amd-dgpus")
    plain = read_amd(host).accelerators or ()
    cards = read_amd(replace(host, run=lambda _argv: "noise\n" + json.dumps(SAID) + "\n")).accelerators or ()
    assert plain[0].power_limit_watts is None
    assert (cards[0].power_limit_watts, cards[0].ecc) == (750.0, True)
    assert cards[0].bandwidth_bytes_per_second == 5_300_000_000_000
    assert (cards[0].name, cards[0].total_bytes) == (plain[0].name, plain[0].total_bytes)
    assert cards[1:] == plain[1:]


def test_an_amdsmi_that_fails_or_is_not_installed_changes_nothing(
    capture: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = capture("amd-dgpus")

    def fail(_argv: Sequence[str]) -> str:
        raise CommandError("exit code 1")

    monkeypatch.setattr("kimigguf.hardware.amd_smi.find_spec", lambda _name: object())
    failed = read_amd(replace(host, run=fail))
    monkeypatch.setattr("kimigguf.hardware.amd_smi.find_spec", lambda _name: None)
    assert read_amd(replace(host, run=fail)) == failed
    assert failed.unknown == read_amd(host).unknown


@pytest.mark.parametrize("output", ["", "KeyError: 'ROCM_PATH'", "[]", "{", '{"a": 1}'])
def test_garbage_is_no_reply(output: str) -> None:
    assert parse_reply(output) == {}
