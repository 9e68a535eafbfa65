"""Eight clients stream for a minute: nobody's answer is lost or another's, and ``status`` counts what they counted.

What is proven, and how. Each chat request is bound by a grammar to a word that no other request has, so an answer that
went to the wrong client, or lost or gained a piece, is another word. The raw completions are greedy and compared with
what a lone client got for the same prompt, so a slot that computed with another's cache says something else; batches
of another make-up may round otherwise and tip a near tie of random weights, so one in ten may differ, but never into
another prompt's answer.
"""

import http.client
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.engines import BOTH
from fakes.place import Place
from fakes.processes import until

CLIENTS = 8
SECONDS = 60.0
_LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFG;:,.12345"


@dataclass(slots=True)
class Answer:
    """A streamed answer, put together again."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    def take(self, chunk: dict[str, Any]) -> None:
        self.ids.add(chunk["id"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            self.text += delta.get("reasoning_content") or ""
            self.text += delta.get("content") or delta.get("text") or ""
            self.finish = choice.get("finish_reason") or self.finish


def ask(port: int, path: str, body: dict[str, Any]) -> Answer:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "model": "kimi-k3"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    answer = Answer()
    try:
        connection.request("POST", path, json.dumps(options | body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for raw in response:
            line = raw.decode().strip()
            assert not answer.done or not line, "something came after the end"
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                answer.take(json.loads(line.removeprefix("data: ")))
            else:
                assert not line or line.startswith(":"), line
    finally:
        connection.close()
    return answer


@dataclass(slots=True)
class Client:
    """One client of the load. ``lone`` is what it was answered alone, by prompt."""

    number: int
    port: int
    lone: dict[str, str]
    answers: list[Answer] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    same: int = 0
    compared: int = 0

    def work(self, until_second: float, others: frozenset[str]) -> None:
        prompts = itertools.cycle(self.lone)
        for turn in itertools.count():
            if time.monotonic() > until_second:
                return
            try:
                self._chat(turn) if turn % 2 else self._complete(next(prompts), others)
            except Exception as error:  # noqa: BLE001 -- whatever it was, this answer is lost, and the test says so
                self.faults.append(f"client {self.number}, turn {turn}: {type(error).__name__}: {error}")

    def _chat(self, turn: int) -> None:
        word = f"c{self.number}t{turn}x{random.getrandbits(40):010x}"
        question = {"role": "user", "content": f"Client {self.number} asks for {word}."}
        grammar = f'root ::= "{word}"'
        answer = self._take(ask(self.port, "/v1/chat/completions", {"messages": [question], "grammar": grammar}))
        if answer.text != word:
            self.faults.append(f"client {self.number} was to hear {word} and heard {answer.text!r}")

    def _complete(self, prompt: str, others: frozenset[str]) -> None:
        answer = self._take(ask(self.port, "/v1/completions", {"prompt": prompt, "max_tokens": 12}))
        self.compared += 1
        self.same += answer.text == self.lone[prompt]
        if answer.text in others:
            self.faults.append(f"client {self.number} heard the answer to another's prompt: {answer.text!r}")

    def _take(self, answer: Answer) -> Answer:
        if not (answer.done and answer.finish and answer.usage) or len(answer.ids) != 1:
            self.faults.append(f"client {self.number}: cut short or mixed: {answer}")
        self.answers.append(answer)
        return answer


def ask_alone(port: int, *, each: int) -> tuple[list[dict[str, str]], list[Answer]]:
    """``each`` prompts per client with the answers that a lone one gets, no two alike; and all answers there were."""
    dice = random.Random(7)
    lone: dict[str, str] = {}
    answers = []
    while len(lone) < each * CLIENTS:
        prompt = "".join(dice.choices(_LETTERS, k=20))
        answers.append(ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": 12}))
        if answers[-1].text not in lone.values():
            lone[prompt] = answers[-1].text
        assert len(answers) < 20 * CLIENTS, "the model answers everything alike"
    pairs = list(lone.items())
    return [dict(pairs[number::CLIENTS]) for number in range(CLIENTS)], answers


@pytest.mark.parametrize("kind", BOTH)
def test_no_answer_is_lost_or_mixed_among_eight_clients_and_status_counts_as_they_do(kind: str, place: Place) -> None:
    native = kind != "embedded"  # the bar's minute is the native engine's; the embedded one is the same server inside
    extra = ("--", "--threads", "1", "--threads-batch", "1") if native else ()  # two spin for each other
    place.start(kind, "--slots", str(CLIENTS), "--context", "16384", *extra, selftest=True)
    before = place.status()
    assert (before["requests"], before["requests_finished"], before["generated_tokens"]) == (0, 0, 0)

    lone, answers = ask_alone(place.port, each=3 if native else 1)
    clients = [Client(number, place.port, own) for number, own in enumerate(lone)]
    end = time.monotonic() + (SECONDS if native else SECONDS / 6)
    everything = frozenset(text for own in lone for text in own.values())
    threads = [
        threading.Thread(target=client.work, args=(end, everything - frozenset(client.lone.values())))
        for client in clients
    ]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(place.status())
        time.sleep(2.0)
    for thread in threads:
        thread.join()

    assert [fault for client in clients for fault in client.faults] == []
    assert all(len(client.answers) >= 2 for client in clients)
    answers += [answer for client in clients for answer in client.answers]
    assert len({next(iter(answer.ids)) for answer in answers}) == len(answers)
    same, compared = sum(client.same for client in clients), sum(client.compared for client in clients)
    assert same >= 0.9 * compared, f"{same} of {compared} as a lone client is answered"

    assert until(lambda: place.status()["slots_busy"] == 0)
    after = place.status()
    assert after["state"] == "ready"
    assert (after["slots"], after["requests"], after["requests_finished"]) == (CLIENTS, len(answers), len(answers))
    assert after["generated_tokens"] == sum(answer.usage["completion_tokens"] for answer in answers)
    prompts = sum(answer.usage["prompt_tokens"] for answer in answers)
    assert after["prompt_tokens"] + after["prompt_tokens_cached"] == prompts
    rates = ("prompt_tokens_per_second", "generated_tokens_per_second")
    again = place.status()  # llama-server's own averages begin anew each time that they are read
    assert all(after[rate] and again[rate] == after[rate] for rate in rates)
    busiest = max(status["slots_busy"] for status in seen)
    assert busiest > 1, "the clients were served one after the other"
    counts = [status["requests"] for status in seen]
    assert counts == sorted(counts)
    assert max(status["requests"] - status["requests_finished"] for status in seen) <= CLIENTS
