import pytest
from fakes.ollama_store import Ollama

from kimigguf.errors import ServerError
from kimigguf.events import Event, Step, ignore
from kimigguf.ollama.evidence import State
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


def proved(stand_in: Ollama, said: list[Event] | None = None) -> Proof:
    with open_session(look({"OLLAMA_HOST": stand_in.url}, deadline_seconds=PATIENT_SECONDS)) as session:
        return prove(session, NAME, ignore if said is None else said.append)


def states(proof: Proof) -> dict[str, State]:
    return {check.what: check.state for check in proof.checks}


def test_two_turns_prove_that_it_answers_and_the_thinking_goes_back(registered: Ollama) -> None:
    said: list[Event] = []
    proof = proved(registered, said)
    assert proof.holds
    assert set(states(proof).values()) == {State.PASSED}
    assert proof.turns[0].content == "Hello."
    assert proof.turns[0].tokens_per_second == pytest.approx(40.0)
    assert (proof.load_seconds, proof.gpu_share) == (0.5, 0.0)
    assert any(isinstance(event, Step) and "loading" in event.text for event in said)
    second = registered.chats[1]["messages"]
    assert second[1] == {"role": "assistant", "content": "Hello.", "thinking": "The user greets me."}
    assert registered.chats[0]["think"] is True


def test_a_model_whose_template_shows_no_thinking_is_not_asked_to_think(registered: Ollama) -> None:
    registered.capabilities = ("completion",)
    registered.thinking = ""
    proof = proved(registered)
    assert proof.holds
    assert states(proof)["thinking"] is State.UNKNOWN
    assert "think" not in registered.chats[0]
    assert "thinking" not in registered.chats[1]["messages"][1]


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
