"""The same plan in the words of xllamacpp and of llama-cpp-python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.plans import make_layout, make_plan

from kimigguf.engines.embedded import apply, attributes
from kimigguf.engines.llama_cpp_python import model_settings
from kimigguf.engines.serving import load_serving
from kimigguf.errors import MachineError
from kimigguf.memory.settings import KvType, Settings
from kimigguf.placement.plan_file import write_plan
from kimigguf.units import MIB

PROFILE = load_serving("kimi-k3")
SETTINGS = Settings(
    context_tokens=8192, slots=2, ubatch_tokens=256, kv_type=KvType.Q8_0, checkpoints=3, prompt_cache_bytes=512 * MIB
)


@pytest.mark.engine
def test_xllamacpp_takes_every_attribute_of_the_plan() -> None:
    """One that this version does not know would be lost in silence, or stop the start."""
    import xllamacpp

    found = attributes(make_plan(settings=SETTINGS), PROFILE, (), agent=False, effort="high")
    params = xllamacpp.CommonParams()
    apply(params, xllamacpp, found)
    assert params.n_ctx == 8192
    assert params.n_parallel == 2
    assert params.n_ubatch == 256
    assert params.cache_type_k == params.cache_type_v == xllamacpp.ggml_type.GGML_TYPE_Q8_0
    assert params.flash_attn_type == xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    assert (params.n_ctx_checkpoints, params.cache_ram_mib, params.n_cache_reuse) == (3, 512, 0)
    assert params.fit_params is False
    assert params.no_extra_bufts is True
    assert params.n_gpu_layers == 0
    assert params.default_template_kwargs == {"reasoning_effort": '"high"', "thinking_effort": '"high"'}
    assert (params.sampling.temp, params.sampling.top_k, params.sampling.min_p) == (1.0, 0, 0.0)
    assert params.sampling.user_sampling_config == 64 | 2 | 4 | 8  # not to be replaced by the model's metadata
    assert params.cors_origins == "localhost"


@pytest.mark.engine
def test_expert_rules_reach_xllamacpp_as_the_engine_reads_them() -> None:
    import xllamacpp

    layout = make_layout([None, 0, 1, 1], experts=[None, None, None, 1], head=1, devices=2)
    found = attributes(make_plan(layout=layout), PROFILE, ("CUDA0", "CUDA1"), agent=False, effort=None)
    assert found["n_gpu_layers"] == 4
    assert found["tensor_split"] == [1.0, 3.0]
    params = xllamacpp.CommonParams()
    apply(params, xllamacpp, found)
    assert params.tensor_buft_overrides == r"^blk\.(1|2)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    assert list(params.tensor_split[:3]) == [1.0, 3.0, 0.0]


@pytest.mark.engine
def test_a_file_that_is_no_model_ends_the_embedded_engine_with_a_reason(tmp_path: Path) -> None:
    plan = make_plan(folder=tmp_path)
    (tmp_path / plan.model.files[0].name).write_bytes(b"GGUF" + bytes(100))
    write_plan(plan, tmp_path / "plan.json")
    argv = [sys.executable, "-m", "kimigguf.engines.embedded", "--plan", str(tmp_path / "plan.json"), "--port", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == 1
    assert "the embedded engine did not start" in done.stderr


def test_a_plan_that_does_not_read_ends_the_embedded_engine_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "kimigguf.plan/1"}))
    argv = [sys.executable, "-m", "kimigguf.engines.embedded", "--plan", str(tmp_path / "plan.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == 1
    assert "no valid plan" in done.stderr


def test_llama_cpp_python_is_kept_from_its_costly_defaults() -> None:
    settings = Settings(context_tokens=8192, ubatch_tokens=256, kv_type=KvType.Q8_0)
    layout = make_layout([None, 0, 1], head=1, devices=2)
    fields = model_settings(make_plan(settings=settings, layout=layout), PROFILE, alias="kimi-k3", effort="low")
    assert fields["logits_all"] is False
    assert fields["use_mlock"] is False
    assert fields["type_k"] == fields["type_v"] == 8
    assert (fields["n_ctx"], fields["n_ubatch"], fields["n_gpu_layers"]) == (8192, 256, 3)
    assert fields["tensor_split"] == [1.0, 2.0]
    assert fields["chat_template_kwargs"] == {"reasoning_effort": "low", "thinking_effort": "low"}


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (make_plan(layout=make_layout([0], experts=[None], head=0, devices=1)), "engine-lacks-offload"),
        (make_plan(settings=Settings(slots=2)), "engine-lacks-slots"),
    ],
)
def test_llama_cpp_python_refuses_what_it_cannot_do(plan: object, code: str) -> None:
    with pytest.raises(MachineError) as caught:
        model_settings(plan, PROFILE, alias="x")  # type: ignore[arg-type]  # parametrized
    assert caught.value.code == code
    assert "--engine" in (caught.value.hint or "")
