import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_k3
from fakes.ollama_store import Ollama
from fakes.served import plan_for, served

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode, ServerError
from kimigguf.events import Event, Step, ignore
from kimigguf.ollama.evidence import State
from kimigguf.ollama.find import find_source
from kimigguf.ollama.proof import Proof, prove
from kimigguf.ollama.registration import plan, register
from kimigguf.ollama.server import PATIENT_SECONDS, look
from kimigguf.ollama.session import open_session
from kimigguf.ollama.source import Source

NAME = "kimi-k3:ud-iq1_s"


@pytest.fixture
def registered(stand_in: Ollama, source: Source) -> Ollama:
    environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
    register(plan(source, environ), ignore)
    return stand_in


def proved(stand_in: Ollama, said: list[Event] | None = None, *, name: str = NAME) -> Proof:
    with open_session(look({"OLLAMA_HOST": stand_in.url}, deadline_seconds=PATIENT_SECONDS)) as session:
        return prove(session, name, ignore if said is None else said.append)


def states(proof: Proof) -> dict[str, State]:
    return {check.what: check.state for check in proof.checks}


def test_two_turns_prove_that_it_answers_and_the_thinking_goes_back(registered: Ollama) -> None:
    said: list[Event] = []
    proof = proved(registered, said)
    assert proof.holds
    assert {what for what, state in states(proof).items() if state is not State.PASSED} == {"template"}
    assert proof.turns[0].content == "Hello."
    assert proof.turns[0].tokens_per_second == pytest.approx(40.0)
    assert (proof.load_seconds, proof.gpu_share) == (0.5, 0.0)
    assert any(isinstance(event, Step) and "loading" in event.text for event in said)
    second = registered.chats[1]["messages"]
    assert second[1] == {"role": "assistant", "content": "Hello.", "thinking": "The user greets me."}
    assert registered.chats[0]["think"] is True


def test_what_ollama_shows_as_template_and_how_long_the_load_took_are_told(registered: Ollama) -> None:
    registered.load_seconds = 0.3
    found = {check.what: check.evidence for check in proved(registered).checks}
    assert "the one in the GGUF decides" in found["template"]
    assert "of which 0.5 s to load" in found["load"]
    assert "temperature 1.0" in found["parameters"]
    registered.template = "{{- range .Messages }}<|open|>message role"
    found = {check.what: check.evidence for check in proved(registered).checks}
    assert found["template"] == "42 characters, from '{{- range .Messages }}<|open|>message ro' on"


def test_a_model_whose_template_shows_no_thinking_is_not_asked_to_think(registered: Ollama) -> None:
    registered.capabilities = ("completion",)
    registered.thinking = ""
    proof = proved(registered)
    assert proof.holds
    assert states(proof)["thinking"] is State.UNKNOWN
    assert "think" not in registered.chats[0]
    assert "thinking" not in registered.chats[1]["messages"][1]


def test_what_lies_on_the_gpu_is_known_of_a_name_without_its_tag_too(stand_in: Ollama, source: Source) -> None:
    environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
    register(plan(source, environ, name="mine"), ignore)
    assert proved(stand_in, name="mine").gpu_share == 0.0


def test_an_answer_cut_off_while_thinking_is_no_failure(registered: Ollama) -> None:
    registered.content, registered.done_reason = "", "length"
    proof = proved(registered)
    assert proof.holds
    assert states(proof)["first turn"] is State.UNKNOWN


def test_a_model_that_says_nothing_at_all_fails(registered: Ollama) -> None:
    registered.content = registered.thinking = ""
    proof = proved(registered)
    assert not proof.holds
    assert states(proof)["first turn"] is State.FAILED


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ("timed out waiting for llama runner to start - progress 0.41", "ollama-load-timeout"),
        (
            "llama runner process has terminated: error loading model: unknown model architecture: 'kimi-k3'",
            "ollama-load-failed",
        ),
        ("model requires more system memory (650.1 GiB) than is available (251.2 GiB)", "ollama-load-failed"),
    ],
)
def test_a_load_that_fails_is_told_in_ollamas_words(registered: Ollama, told: str, code: str) -> None:
    registered.load_error = told
    with pytest.raises(ServerError) as error:
        proved(registered)
    assert (error.value.code, error.value.cause) == (code, told)


@pytest.mark.engine
def test_a_real_engine_answers_from_the_file_that_was_merged_for_an_old_ollama(
    tiny: Callable[[str], Path], tmp_path: Path, stand_in: Ollama, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in hands its chats to the embedded engine, which has loaded the blob that Ollama was given."""
    shards = shutil.copytree(tiny("UD-IQ1_M"), tmp_path / "UD-IQ1_M")
    stand_in.version = "0.34.0"
    environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
    register(plan(find_source(str(shards), environ), environ), ignore, environ={})
    (layer,) = [one for one in stand_in.models()["kimi-k3:ud-iq1_m"]["layers"] if one["mediaType"].endswith(".model")]
    whole = tmp_path / "merged" / "blob.gguf"
    whole.parent.mkdir()
    whole.hardlink_to(stand_in.blob(layer["digest"]))
    with served(plan_for([whole], "kimi-k3", tiny_k3.LAYERS), tmp_path / "engine") as url:
        stand_in.engine_url = url
        app = App(show=Show(), environ=environ)
        assert run(["ollama-register", "--check", "kimi-k3:ud-iq1_m", "--json"], app) == ExitCode.DONE
    proof = json.loads(capsys.readouterr().out)["proof"]
    assert all(turn["thinking"] for turn in proof["turns"])
    assert all(turn["tokens_per_second"] > 1 for turn in proof["turns"])
    assert stand_in.chats[1]["messages"][1]["thinking"] == proof["turns"][0]["thinking"]
