import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.gguf_set import write_set
from fakes.sources import source_of

from kimigguf.ollama.checks import Facts, judge
from kimigguf.ollama.disk import need_merged
from kimigguf.ollama.evidence import Check, State
from kimigguf.ollama.server import OllamaServer
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder, ServerEnvironment
from kimigguf.ollama.ways import merged_way


def facts(source: Source, *, settings: dict[str, str] | None = None, hindrance: str | None = None) -> Facts:
    need = need_merged(100, begun_bytes=0, present=False, linked=hindrance is None, apart=False)
    return Facts(
        name="kimi-k3:mine",
        force=False,
        source=source,
        server=OllamaServer(
            url="http://127.0.0.1:11434",
            reachable=True,
            version="0.34.0",
            supports_k3=True,
            local=True,
            reason="0.34.0",
        ),
        installed=True,
        settings=ServerEnvironment(values=settings or {}, source="the systemd unit ollama"),
        folder=ModelsFolder(
            path=Path("/models"), source="", confirmed=True, free_bytes=1 << 40, device=1, writable=True, owner=0
        ),
        taken=frozenset(),
        already=False,
        chosen=merged_way(need, hindrance=hindrance, tool="tool", free_bytes=1 << 40, work_free_bytes=0),
        hindrance=hindrance,
        work=None,
        context_tokens=8192,
    )


def found(facts: Facts) -> dict[str, Check]:
    return {check.what: check for check in judge(facts)}


@pytest.mark.parametrize(
    ("template", "state", "told"),
    [
        ("<|open|>message<|sep|> <|close|> <|end_of_msg|>", State.PASSED, "carries its own (47 characters)"),
        ("{% for message in messages %}<|im_start|>", State.UNKNOWN, "not K3's format"),
        (None, State.UNKNOWN, "no chat template"),
    ],
)
def test_a_template_that_is_missing_or_not_k3s_is_told_before_the_copy(
    source: Source, template: str | None, state: State, told: str
) -> None:
    check = found(facts(replace(source, template=template)))["template"]
    assert (check.state, told in check.evidence, check.blocks) == (state, True, False)


def test_whether_files_can_be_linked_is_told_with_the_reason(source: Source) -> None:
    assert found(facts(source))["link"].state is State.PASSED
    check = found(facts(source, hindrance="/models is on another file system than x"))["link"]
    assert (check.state, "another file system" in check.evidence) == (State.UNKNOWN, True)


def test_settings_that_change_what_is_planned_are_told(source: Source) -> None:
    settings = {
        "OLLAMA_NUM_PARALLEL": "4",
        "OLLAMA_CONTEXT_LENGTH": "4096",
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "OLLAMA_NOPRUNE": "1",
    }
    checks = found(facts(source, settings=settings))
    assert "OLLAMA_NUM_PARALLEL=4" in checks["parallel"].evidence
    assert "8,192 tokens go before OLLAMA_CONTEXT_LENGTH=4096" in checks["context"].evidence
    assert "q8_0" in checks["KV cache"].evidence
    assert "removes no blob" in checks["pruning"].evidence
    quiet = found(facts(source, settings={"OLLAMA_NUM_PARALLEL": "1", "OLLAMA_KV_CACHE_TYPE": "f16"}))
    assert not {"parallel", "context", "KV cache", "pruning"} & set(quiet)


def test_a_long_load_beside_the_default_time_out_is_no_pass() -> None:
    source = replace(source_of((Path(__file__),)), size_bytes=594_040_923_616)
    check = found(facts(source))["load time-out"]
    assert (check.state, "so 5 min" in check.evidence) == (State.UNKNOWN, True)
    assert found(facts(source, settings={"OLLAMA_LOAD_TIMEOUT": "2h"}))["load time-out"].state is State.PASSED


def test_the_folder_in_a_hint_can_be_pasted_whatever_it_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "it's K3"
    source = source_of(write_set(folder))
    check = found(facts(replace(source, projectors=("mmproj.gguf",))))["files"]
    assert check.hint is not None
    assert shlex.split(check.hint.replace("*", ""))[1:] == [f"{folder}/mmproj.gguf", f"{folder}/.."]
