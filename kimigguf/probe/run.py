"""Asks all arms all questions, each call written down at once, so that an interrupted run goes on where it stopped."""

import json
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from kimigguf.engines.command import is_loopback
from kimigguf.errors import MachineError, NetworkError, UsageError
from kimigguf.events import Listener, Notice
from kimigguf.probe.calls import Arm, Call, Fault, FaultKind, Reply, Shape, Trial
from kimigguf.probe.checkers import code_in
from kimigguf.probe.client import Asker, Endpoint, stopped
from kimigguf.probe.one_at_a_time import OneAtATime
from kimigguf.probe.pace import Pace
from kimigguf.probe.sandbox import run_test
from kimigguf.probe.suites import Item, PythonTest, Suite, as_jsonl

_CALLS: Final = "calls.jsonl"
_RUN: Final = "run.json"
_QUESTIONS: Final = "questions.jsonl"
_FAILURES_AT_FIRST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison, ready to be asked."""

    endpoint: Endpoint
    asker: Asker

    @property
    def is_here(self) -> bool:
        """Whether it is this machine that answers, as far as an address can tell."""
        return is_loopback(urlsplit(self.endpoint.url).hostname or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One question for one arm."""

    arm: Arm
    item: Item
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.item.id, self.repeat


def jobs(suite: Suite, repeats: int) -> tuple[Job, ...]:
    """All questions, the arms side by side, so that a run that stops early has asked all of them the same."""
    return tuple(
        Job(arm=arm, item=item, repeat=repeat) for repeat in range(repeats) for item in suite.items for arm in Arm
    )


def run(
    suite: Suite,
    candidate: Side,
    reference: Side,
    *,
    repeats: int,
    parallel: int,
    max_tokens: int | None,
    store: "Store",
    listen: Listener,
) -> tuple[Call, ...]:
    """Ask everything that is not in ``store`` yet; ``parallel`` questions at once for each arm.

    Arms that this machine answers take turns: at once, they would slow each other down and spoil the times.

    Raises:
        NetworkError: ``key-refused`` or ``no-replies``: asking on would be pointless.
        MachineError: The folder of the run cannot be written.
    """
    items = {item.id: item for item in suite.items}
    done = {
        (call.arm, call.item, call.repeat): tested(items[call.item], call, store.add) if call.item in items else call
        for call in store.calls
    }
    left = [job for job in jobs(suite, repeats) if job.key not in done]
    if done:
        listen(Notice(text=f"{len(done)} calls were made before and are kept"))
    failed = Counter[Arm]()
    enough = min(_FAILURES_AT_FIRST, len(suite.items) * repeats)
    sides = {Arm.CANDIDATE: candidate, Arm.REFERENCE: reference, Arm.REFERENCE_AGAIN: reference}
    pace = Pace(len(left), listen)
    limit = max_tokens or suite.max_tokens
    for call in _answers(left, sides, parallel=parallel, max_tokens=limit, keep=store.add, pace=pace):
        outcome = call.outcome
        if isinstance(outcome, Fault):
            side = sides[call.arm].endpoint
            listen(Notice(text=f"{side.role}: {call.item}: {outcome.kind}: {outcome.text[:120]}"))
            failed[call.arm] += 1
            if outcome.kind is FaultKind.KEY:
                raise stopped(side.role, side.url, outcome)
            hopeless = failed[call.arm] >= enough and outcome.kind is not FaultKind.BUDGET
            if hopeless and not _answered(call.arm, done.values()):
                raise _no_replies(side, outcome, failed[call.arm])
        done[call.arm, call.item, call.repeat] = call
        pace.done()
    return tuple(done[job.key] for job in jobs(suite, repeats) if job.key in done)


def _answered(arm: Arm, calls: Iterable[Call]) -> bool:
    return any(call.arm is arm and not isinstance(call.outcome, Fault) for call in calls)


def _no_replies(endpoint: Endpoint, fault: Fault, failed: int) -> NetworkError:
    """An arm has only failed so far: the others would work for nothing."""
    return NetworkError(
        f"the {endpoint.role} at {endpoint.url} gave no reply to {failed} questions",
        code="no-replies",
        cause=f"{fault.kind}: {fault.text}",
        hint=f"curl {endpoint.url}/models",
    )


def tested(item: Item, call: Call, keep: Callable[[Call], None]) -> Call:
    """The call with what came of running its code, where the question asks for some; then it is kept once more."""
    reply = call.outcome
    if not isinstance(item.check, PythonTest) or not isinstance(reply, Reply) or reply.tested is not None:
        return call
    if reply.shape is Shape.ANSWERED:
        trial = run_test(code_in(reply.content), item.check.code)
    else:
        trial = Trial(passed=False, why=f"not a whole answer: {reply.shape}")
    call = replace(call, outcome=replace(reply, tested=trial))
    keep(call)
    return call


def _asked(side: Side, job: Job, max_tokens: int | None, here: OneAtATime, stop: threading.Event) -> Call | None:
    """None where the run has ended, and its client with it, while this arm waited for its turn."""
    with here.turn(job.arm) if side.is_here else nullcontext():
        if stop.is_set():
            return None
        outcome = side.asker.ask(side.endpoint, job.item, job.item.max_tokens or max_tokens)
    return Call(arm=job.arm, item=job.item.id, repeat=job.repeat, outcome=outcome)


def _answers(
    left: Sequence[Job],
    sides: Mapping[Arm, Side],
    *,
    parallel: int,
    max_tokens: int | None,
    keep: Callable[[Call], None],
    pace: Pace,
) -> Iterator[Call]:
    """The calls, as they come in, each kept by the worker that made it: what is paid for is not lost with the rest.

    The workers are daemon threads: a Ctrl-C must not wait for an answer that may take another ten minutes.
    """
    waiting = {arm: deque(job for job in left if job.arm is arm) for arm in Arm}
    finished: queue.SimpleQueue[Call | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    here = OneAtATime()

    def work(arm: Arm) -> None:
        side = sides[arm]
        while not stop.is_set():
            try:
                job = waiting[arm].popleft()  # as atomic as any queue's
            except IndexError:
                return
            try:
                if (call := _asked(side, job, max_tokens, here, stop)) is not None:
                    keep(call)  # what is paid for, before its program may take its time
                    finished.put(tested(job.item, call, keep))
            except BaseException as error:  # noqa: BLE001 -- a bug in a thread must show in the main one
                finished.put(error)
                return

    for arm in Arm:
        for number in range(parallel):
            threading.Thread(target=work, args=(arm,), daemon=True, name=f"ask-{arm}-{number}").start()
    try:
        for _ in left:
            got = _next(finished, pace)
            if isinstance(got, BaseException):
                raise got
            yield got
    finally:
        stop.set()


def _next(finished: "queue.SimpleQueue[Call | BaseException]", pace: Pace) -> Call | BaseException:
    while True:
        try:
            return finished.get(timeout=pace.patience_seconds)
        except queue.Empty:
            pace.look()


def kept_calls(folder: Path) -> int:
    """How many calls a run's folder holds, as far as they are whole; nothing in it is touched."""
    try:
        whole = (folder / _CALLS).read_bytes().rpartition(b"\n")[0]
    except OSError:
        return 0
    found = set()
    for line in whole.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # whoever goes on with it is told what is wrong with it
            call = json.loads(line)
            found.add((call["arm"], call["item"], call["repeat"]))
    return len(found)


def reference_calls(folder: Path, suite: Suite, reference: Endpoint) -> tuple[Call, ...]:
    """What the reference said in an earlier run of the same questions, so that many quants need one bill.

    Raises:
        UsageError: ``bad-run`` where the folder holds none, ``other-suite`` where it asked other questions,
            ``other-reference`` where it asked another model.
    """
    try:
        described = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        calls = _read(folder / _CALLS)
    except (OSError, ValueError) as error:
        raise _no_run(folder) from error
    if not isinstance(described, dict) or described.get("suite_sha256") != suite.sha256:
        raise UsageError(
            f"the run in {folder} asked other questions than {suite.name}",
            code="other-suite",
            hint="give the same --suite (and --seed) as that run",
        )
    if described.get("reference") != [reference.url, reference.model]:
        asked = " ".join(map(str, described.get("reference") or ["nobody"]))
        raise UsageError(
            f"the run in {folder} asked another reference: {asked}",
            code="other-reference",
            hint="give the same --reference and --reference-model as that run",
        )
    return tuple(call for call in calls if call.arm is not Arm.CANDIDATE)


class Store:
    """The calls of a run, in a folder as they are made, or (``folder`` None) only in memory."""

    def __init__(self, calls: Iterable[Call] = (), stream: IO[str] | None = None) -> None:
        self.calls = tuple(calls)
        self._stream = stream
        self._writing = threading.Lock()

    def take_over(self, calls: Iterable[Call]) -> None:
        """Count calls of another run as made, except where this one has its own."""
        own = {(call.arm, call.item, call.repeat) for call in self.calls}
        for call in calls:
            if (call.arm, call.item, call.repeat) not in own:
                self.add(call)
                self.calls = (*self.calls, call)

    def add(self, call: Call) -> None:
        """Write a call down before anything is made of it; a fault is not kept, for the next run asks again.

        Safe to use from several threads.
        """
        if self._stream is None or isinstance(call.outcome, Fault):
            return
        try:
            with self._writing:
                self._stream.write(json.dumps(asdict(call), ensure_ascii=False) + "\n")
                self._stream.flush()
                os.fsync(self._stream.fileno())
        except OSError as error:
            raise MachineError(
                "the call cannot be written down", code="cannot-write", cause=error.strerror, hint="df -h ."
            ) from error


@contextmanager
def open_store(folder: Path | None, settings: Mapping[str, Any], questions: Suite | None = None) -> Iterator[Store]:
    """The store in ``folder``; what an earlier run with the same ``settings`` left there is taken over.

    ``questions`` are laid beside the calls, so that the folder alone says what was asked.

    Raises:
        UsageError: ``other-run`` where the folder holds a run with other settings, ``bad-run`` where it is none.
        MachineError: ``cannot-write``.
    """
    if folder is None:
        yield Store()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_settings(folder / _RUN, dict(settings))
        if questions is not None and not (folder / _QUESTIONS).exists():
            (folder / _QUESTIONS).write_text(as_jsonl(questions), encoding="utf-8")
        calls = _read(folder / _CALLS)
        stream = (folder / _CALLS).open("a", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(folder, error) from error
    with stream:
        yield Store(calls, stream)


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"{path} is no run of this program", code="bad-run", hint="choose another --out DIR"
        ) from error
    other = sorted(key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key))
    if other:
        raise UsageError(
            f"{path.parent} holds a run with another {', '.join(other)}",
            code="other-run",
            hint="choose another --out DIR, or give the same settings to go on with it",
        )


def _read(path: Path) -> list[Call]:
    """The calls of a file; a last line that a kill cut off is dropped, so that the next one starts on its own.

    A reply whose program was run afterwards is there twice: the later line holds both.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    if rest:
        os.truncate(path, len(data) - len(rest))
    adapter = TypeAdapter(Call)
    try:
        calls = [adapter.validate_json(line) for line in whole.splitlines() if line.strip()]
        return list({(call.arm, call.item, call.repeat): call for call in calls}.values())
    except ValidationError as error:
        raise _no_run(path) from error


def _no_run(path: Path) -> UsageError:
    return UsageError(f"{path} is no record of this program", code="bad-run", hint="choose another --out DIR")


def write_reports(folder: Path, answer: Mapping[str, Any], page: str) -> None:
    """Put ``report.json`` and ``report.html`` beside the calls.

    Raises:
        MachineError: ``cannot-write``.
    """
    try:
        (folder / "report.json").write_text(json.dumps(answer, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot write to {folder}", code="cannot-write", cause=error.strerror, hint="choose another --out DIR"
    )
