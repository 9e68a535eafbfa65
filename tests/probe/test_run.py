import itertools
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fakes.openai_endpoint import Endpoint, Refuse, Say, serve

from kimigguf.catalogue.profiles import load_model
from kimigguf.errors import MachineError, NetworkError, UsageError
from kimigguf.events import Event, Notice, Step, ignore
from kimigguf.probe import sandbox
from kimigguf.probe.calls import Arm, Fault, FaultKind, Reply, Trial
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.compare import compare
from kimigguf.probe.one_at_a_time import OneAtATime
from kimigguf.probe.run import Side, Store, jobs, kept_calls, open_store, run
from kimigguf.probe.sandbox import closed
from kimigguf.probe.score import score
from kimigguf.probe.session import Request, probe, served
from kimigguf.probe.suites import Item, Number, PythonTest, Suite, load_suite

SUITE = Suite(
    name="sums",
    items=tuple(Item(id=f"i{n}", prompt=f"{n}+{n}?", check=Number(value=2 * n)) for n in range(6)),
    max_tokens=64,
)
SETTINGS = {"suite_sha256": "0" * 64, "candidate": ["http://c/v1", "k3"]}


def sums(body: dict[str, object], _number: int) -> Say:
    question = str(body["messages"][0]["content"])  # type: ignore[index]  # the body is JSON
    return Say(content=str(2 * int(question.split("+", maxsplit=1)[0])))


@contextmanager
def sides(candidate: Endpoint, reference: Endpoint, tries: int = 1) -> Iterator[tuple[Side, Side]]:
    settings = Settings(timeout_seconds=5, tries=tries)
    with (
        closing(Asker("candidate", candidate.url, {}, settings, sleep=lambda _s: None)) as left,
        closing(Asker("reference", reference.url, {}, settings, sleep=lambda _s: None)) as right,
    ):
        yield Side(asker=left, endpoint=left.endpoint(None)), Side(asker=right, endpoint=right.endpoint(None))


def test_every_arm_is_asked_every_question_as_often_as_wanted() -> None:
    with serve(sums) as candidate, serve(sums) as reference, sides(candidate, reference) as (left, right):
        calls = run(SUITE, left, right, repeats=2, parallel=2, max_tokens=None, store=Store(), listen=ignore)
    assert [(call.arm, call.item, call.repeat) for call in calls] == [job.key for job in jobs(SUITE, 2)]
    assert (len(candidate.bodies), len(reference.bodies)) == (12, 24)
    assert {body["max_tokens"] for body in candidate.bodies} == {64}


def test_arms_on_this_machine_are_not_asked_at_the_same_time() -> None:
    asked: list[set[str]] = []
    now: list[str] = []

    def answer(name: str) -> Callable[[dict[str, object], int], Say]:
        def say(body: dict[str, object], number: int) -> Say:
            now.append(name)
            time.sleep(0.05)
            asked.append(set(now))
            now.remove(name)
            return sums(body, number)

        return say

    with (
        serve(answer("candidate")) as candidate,
        serve(answer("reference")) as reference,
        sides(candidate, reference) as (left, right),
    ):
        run(SUITE, left, right, repeats=1, parallel=3, max_tokens=None, store=Store(), listen=ignore)
    assert {frozenset(names) for names in asked} == {frozenset({"candidate"}), frozenset({"reference"})}


def test_who_still_waits_for_a_turn_when_the_run_ends_asks_nothing_more() -> None:
    with serve(sums) as candidate, serve(sums) as reference, sides(candidate, reference) as (left, right):
        order = itertools.count()

        class Broken(Asker):
            def __init__(self) -> None:
                pass

            def ask(self, *_args: object) -> Fault:
                time.sleep(0.2 * next(order))
                raise ZeroDivisionError

        broken = Side(asker=Broken(), endpoint=left.endpoint)
        with pytest.raises(ZeroDivisionError):
            run(SUITE, broken, right, repeats=1, parallel=3, max_tokens=None, store=Store(), listen=ignore)
        time.sleep(0.6)  # the candidate's other questions have ended, and the turn passes on
        assert reference.bodies == []


def test_threads_of_one_party_work_side_by_side_until_another_has_asked() -> None:
    rota, entered, leave = OneAtATime(), queue.SimpleQueue[str](), {name: threading.Event() for name in "ab"}

    def work(party: str) -> None:
        with rota.turn(party):
            entered.put(party)
            leave[party].wait(5)

    def start(party: str) -> threading.Thread:
        thread = threading.Thread(target=work, args=(party,))
        thread.start()
        return thread

    threads = [start("a"), start("a")]
    assert [entered.get(timeout=5), entered.get(timeout=5)] == ["a", "a"]
    for number, party in enumerate("ba", 1):
        threads.append(start(party))
        while rota.waiting < number:
            time.sleep(0.001)
    assert entered.empty()  # b's turn has not come, and a third a may not push in before it
    leave["a"].set()
    assert entered.get(timeout=5) == "b"
    assert entered.empty()
    leave["b"].set()
    for thread in threads:
        thread.join(5)
    assert entered.get(timeout=5) == "a"


def test_a_run_that_was_stopped_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    with serve(sums) as candidate, serve(sums) as reference, sides(candidate, reference) as (left, right):
        with open_store(tmp_path / "out", SETTINGS) as store:
            first = run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=ignore)
        record = tmp_path / "out" / "calls.jsonl"
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(lines[:7]) + lines[7][:40])  # killed while the eighth was written
        asked = len(candidate.bodies) + len(reference.bodies)
        with open_store(tmp_path / "out", SETTINGS) as store:
            assert len(store.calls) == 7
            again = run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=ignore)
        assert len(candidate.bodies) + len(reference.bodies) - asked == 18 - 7
    assert [(call.arm, call.item) for call in again] == [(call.arm, call.item) for call in first]
    assert len(record.read_text().splitlines()) == 18
    assert all(json.loads(line) for line in record.read_text().splitlines())


def test_what_was_answered_is_written_down_however_the_run_ends(tmp_path: Path) -> None:
    """Each worker writes its own calls: what is paid for does not wait for the main thread, which may be gone."""
    record = tmp_path / "out" / "calls.jsonl"

    def interrupted(_event: Event) -> None:
        until = time.monotonic() + 10
        while time.monotonic() < until and len(record.read_text().splitlines()) < 10:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with (
        serve(sums) as candidate,
        serve(sums) as reference,
        sides(candidate, reference) as (left, right),
        pytest.raises(KeyboardInterrupt),
        open_store(tmp_path / "out", SETTINGS) as store,
    ):
        run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=interrupted)
    assert len(record.read_text().splitlines()) >= 10


def test_a_fault_is_not_kept_so_that_the_next_run_asks_again(tmp_path: Path) -> None:
    said: list[Event] = []
    with (
        serve(lambda body, n: Refuse(status=500) if n == 0 else sums(body, n)) as candidate,
        serve(sums) as reference,
        sides(candidate, reference) as (left, right),
    ):
        with open_store(tmp_path / "out", SETTINGS) as store:
            calls = run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=said.append)
        faults = [call for call in calls if isinstance(call.outcome, Fault)]
        assert [(call.arm, call.item) for call in faults] == [(Arm.CANDIDATE, "i0")]
        assert any("server-error" in str(event) for event in said)
        with open_store(tmp_path / "out", SETTINGS) as store:
            calls = run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=ignore)
        assert not any(isinstance(call.outcome, Fault) for call in calls)


def test_a_refused_key_stops_everything_and_names_its_variable() -> None:
    with (
        serve(sums) as candidate,
        serve(lambda _body, _n: Refuse(status=401)) as reference,
        sides(candidate, reference) as (left, right),
        pytest.raises(NetworkError) as error,
    ):
        run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=Store(), listen=ignore)
    assert error.value.code == "key-refused"
    assert "KIMIGGUF_REFERENCE_API_KEY" in (error.value.hint or "")
    assert len(reference.bodies) < 12


def test_a_folder_with_another_run_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    with open_store(tmp_path / "out", SETTINGS):
        pass
    with (
        pytest.raises(UsageError, match="another candidate"),
        open_store(tmp_path / "out", {**SETTINGS, "candidate": []}),
    ):
        pass


@pytest.mark.parametrize("name", ["run.json", "calls.jsonl"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not ours\n")
    with pytest.raises(UsageError) as error, open_store(tmp_path, SETTINGS):
        pass
    assert error.value.code == "bad-run"
    assert (tmp_path / name).read_text() == "not ours\n"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError) as error, open_store(tmp_path / "file" / "out", SETTINGS):
        pass
    assert error.value.code == "cannot-write"


def test_a_bug_in_a_thread_shows_and_hangs_nothing() -> None:
    with serve(sums) as candidate, serve(sums) as reference, sides(candidate, reference) as (left, right):

        class Broken(Asker):
            def __init__(self) -> None:
                pass

            def ask(self, *_args: object) -> Fault:
                raise ZeroDivisionError

        broken = Side(asker=Broken(), endpoint=left.endpoint)
        with pytest.raises(ZeroDivisionError):
            run(SUITE, broken, right, repeats=1, parallel=1, max_tokens=None, store=Store(), listen=ignore)


def test_a_fault_is_still_a_call_in_the_report() -> None:
    with (
        serve(lambda body, n: Refuse(status=429) if n % 2 else sums(body, n)) as candidate,
        serve(sums) as reference,
        sides(candidate, reference) as (left, right),
    ):
        calls = run(SUITE, left, right, repeats=1, parallel=1, max_tokens=None, store=Store(), listen=ignore)
    kinds = [call.outcome.kind for call in calls if isinstance(call.outcome, Fault)]
    assert (len(calls), kinds) == (18, [FaultKind.RATE_LIMIT] * 3)


def test_an_arm_that_only_fails_ends_the_run_before_the_others_have_worked_for_nothing() -> None:
    with (
        serve(sums) as candidate,
        serve(lambda _body, _n: Refuse(status=400, message="temperature is pinned")) as reference,
        sides(candidate, reference) as (left, right),
        pytest.raises(NetworkError, match="gave no reply") as error,
    ):
        run(SUITE, left, right, repeats=20, parallel=1, max_tokens=None, store=Store(), listen=ignore)
    assert "temperature is pinned" in (error.value.cause or "")
    assert len(reference.bodies) < 20


@pytest.mark.skipif(closed() is not None, reason=str(closed()))
def test_code_is_run_once_and_what_came_of_it_is_written_down(tmp_path: Path) -> None:
    test = PythonTest(code="assert double(4) == 8")
    suite = Suite(name="code", items=(Item(id="double", prompt="Write double(n).", check=test),))
    good, bad = "```python\ndef double(n):\n    return 2 * n\n```", "```python\ndef double(n):\n    return n\n```"
    with (
        serve(lambda _body, _n: Say(content=bad)) as candidate,
        serve(lambda _body, _n: Say(content=good)) as reference,
        sides(candidate, reference) as (left, right),
        open_store(tmp_path / "out", SETTINGS) as store,
    ):
        run(suite, left, right, repeats=1, parallel=1, max_tokens=None, store=store, listen=ignore)
    with open_store(tmp_path / "out", SETTINGS) as store:
        kept = {call.arm: call.outcome for call in store.calls}
    outcome = kept[Arm.CANDIDATE]
    assert isinstance(outcome, Reply)
    assert outcome.tested == Trial(passed=False, why="AssertionError")
    summary = {arm.arm: (arm.right, arm.checked) for arm in score(suite, store.calls, tolerance=0.05).arms}
    assert summary == {Arm.CANDIDATE: (0, 1), Arm.REFERENCE: (1, 1), Arm.REFERENCE_AGAIN: (1, 1)}


def test_a_paid_reply_is_kept_before_its_program_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite(name="code", items=(Item(id="p", prompt="?", check=PythonTest(code="assert one() == 1")),))
    record, kept_before = tmp_path / "calls.jsonl", list[int]()

    def trial(*_: object) -> Trial:
        kept_before.append(len(record.read_text().splitlines()))
        return Trial(passed=True)

    def program(_body: dict[str, object], _number: int) -> Say:
        return Say(content="```python\ndef one():\n    return 1\n```")

    monkeypatch.setattr("kimigguf.probe.run.run_test", trial)
    with serve(program) as candidate, serve(program) as reference, sides(candidate, reference) as (left, right):
        with open_store(tmp_path, SETTINGS) as store:
            run(suite, left, right, repeats=1, parallel=1, max_tokens=64, store=store, listen=ignore)
        assert min(kept_before) >= 1
        untested = [line for line in record.read_text().splitlines(keepends=True) if '"tested": null' in line]
        record.write_text("".join(untested))  # killed while the programs of all three ran
        for total in (6, 6):  # run once more, and never again
            with open_store(tmp_path, SETTINGS) as store:
                calls = run(suite, left, right, repeats=1, parallel=1, max_tokens=64, store=store, listen=ignore)
            assert len(kept_before) == total
            assert [call.outcome.tested for call in calls if isinstance(call.outcome, Reply)] == [
                Trial(passed=True)
            ] * 3
    assert len(candidate.bodies) + len(reference.bodies) == 3


def test_code_that_cannot_be_run_here_is_neither_right_nor_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "closed", lambda: "there is no way here to cut a process off from the network")
    suite = Suite(name="code", items=(Item(id="a", prompt="?", check=PythonTest(code="assert True")),))
    with (
        serve(lambda _body, _n: Say(content="x = 1")) as candidate,
        serve(lambda _body, _n: Say(content="x = 1")) as reference,
        sides(candidate, reference) as (left, right),
    ):
        calls = run(suite, left, right, repeats=1, parallel=1, max_tokens=None, store=Store(), listen=ignore)
    assert [(arm.right, arm.checked) for arm in score(suite, calls, tolerance=0.05).arms] == [(0, 0)] * 3


def test_long_questions_are_asked_as_far_as_the_served_context_goes(tmp_path: Path) -> None:
    suite = tmp_path / "long.toml"
    suite.write_text('name = "long"\nmax_tokens = 64\n[generate]\nneedle-1k = 2\nneedle-8k = 2\nproduct = 2\n')
    said: list[str] = []
    with serve(lambda _b, _n: Say(content="4")) as candidate:  # it tells a context of 4,096 tokens
        request = Request(candidate=candidate.url, reference=candidate.url, suite=str(suite))
        found = probe(request, {}, agree=lambda *_: False, listen=lambda event: said.append(str(event)))
    assert (len(candidate.bodies), found.answer["left_out"], found.answer["suite"]["items"]) == (12, 2, 4)
    assert any("2 questions are left out" in text for text in said)
    whole = load_suite(str(suite), {})
    assert found.answer["suite"]["sha256"] == whole.sha256
    with pytest.raises(UsageError) as error:
        served(Suite(name="x", items=whole.items[2:4]), 4096)
    assert error.value.code == "context-too-small"
    assert served(whole, None) == (whole, 0)


def test_a_run_says_what_it_takes_to_make_it_again_and_another_quant_does_not_go_on_with_it(tmp_path: Path) -> None:
    suite = tmp_path / "sums.toml"
    suite.write_text('name = "sums"\nmax_tokens = 64\nseed = 5\n[generate]\nproduct = 2\n')
    out = tmp_path / "probe"
    with serve(lambda _b, _n: Say(content="4")) as candidate:
        candidate.file = "/models/k3/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf"
        request = Request(candidate=candidate.url, reference=candidate.url, suite=str(suite), seed=7, out=out)
        made = probe(request, {}, agree=lambda *_: False, listen=ignore).answer["made_by"]
        candidate.file = "/models/k3/Kimi-K3-UD-IQ1_S-00001-of-00014.gguf"
        with pytest.raises(UsageError, match="another candidate_file") as error:
            probe(request, {}, agree=lambda *_: False, listen=ignore)
    assert error.value.code == "other-run"
    assert (made["candidate_file"], made["candidate_build"]) == ("Kimi-K3-UD-IQ1_M-00001-of-00015.gguf", "b7-abc")
    assert (made["suite"], made["seed"], made["candidate_context_tokens"]) == (str(suite), 7, 4096)
    assert made["suite_sha256"] == load_suite(str(suite), {}, seed=7).sha256
    size = compare([out], load_model(environ={})).runs[0].size_bytes
    assert size is not None
    assert "b7-abc" in (out / "report.html").read_text()
    assert load_suite(str(out / "questions.jsonl"), {}).sha256 == made["suite_sha256"]


@pytest.mark.parametrize("kept", [True, False])
def test_who_stops_a_run_is_told_what_is_kept_and_how_it_goes_on(tmp_path: Path, *, kept: bool) -> None:
    out, said = tmp_path / "probe", list[str]()

    def stop_at_the_first_tenth(event: Event) -> None:
        said.append(event.text if isinstance(event, Step | Notice) else "")
        if " of 96 calls, " in said[-1]:
            raise KeyboardInterrupt

    with serve(lambda _b, _n: Say(content="4")) as candidate:
        request = Request(candidate=candidate.url, reference=candidate.url, out=out if kept else None)
        with pytest.raises(KeyboardInterrupt):
            probe(request, {}, agree=lambda *_: False, listen=stop_at_the_first_tenth)
        if not kept:
            assert said[-1] == "nothing is kept: give --out DIR, and a run that was stopped goes on"
            return
        form = rf"(\d+) of 96 calls are kept in {re.escape(str(out))}; the same command goes on"
        found = re.fullmatch(form, said[-1])
        assert found
        assert 9 <= int(found[1]) < 96
        before = len(candidate.bodies)
        probe(request, {}, agree=lambda *_: False, listen=ignore)
        assert before < len(candidate.bodies) <= 96 + 1  # one may have been under way


def test_counting_what_is_kept_leaves_a_line_alone_that_is_just_being_written(tmp_path: Path) -> None:
    one = json.dumps({"arm": "candidate", "item": "i1", "repeat": 0})
    text = f"{one}\n{one}\nno call\n[]\n" + '{"arm": "refer'
    (tmp_path / "calls.jsonl").write_text(text)
    assert (kept_calls(tmp_path), kept_calls(tmp_path / "nowhere")) == (1, 0)
    assert (tmp_path / "calls.jsonl").read_text() == text
