import threading
import time
from concurrent.futures import Future

import pytest
from fakes.openai_endpoint import Say, serve

from kimigguf.events import Event, Step
from kimigguf.probe import pace as paces
from kimigguf.probe.pace import SILENCE_SECONDS, Pace, as_completed
from kimigguf.probe.session import Request, probe


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, Step)
        self.lines.append(event.text)


def test_every_tenth_call_and_the_last_are_told_with_the_time() -> None:
    told, now = Told(), [0.0]
    pace = Pace(25, told, clock=lambda: now[0])
    for _ in range(25):
        now[0] += 1
        pace.done()
    assert told.lines[0] == "2 of 25 calls, 2 s"
    assert told.lines[-1] == "25 of 25 calls, 25 s"
    assert len(told.lines) == 13


def test_a_long_silence_is_broken_though_nothing_has_come_in() -> None:
    told, now = Told(), [0.0]
    pace = Pace(96, told, clock=lambda: now[0])
    pace.look()
    assert told.lines == []
    now[0] = SILENCE_SECONDS
    pace.look()
    now[0] += 1
    pace.look()
    now[0] += SILENCE_SECONDS
    pace.done()
    assert told.lines == ["0 of 96 calls, 20 s", "1 of 96 calls, 41 s"]


def test_who_waits_for_others_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "SILENCE_SECONDS", 0.05)
    told, slow = Told(), Future[int]()
    threading.Timer(0.3, slow.set_result, (7,)).start()
    assert list(as_completed([slow], Pace(1, told, what="opinions"))) == [7]
    assert len(told.lines) > 2
    assert told.lines[0].startswith("0 of 1 opinions, ")
    assert told.lines[-1].startswith("1 of 1 opinions, ")


def test_a_run_whose_answers_take_long_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "SILENCE_SECONDS", 0.05)
    said: list[str] = []

    def slow(_body: dict[str, object], number: int) -> Say:
        time.sleep(0.4 if number == 0 else 0)
        return Say(content="4")

    with serve(slow) as endpoint:
        request = Request(candidate=endpoint.url, reference=endpoint.url, suite="quick")
        probe(request, {}, agree=lambda *_: False, listen=lambda event: said.append(getattr(event, "text", "")))
    whom = f"quick, 32 questions, to the candidate k3 at {endpoint.url}/v1 once and to the reference k3 at"
    assert any(line.startswith(whom) and line.endswith(" twice: 96 calls") for line in said)
    assert sum(line.startswith("0 of 96 calls, ") for line in said) >= 2
