"""The final argv: what the field's accidents were made of."""

import json
import sys

import pytest
from fakes.plans import make_layout, make_plan

from kimigguf.engines.command import Command, command, is_loopback
from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine
from kimigguf.engines.serving import load_serving
from kimigguf.errors import MachineError, UsageError
from kimigguf.memory.layout import Layout
from kimigguf.memory.settings import KvType, Settings
from kimigguf.placement.plan import Plan
from kimigguf.units import GIB

PROFILE = load_serving("kimi-k3")


def engine(kind: EngineKind = EngineKind.LLAMA_SERVER, devices: tuple[str, ...] | None = ()) -> FoundEngine:
    return FoundEngine(
        kind=kind,
        path="/opt/llama.cpp/llama-server",
        version="v",
        build=11434,
        supports_k3=True,
        backends=None if devices is None else ("cpu",),
        devices=None if devices is None else tuple(EngineDevice(name=name) for name in devices),
    )


def spoken(plan: Plan, found: FoundEngine | None = None, **choices: object) -> Command:
    return command(plan, found or engine(), profile=PROFILE, **choices)  # type: ignore[arg-type]  # forwarded as given


def value(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} stands {argv.count(flag)} times"
    return argv[argv.index(flag) + 1]


SPLIT = make_layout([None, 0, 0, 1], experts=[None, None, 0, None], head=1, devices=2)


@pytest.mark.parametrize("layout", [make_layout([None] * 4), SPLIT])
def test_fit_and_a_placement_are_never_mixed(layout: object) -> None:
    argv = spoken(make_plan(layout=layout), engine(devices=("CUDA0", "CUDA1"))).argv  # type: ignore[arg-type]  # parametrized
    assert value(argv, "--fit") == "off"
    assert value(argv, "--n-gpu-layers") in {"0", "4"}
    assert not {"--cpu-moe", "--n-cpu-moe", "-cmoe", "-ncmoe", "--fit-target", "--fit-ctx"} & set(argv)


def test_a_split_plan_names_the_engines_own_devices() -> None:
    argv = spoken(make_plan(layout=SPLIT), engine(devices=("Vulkan0", "Vulkan1", "Vulkan2"))).argv
    assert value(argv, "--device") == "Vulkan0,Vulkan1"
    assert value(argv, "--tensor-split") == "2,2"
    rules = value(argv, "--override-tensor")
    assert rules == r"^blk\.(1|3)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


def test_a_plan_that_skips_an_accelerator_names_the_right_one() -> None:
    layout = Layout(devices=("gpu1",), layers=make_layout([0, 0]).layers, head=0)
    argv = spoken(make_plan(layout=layout), engine(devices=("CUDA0", "CUDA1"))).argv
    assert value(argv, "--device") == "CUDA1"


def test_a_plan_without_devices_keeps_the_engine_off_them() -> None:
    argv = spoken(make_plan(), engine(devices=("CUDA0",))).argv
    assert value(argv, "--device") == "none"
    assert value(argv, "--n-gpu-layers") == "0"


def test_a_plan_for_more_devices_than_the_engine_sees_is_refused() -> None:
    for found in (engine(devices=("CUDA0",)), engine(EngineKind.EMBEDDED, devices=())):
        with pytest.raises(MachineError) as caught:
            spoken(make_plan(layout=SPLIT), found, plan_file="p.json")
        assert caught.value.code == "engine-lacks-devices"


def test_every_k3_setting_is_said_because_the_defaults_are_wrong_for_it() -> None:
    settings = Settings(context_tokens=16384, slots=2, ubatch_tokens=1024, checkpoints=3, prompt_cache_bytes=2 * GIB)
    argv = spoken(make_plan(settings=settings)).argv
    expected = {
        "--ctx-size": "16384", "--parallel": "2", "--ubatch-size": "1024", "--batch-size": "2048",
        "--ctx-checkpoints": "3", "--cache-ram": "2048", "--cache-reuse": "0", "--flash-attn": "on",
        "--temp": "1.0", "--top-p": "0.95", "--top-k": "0", "--min-p": "0.0", "--alias": "kimi-k3",
        "--cors-origins": "localhost", "--host": "127.0.0.1",
    }  # fmt: skip
    assert {flag: value(argv, flag) for flag in expected} == expected
    assert {"--no-repack", "--jinja", "--metrics", "--offline"} <= set(argv)
    assert value(argv, "--model") == "/models/k3/Kimi-K3-UD-IQ1_M-00001-of-00003.gguf"


@pytest.mark.parametrize("kv_type", list(KvType))
def test_both_cache_types_are_always_equal(kv_type: KvType) -> None:
    argv = spoken(make_plan(settings=Settings(kv_type=kv_type))).argv
    assert value(argv, "--cache-type-k") == value(argv, "--cache-type-v") == kv_type.value


def test_a_plan_that_repacks_or_keeps_the_cache_on_the_host_says_so() -> None:
    argv = spoken(make_plan(settings=Settings(repack=True, kv_offload=False))).argv
    assert "--no-repack" not in argv
    assert "--no-kv-offload" in argv


def test_the_effort_is_given_in_both_spellings() -> None:
    arguments = json.loads(value(spoken(make_plan(), effort="low").argv, "--chat-template-kwargs"))
    assert arguments == {"reasoning_effort": "low", "thinking_effort": "low"}
    with pytest.raises(UsageError, match="medium"):
        spoken(make_plan(), effort="medium")


def test_agents_get_their_own_top_p() -> None:
    assert value(spoken(make_plan(), agent=True).argv, "--top-p") == "1.0"


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.4", False), ("127.evil.example", False), ("myhost", False)],
)  # fmt: skip
def test_only_loopback_may_go_without_a_key(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
    if inside:
        assert value(spoken(make_plan(), host=host).argv, "--host") == host
    else:
        with pytest.raises(UsageError) as caught:
            spoken(make_plan(), host=host)
        assert caught.value.code == "key-needed"
        argv = spoken(make_plan(), host=host, api_key_file="/run/keys").argv
        assert value(argv, "--api-key-file") == "/run/keys"
        assert "--api-key" not in argv


def test_variables_that_would_undo_the_plan_and_secrets_do_not_reach_the_engine() -> None:
    environ = {
        "PATH": "/bin",
        "LLAMA_ARG_CPU_MOE": "1",
        "LLAMA_API_KEY": "k",
        "HF_TOKEN": "t",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    made = spoken(make_plan(), environ=environ)
    assert dict(made.environ) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    assert made.dropped == ("HF_TOKEN", "LLAMA_API_KEY", "LLAMA_ARG_CPU_MOE")


def test_an_optional_flag_that_the_engine_lacks_is_left_out_and_said() -> None:
    made = spoken(make_plan(), known_flags={"--model", "--offline"})
    assert "--cors-origins" not in made.argv
    assert "--offline" in made.argv
    assert "browser origins (--cors-origins)" in made.left_out
    assert value(made.argv, "--cache-reuse") == "0"  # not optional: without it answers go wrong


def test_a_command_with_an_option_that_its_engine_lacks_is_not_made() -> None:
    with pytest.raises(UsageError, match="no option --bogus"):
        spoken(make_plan(), known_flags={"--model", "--offline"}, extra=("--bogus",))


def test_the_engines_tools_are_never_switched_on() -> None:
    argv = spoken(make_plan(), agent=True).argv
    assert not {"--agent", "--tools", "--ui-mcp-proxy", "--mcp-servers-config", "--props"} & set(argv)


def test_the_unified_binary_serves_by_its_subcommand() -> None:
    assert spoken(make_plan(), engine(EngineKind.LLAMA)).argv[:3] == ("/opt/llama.cpp/llama-server", "serve", "--model")


def test_the_embedded_engine_takes_the_same_plan_as_a_file() -> None:
    argv = spoken(make_plan(), engine(EngineKind.EMBEDDED), plan_file="/run/plan.json", port=9000, effort="high").argv
    assert argv[:5] == (sys.executable, "-m", "kimigguf.engines.embedded", "--plan", "/run/plan.json")
    assert value(argv, "--port") == "9000"
    assert value(argv, "--effort") == "high"
    with pytest.raises(UsageError, match="file"):
        spoken(make_plan(), engine(EngineKind.EMBEDDED))


def test_another_architecture_keeps_the_engine_settings_and_none_of_k3s_sampling() -> None:
    plan = make_plan(architecture="llama")
    argv = command(plan, engine(), profile=load_serving("llama")).argv
    assert value(argv, "--cache-reuse") == "0"
    assert value(argv, "--alias") == "llama"
    assert not {"--temp", "--top-k", "--chat-template-kwargs"} & set(argv)


def test_every_setting_of_the_shipped_profile_has_a_reason_and_a_source() -> None:
    assert len(PROFILE.settings) > 15
    for setting in PROFILE.settings:
        assert len(setting.reason) > 20, setting.name
        assert setting.source, setting.name
