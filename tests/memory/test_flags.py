"""llama-server's flags, read as llama-server reads them."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.errors import UsageError
from kimigguf.memory import server_flags
from kimigguf.memory.flags import Parsed, parse
from kimigguf.memory.layout import HOST
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import KvType, Settings
from kimigguf.units import GIB, MIB

PROFILE = load_model(environ={})
SPEC = ModelSpec.from_profile(PROFILE, find_quant(PROFILE, "UD-IQ1_S"))


def read(line: str, devices: int = 2) -> Parsed:
    return parse(line.split(), SPEC, devices=devices)


def test_no_flags_mean_what_they_mean_to_llama_server() -> None:
    parsed = read("", devices=0)
    assert parsed.settings == Settings(
        context_tokens=1_048_576, slots=4, batch_tokens=2048, ubatch_tokens=512, checkpoints=32,
        prompt_cache_bytes=8 * GIB, repack=True, unified_cache=True,
    )  # fmt: skip
    assert any("-np" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("-c 4096", {"context_tokens": 4096}),
        ("--ctx-size=4096", {"context_tokens": 4096}),
        ("-c 0", {}),
        ("--kv-unified-per-slot 5000 -np 2", {"context_tokens": 10_000, "slots": 2}),
        ("-np 2 -kvu", {"slots": 2, "unified_cache": True}),
        ("-np -1", {"slots": 4, "unified_cache": True}),
        ("-ub 128 -b 256", {"ubatch_tokens": 128, "batch_tokens": 256}),
        ("-ub 0", {"ubatch_tokens": 2048}),
        ("-ctk q8_0 -ctv q8_0", {"kv_type": KvType.Q8_0}),
        ("-fa off", {"flash_attention": False}),
        ("-fa 0", {"flash_attention": False}),
        ("-nkvo", {"kv_offload": False}),
        ("-nkvo -kvo", {}),
        ("--no-repack", {"repack": False}),
        ("-nr --repack", {}),
        ("--ctx-checkpoints 3", {"checkpoints": 3}),
        ("--cache-ram 512", {"prompt_cache_bytes": 512 * MIB}),
        ("-cram -1", {"prompt_cache_bytes": 0, "prompt_cache_is_capped": False}),
        ("--temp -1 -c 512", {"context_tokens": 512}),
    ],
)
def test_each_flag_changes_its_setting_and_nothing_else(line: str, changed: dict[str, object]) -> None:
    plain = read("-np 1").settings
    assert read(f"-np 1 {line}").settings == replace(plain, **changed)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("-c many", "bad-flag"),
        ("-c -5", "bad-flag"),
        ("-c", "bad-flag"),
        ("--host", "bad-flag"),
        ("--control-vector-layer-range 1", "bad-flag"),
        ("-np 0", "bad-flag"),
        ("-np 257", "bad-flag"),
        ("-fa maybe", "bad-flag"),
        ("-ctk q3 -ctv q3", "bad-flag"),
        ("-ctk q8_0", "mixed-cache-types"),
        ("-fa off -ctk q8_0 -ctv q8_0", "needs-flash-attention"),
        ("-ts 1,x", "bad-flag"),
        ("-ts 1,1e50", "bad-flag"),
        ("-ts nan,1", "bad-flag"),
        ("-ot exps", "bad-flag"),
        ("-ot (=CPU", "bad-flag"),
        ("-ot exps=CUDA2", "bad-flag"),
        ("-ncmoe -1", "bad-flag"),
        ("-sm row", "unsupported-flag"),
        ("-sm none -mg 2", "bad-flag"),
        ("-dev CUDA7", "bad-flag"),
    ],
)
def test_what_llama_server_would_refuse_is_refused_with_its_name(line: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert caught.value.code == code


def counts(parsed: Parsed) -> tuple[list[int], list[int]]:
    """Layers and layers' experts on each device and, last, on the host."""
    places = [*range(len(parsed.layout.devices)), HOST]
    return (
        [sum(layer.trunk == place for layer in parsed.layout.layers) for place in places],
        [sum(layer.experts == place for layer in parsed.layout.layers) for place in places],
    )


@pytest.mark.parametrize(
    ("line", "trunk", "experts", "head"),
    [
        ("-ngl 99", [47, 46, 0], [47, 46, 0], 1),
        ("-ngl 94", [47, 46, 0], [47, 46, 0], 1),
        ("-ngl 93", [47, 45, 1], [47, 45, 1], 1),
        ("-ngl 1", [0, 0, 93], [0, 0, 93], 0),
        ("-ngl 0", [0, 0, 93], [0, 0, 93], HOST),
        ("-ngl all -ts 1,0", [93, 0, 0], [93, 0, 0], 0),
        ("-ngl auto -ts 3/1", [71, 22, 0], [71, 22, 0], 1),
        ("-cmoe", [47, 46, 0], [1, 0, 92], 1),
        ("-ncmoe 50", [47, 46, 0], [1, 43, 49], 1),
        ("-ot exps=CUDA1", [47, 46, 0], [1, 92, 0], 1),
    ],
)
def test_layers_and_experts_are_dealt_as_llama_cpp_deals_them(
    line: str, trunk: list[int], experts: list[int], head: int | None
) -> None:
    parsed = read(line)
    # Layer 0 is dense: it has no experts, and their place is its own.
    assert counts(parsed) == (trunk, experts)
    assert parsed.layout.head == head


def test_the_first_pattern_that_matches_decides_and_single_tensors_may_go_their_own_way() -> None:
    parsed = read(r"-ot blk\.5\.ffn_up_exps=CUDA1,blk\.5\.ffn=CPU -ot output\.weight=CPU -cmoe")
    moved = dict(parsed.layout.moved)
    assert moved["blk.5.ffn_up_exps.weight"] == 1
    assert moved["blk.5.ffn_gate_exps.weight"] is HOST
    assert moved["blk.5.ffn_gate_inp.weight"] is HOST
    assert moved["output.weight"] is HOST
    assert "blk.5.attn_q.weight" not in moved
    assert parsed.layout.layers[6].experts is HOST
    assert parsed.layout.is_overridden


def test_rpc_servers_are_told_apart_by_their_address() -> None:
    parsed = read("--rpc 127.0.0.1:50052,127.0.0.1:50053 -ot exps=RPC0[127.0.0.1:50053]")
    assert counts(parsed)[1] == [1, 92, 0]
    assert not parsed.ignored


def test_an_override_that_matches_nothing_still_stops_pipelining() -> None:
    assert read("-ot nothing=CPU").layout.is_overridden
    assert not read("-ngl 99").layout.is_overridden


def test_devices_that_are_not_used_are_not_there() -> None:
    assert read("-dev CUDA1").layout.devices == ("gpu1",)
    assert read("-dev none").layout.devices == ()
    assert read("-sm none -mg 1").layout.devices == ("gpu1",)


def test_layers_follow_free_memory_where_the_line_does_not_say() -> None:
    parsed = parse(["-ngl", "99"], SPEC, devices=2, weights=(3 * GIB, GIB))
    assert counts(parsed)[0] == [71, 22, 0]


def test_attention_that_would_leave_its_layer_turns_automatic_flash_attention_off() -> None:
    assert read("-fa auto -nkvo").settings.flash_attention
    assert not read("-fa auto -nkvo -ot attn_v_b=CPU").settings.flash_attention
    with pytest.raises(UsageError):
        read("-nkvo -ot attn_v_b=CPU -ctk q8_0 -ctv q8_0")


def test_a_real_gpu_takes_over_large_batches_unless_told_not_to() -> None:
    def taken(line: str, *, devices: int = 1) -> bool:
        return parse(line.split(), SPEC, devices=devices, takes_over=True).settings.offload_operations

    assert taken("-cmoe")
    assert not taken("-cmoe --no-op-offload")
    assert not taken("-cmoe", devices=0)
    assert not read("-cmoe").settings.offload_operations


def test_flags_without_a_say_in_memory_are_listed_with_their_values() -> None:
    parsed = read("--host 0.0.0.0 --jinja --temp=-0.5 -m x.gguf --metrics -v --control-vector-layer-range 1 2 -c 512")
    assert parsed.ignored == (
        "--host 0.0.0.0", "--jinja", "--temp -0.5", "-m x.gguf", "--metrics", "-v", "--control-vector-layer-range 1 2",
    )  # fmt: skip
    assert parsed.settings.context_tokens == 512


@pytest.mark.parametrize(
    ("line", "named", "meant"),
    [
        ("--n-cpu-mo 80", "--n-cpu-mo", "--n-cpu-moe"),
        ("--bogus-flag 3", "--bogus-flag", "llama-server --help"),
        ("--ctx_sise 512", "--ctx-sise", "--ctx-size"),
        ("-c 512 hello", "hello", "llama-server --help"),
    ],
)
def test_a_flag_that_llama_server_does_not_have_is_no_flag_without_a_say_in_memory(
    line: str, named: str, meant: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert caught.value.code == "unknown-flag"
    assert named in caught.value.message
    assert meant in str(caught.value.hint)
    assert str(server_flags.BUILD) in str(caught.value.cause)


def test_flags_that_earlier_builds_had_are_taken_and_told() -> None:
    parsed = read("--no-mmap -c 512 -np 1 -fit off")
    assert parsed.ignored == ("--no-mmap",)
    assert parsed.settings.context_tokens == 512
    assert ["--load-mode" in note for note in parsed.notes] == [True]


def test_a_context_above_what_the_model_was_trained_for_is_told() -> None:
    def told(line: str) -> list[str]:
        return [note for note in read(line).notes if "trained for" in note]

    assert "2,097,152" in told("-c 2097152 -np 1")[0]
    assert not told("-c 2097152 -np 2")
    assert told("-c 2097152 -np 2 -kvu")


@pytest.mark.native
def test_the_flags_are_those_of_the_build_they_are_said_to_be_of(native_bin: Path) -> None:
    def said(argument: str) -> str:
        argv = [str(native_bin / "llama-server"), argument]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout + done.stderr

    assert str(server_flags.BUILD) in said("--version")
    listed: dict[str, int] = {}
    for line in said("--help").splitlines():
        if not line.startswith("-") or line.startswith("-----"):
            continue
        # The words of a flag end where its description starts, unless they are too long for that.
        head = line[:40] if line[39:40] == " " else line
        flags = re.findall(r"(?:^|, *)(--?[A-Za-z][\w.-]*)", head)
        rest = re.sub(r"(?:^|, *)--?[A-Za-z][\w.-]*", "", head).strip(" ,")
        listed |= dict.fromkeys(flags, 2 if rest == "START END" else 1 if rest else 0)
    ours = (server_flags.BARE, server_flags.WITH_VALUE, server_flags.WITH_TWO_VALUES)
    assert listed == {flag: count for count, flags in enumerate(ours) for flag in flags}


def test_weights_that_are_not_counted_are_named() -> None:
    parsed = read("-np 1 -fit off -md draft.gguf --lora a.gguf --lora b.gguf")
    assert [note.partition(" ")[0] for note in parsed.notes] == ["-md", "--lora"]


def test_a_projector_is_handed_on_unless_it_is_taken_back() -> None:
    assert read("--mmproj p.gguf").projector == "p.gguf"
    assert read("--mmproj p.gguf --no-mmproj").projector is None


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_words_give_an_answer_or_a_named_refusal(words: list[str]) -> None:
    try:
        parsed = parse(words, SPEC, devices=1)
    except UsageError as error:
        assert error.code  # noqa: PT017 -- either outcome is right; what may not happen is another exception
    else:
        assert len(parsed.layout.layers) == 93
