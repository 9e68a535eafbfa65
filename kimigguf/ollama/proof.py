"""Proves that a registered model answers: what Ollama says of it, a load, and two turns with the thinking sent back."""

import time
from dataclasses import dataclass
from typing import Any, Final

from ollama import ChatResponse, ShowResponse

from kimigguf.errors import KimiggufError, ServerError
from kimigguf.events import Listener, Step
from kimigguf.ollama.evidence import Check, State, passed, unknown
from kimigguf.ollama.listing import full_name
from kimigguf.ollama.session import Session, mapped
from kimigguf.units import duration

_TURN_TOKENS: Final = 512
"""Enough for a short thought and a word; a thinking model that is cut off here has still shown that it runs."""
_FIRST: Final = "Reply with one word: ready"
_SECOND: Final = "Reply with the same word again."
_NANOSECONDS: Final = 1e9
_BARE: Final = "{{ .Prompt }}"
"""The template of a model that Ollama has found none for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer. ``tokens_per_second`` is Ollama's own count over its own time, None where it gives none."""

    thinking: str
    content: str
    done_reason: str | None
    tokens: int | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """``gpu_share`` is how much of what is loaded lies on a GPU, 0 to 1; None where Ollama does not say."""

    name: str
    checks: tuple[Check, ...]
    turns: tuple[Turn, ...]
    load_seconds: float | None
    gpu_share: float | None

    @property
    def holds(self) -> bool:
        return not any(check.state is State.FAILED for check in self.checks)


def prove(session: Session, name: str, listen: Listener) -> Proof:
    """Ask the model two short questions.

    Raises:
        ServerError: It does not load, or Ollama refuses; a failure to answer well is a FAILED check instead.
        NetworkError: The connection was lost.
    """
    with mapped(session.server):
        shown = session.client.show(name)
    checks = _shown(shown)
    thinks = "thinking" in (shown.capabilities or ())
    listen(Step(text=f"loading {name} (this reads the whole model)"))
    started = time.monotonic()
    messages: list[dict[str, Any]] = [{"role": "user", "content": _FIRST}]
    first, reply = _turn(session, name, messages, thinks=thinks)
    took = time.monotonic() - started
    load = None if reply.load_duration is None else reply.load_duration / _NANOSECONDS
    told = "" if load is None else f", of which {duration(load)} to load, as Ollama says"
    checks.append(passed("load", f"answered after {duration(took)}{told}"))
    checks.append(_judged("first turn", first))
    messages.append(_sent_back(first))
    messages.append({"role": "user", "content": _SECOND})
    listen(Step(text="second turn, with the first answer and its thinking sent back"))
    second, _ = _turn(session, name, messages, thinks=thinks)
    checks.append(_judged("second turn", second))
    share = _gpu_share(session, name)
    checks.append(unknown("GPU", "Ollama does not say what lies there") if share is None else _placed(share))
    return Proof(
        name=name,
        checks=tuple(checks),
        turns=(first, second),
        load_seconds=load,
        gpu_share=share,
    )


def _shown(shown: ShowResponse) -> list[Check]:
    capabilities = shown.capabilities or ()
    wanted = {"thinking": "answers would come without their thinking", "tools": "tool calls would stay plain text"}
    checks = [passed("parameters", ", ".join(" ".join(line.split()) for line in (shown.parameters or "").splitlines()))]
    template = (shown.template or "").strip()
    if template in {"", _BARE}:
        checks.append(unknown("template", "Ollama shows none of its own: the one in the GGUF decides"))
    else:
        checks.append(passed("template", f"{len(template):,} characters, from {' '.join(template.split())[:40]!r} on"))
    for name, without in wanted.items():
        if name in capabilities:
            checks.append(passed(name, "Ollama sees it in the model's template"))
        else:
            checks.append(unknown(name, f"Ollama does not see it in the model's template: {without}"))
    return checks


def _turn(session: Session, name: str, messages: list[dict[str, Any]], *, thinks: bool) -> tuple[Turn, ChatResponse]:
    last: ChatResponse | None = None
    thinking, content = [], []
    with mapped(session.server):
        options = {"num_predict": _TURN_TOKENS}
        for part in session.client.chat(name, messages, stream=True, think=thinks or None, options=options):
            thinking.append(part.message.thinking or "")
            content.append(part.message.content or "")
            last = part
    if last is None or not last.done:
        raise ServerError(
            "Ollama ended its answer before it was done",
            code="ollama-cut-off",
            hint="its log says more: journalctl -u ollama -n 100, or ~/.ollama/logs/server.log",
        )
    rate = None
    if last.eval_count and last.eval_duration:
        rate = last.eval_count / last.eval_duration * _NANOSECONDS
    turn = Turn(
        thinking="".join(thinking),
        content="".join(content),
        done_reason=last.done_reason,
        tokens=last.eval_count,
        tokens_per_second=rate,
    )
    return turn, last


def _sent_back(turn: Turn) -> dict[str, Any]:
    """The assistant's message as the next turn must carry it: K3 wants its own thinking back."""
    message = {"role": "assistant", "content": turn.content}
    return message | ({"thinking": turn.thinking} if turn.thinking else {})


def _judged(what: str, turn: Turn) -> Check:
    speed = "" if turn.tokens_per_second is None else f", {turn.tokens_per_second:.1f} tokens/s"
    if turn.content.strip():
        return passed(what, f"answered {turn.content.strip()[:60]!r}{speed}")
    if turn.thinking.strip():
        return unknown(what, f"was still thinking after {_TURN_TOKENS} tokens: it runs, but gave no answer yet{speed}")
    return Check(what=what, state=State.FAILED, evidence=f"answered nothing (done_reason {turn.done_reason}){speed}")


def _gpu_share(session: Session, name: str) -> float | None:
    try:
        with mapped(session.server):
            running = session.client.ps().models
    except KimiggufError:
        return None
    for model in running:
        if model.model == full_name(name) and model.size and model.size_vram is not None:
            return model.size_vram / model.size
    return None


def _placed(share: float) -> Check:
    return passed("GPU", f"{share:.0%} of what Ollama loaded lies on a GPU")
