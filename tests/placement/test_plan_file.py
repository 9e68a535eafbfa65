"""Plans as files: written whole, read with clear errors, and refused where the machine or the files have changed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimigguf.catalogue.profiles import find_quant, load_model
from kimigguf.errors import UsageError
from kimigguf.hardware.machines import load_machine
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.model import ModelSpec
from kimigguf.memory.settings import KvType, Settings
from kimigguf.placement.placed import device_need_bytes
from kimigguf.placement.plan import Plan, PlannedFile, PlannedModel, plan_for
from kimigguf.placement.plan_file import changes, load_plan, plan_record, remake_commands, write_plan
from kimigguf.units import GIB

MACHINE = load_machine("epyc-768g-rtx-pro-6000", {})
FILES = tuple(PlannedFile(name=f"K3-{n:05}-of-00003.gguf", size_bytes=n * 100, sha256=f"{n:064x}") for n in (1, 2, 3))


def make(machine: Machine = MACHINE, settings: Settings | None = None) -> Plan:
    profile = load_model()
    model = PlannedModel(
        architecture="kimi-k3", quant="UD-IQ1_M", repository="r/r", commit="0" * 40, folder="/models/k3", files=FILES
    )
    spec = ModelSpec.from_profile(profile, find_quant(profile, "UD-IQ1_M"))
    plan = plan_for(spec, machine, settings or Settings(), model=model)
    assert isinstance(plan, Plan)
    return plan


PLAN = make()


def test_a_plan_survives_its_file_exactly(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "no half-written file is left"
    assert (tmp_path / "plan.json").stat().st_mode & 0o077 == 0


def test_what_plan_prints_as_json_is_a_plan_file(tmp_path: Path) -> None:
    record = plan_record(PLAN) | {"command": {"argv": ["llama-server"]}, "warnings": ["a later version's key"]}
    assert record["schema"] == "kimigguf.plan/1"
    (tmp_path / "plan.json").write_text(json.dumps(record))
    assert load_plan(tmp_path / "plan.json") == PLAN


def broken(change: dict[str, Any], *path: str) -> str:
    record: Any = json.loads(json.dumps(plan_record(PLAN)))
    target = record
    for key in path:
        target = target[key]
    target.update(change)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("[]", "file"),
        ("{}", "model"),
        (broken({"schema": "kimigguf.plan/2"}), "schema"),
        (broken({"context_tokens": "many"}, "settings"), "settings.context_tokens"),
        (broken({"context_tokens": 0}, "settings"), "settings"),
        (broken({"kv_type": "f17"}, "settings"), "settings.kv_type"),
        (broken({"head": 7}, "layout"), "layout"),
        (broken({"files": [{"name": "../../etc/passwd", "size_bytes": 1}]}, "model"), "model.files"),
        (broken({"files": [{"name": "a\nb.gguf", "size_bytes": 1}]}, "model"), "model.files"),
    ],
)
def test_a_bad_plan_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_plan(path)
    assert caught.value.code == "bad-plan"
    assert named in str(caught.value.cause)
    assert "kimigguf plan" in str(caught.value.hint)


def test_an_answer_that_says_no_is_told_as_that_and_not_as_a_broken_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": "kimigguf.shortfall/1", "quant": "UD-Q4_K_XL", "reason": "900 GiB missing"}))
    with pytest.raises(UsageError, match="says that UD-Q4_K_XL does not fit") as caught:
        load_plan(path)
    assert caught.value.code == "plan-says-no"
    assert caught.value.cause == "900 GiB missing"


def test_a_plan_made_again_keeps_its_settings_and_fetches_files_that_are_not_here() -> None:
    options = "--context 4096 --slots 2 --kv-type q8_0 --ubatch 128 --json > plan.json"
    plan = replace(PLAN, settings=Settings(context_tokens=4096, slots=2, kv_type=KvType.Q8_0, ubatch_tokens=128))
    assert remake_commands(plan) == f"kimigguf plan /models/k3 {options}"
    away = replace(plan, model=replace(plan.model, folder=None))
    assert remake_commands(away) == f"kimigguf download UD-IQ1_M && kimigguf plan UD-IQ1_M {options}"


def test_a_plan_that_is_not_there_or_is_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="plan"):
            load_plan(path)


def test_nothing_has_changed_on_the_same_machine_with_the_same_files() -> None:
    assert changes(PLAN, MACHINE, files=FILES) == ()


def with_gpu(**values: Any) -> Machine:
    gpus = MACHINE.accelerators or ()
    return replace(MACHINE, accelerators=(replace(gpus[0], **values), *gpus[1:]))


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (replace(MACHINE, accelerators=()), "accelerators: 0 now, 1 in the plan"),
        (replace(MACHINE, ram=replace(MACHINE.ram, total_bytes=512 * GIB)), "RAM: 512.0 GiB installed, 768.0 GiB"),
        (with_gpu(name="RTX 3090"), "gpu0: RTX 3090"),
        (with_gpu(total_bytes=24 * GIB), "gpu0: "),
        (with_gpu(free_bytes=50 * GIB), "gpu0: the plan needs"),
        (replace(MACHINE, ram=replace(MACHINE.ram, available_bytes=300 * GIB)), "RAM: the plan needs"),
    ],
)
def test_a_replay_names_what_has_changed_on_the_machine(machine: Machine, named: str) -> None:
    found = changes(PLAN, machine, files=FILES)
    assert len(found) == 1
    assert named in found[0]


def test_memory_that_a_device_shares_with_the_host_is_asked_for_once_by_both() -> None:
    mac = load_machine("mac-studio-512g", {})
    assert mac.is_unified
    profile = load_model()
    spec = ModelSpec.from_profile(profile, find_quant(profile, "UD-IQ1_M"))
    wanted = Settings(context_tokens=8192, prompt_cache_bytes=0, checkpoints=0)
    roomy = replace(mac, ram=replace(mac.ram, total_bytes=2048 * GIB))
    plan = plan_for(spec, roomy, wanted, model=PLAN.model)
    assert isinstance(plan, Plan)
    device, host = device_need_bytes(plan.ledger, 0), plan.ledger.total_bytes(None)
    assert min(device, host) > GIB
    enough = replace(roomy, ram=replace(roomy.ram, available_bytes=device + host))
    assert changes(plan, enough) == ()
    # Each of the two has room alone; together they have not.
    scarce = replace(roomy, ram=replace(roomy.ram, available_bytes=max(device, host) + GIB // 2))
    (found,) = changes(plan, scarce)
    assert found.startswith("RAM: the plan needs")


def test_a_firmware_update_that_moves_the_ram_by_a_little_is_no_change() -> None:
    total = MACHINE.ram.total_bytes or 0
    assert changes(PLAN, replace(MACHINE, ram=replace(MACHINE.ram, total_bytes=total - GIB)), files=FILES) == ()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (FILES[:2], "K3-00003-of-00003.gguf: missing"),
        ((*FILES, PlannedFile(name="K3-00004-of-00003.gguf", size_bytes=1)), "00004-of-00003.gguf: not in the plan"),
        ((*FILES[:2], replace(FILES[2], size_bytes=301)), "K3-00003-of-00003.gguf: 301 bytes now, 300 in the plan"),
        ((*FILES[:2], replace(FILES[2], sha256="f" * 64)), "K3-00003-of-00003.gguf: SHA-256"),
    ],
)
def test_a_replay_names_the_file_that_has_changed(files: tuple[PlannedFile, ...], named: str) -> None:
    found = changes(PLAN, MACHINE, files=files)
    assert len(found) == 1
    assert named in found[0]


def test_files_of_unknown_hash_are_compared_by_size() -> None:
    assert changes(PLAN, MACHINE, files=tuple(replace(file, sha256=None) for file in FILES)) == ()


def test_a_context_above_the_models_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        make(settings=Settings(context_tokens=1_048_577))
    assert caught.value.code == "context-too-large"
