"""Killed while merging, looking through, sending or creating: what lies there is sound, and the next run ends it."""

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from fakes.gguf_set import write_set
from fakes.ollama import serve
from fakes.ollama_store import Ollama
from fakes.sources import source_of

from kimigguf.events import Advance, Event, Notice, Step, ignore
from kimigguf.ollama import merge, transfer
from kimigguf.ollama.merge import Job, check
from kimigguf.ollama.merged import merged
from kimigguf.ollama.registration import plan, register

NAME = "kimi-k3:ud-iq1_s"
PHASES = ("merge", "check", "send", "create", "success")
SMALL = 64 << 10


def phase_of(event: Event) -> str:
    match event:
        case Advance(done_bytes=0):
            return "other"  # a tool that has not written yet may not have begun at all
        case Advance(activity=activity):
            return activity
        case Step(text=text) if text.startswith("Ollama: "):
            return "success" if text.endswith("success") else "create"
        case Step() | Notice():
            return "other"


def run(environ: dict[str, str], folder: Path, copy: bool, phase: str, count: int) -> None:
    """Plan and register as a new process does; SIGKILL at the ``count``-th event of a phase."""
    merge._PIECE_BYTES = transfer._PIECE = SMALL  # type: ignore[misc]  # smaller steps, to be killed between more of them
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        if phase_of(event) == phase:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    source = source_of(tuple(sorted(folder.glob("*.gguf"))))
    register(plan(source, environ, copy=copy), listen, environ=environ)


def start(environ: dict[str, str], folder: Path, *, copy: bool, phase: str = "", count: int = 0) -> int | None:
    """The exit code of a run, negative where it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kimigguf.ollama.registration", "fakes.sources"])
    process = context.Process(target=run, args=(environ, folder, copy, phase, count))
    process.start()
    process.join(60)
    code = process.exitcode
    process.close()
    return code


def is_sound(stand_in: Ollama, job: Job) -> None:
    """Nothing that is called whole is not, and no model names what is not there."""
    if job.whole.exists():
        assert job.record() is not None
        check(job.whole, merged(job.files), ignore)
    for model in stand_in.models().values():
        assert all(stand_in.blob(layer["digest"]).exists() for layer in [*model["layers"], model["config"]])


def is_complete(stand_in: Ollama, job: Job) -> None:
    (layer,) = [one for one in stand_in.models()[NAME]["layers"] if one["mediaType"].endswith(".model")]
    check(stand_in.blob(layer["digest"]), merged(job.files), ignore)
    assert sorted(path.name for path in job.folder.iterdir()) == ["UD-IQ1_S.json", "lock"]
    assert max(Counter(stand_in.taken).values(), default=1) == 1, "a blob was sent twice"


def slow_tool(folder: Path, job: Job) -> None:
    """A llama-gguf-split that takes its time, so that it can be killed at it."""
    folder.mkdir()
    done = Job(files=job.files, folder=folder / "done", name="all")
    merge.merge(done, {}, ignore)
    tool = folder / "llama-gguf-split"
    tool.write_text(f'#!/bin/sh\nhead -c 300000 {done.whole} >"$3"\nsleep 0.6\ncat {done.whole} >"$3"\n')
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("copy", "with_tool", "kills"),
    [(True, False, 10), (False, False, 7), (False, True, 3)],
    ids=["sent", "linked", "by-the-tool"],
)
def test_killed_anywhere_the_next_run_completes_and_nothing_is_sent_twice(
    tmp_path: Path, copy: bool, with_tool: bool, kills: int
) -> None:
    chance = random.Random(kills)
    phases = [phase for phase in PHASES if copy or phase != "send"]
    left = ["merge"] * kills if with_tool else [*phases, *chance.choices(phases, k=kills - len(phases))]
    killed: Counter[str] = Counter()
    for number in range(100):
        if not left:
            break
        folder = tmp_path / f"{number}" / "UD-IQ1_S"
        job = Job(files=write_set(folder, size_bytes=400_000), folder=folder / ".kimigguf", name="UD-IQ1_S")
        with serve(tmp_path / f"{number}" / "models", version="0.34.0") as stand_in:
            environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder), "PATH": "/usr/bin:/bin"}
            if with_tool:
                slow_tool(tmp_path / f"{number}" / "bin", job)
                environ["PATH"] = f"{tmp_path / f'{number}' / 'bin'}:/usr/bin:/bin"
            for _ in range(4):  # a run that is interrupted again and again
                if not left:
                    break
                phase = left.pop(chance.randrange(len(left)))
                most = {"success": 1, "create": 2, "merge": 1 if with_tool else 9}.get(phase, 9)
                code = start(environ, folder, copy=copy, phase=phase, count=chance.randint(1, most))
                is_sound(stand_in, job)
                if code == 0:
                    left.append(phase)  # it was done before it got there
                    break
                assert code == -signal.SIGKILL
                killed[phase] += 1
            assert start(environ, folder, copy=copy) == 0
            is_complete(stand_in, job)
    assert killed.total() == kills
    assert set(killed) == set(["merge"] if with_tool else phases)


def test_the_tool_ends_with_the_run_that_started_it(tmp_path: Path) -> None:
    folder = tmp_path / "UD-IQ1_S"
    write_set(folder)
    pid = tmp_path / "pid"
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "llama-gguf-split"
    tool.write_text(f"#!/bin/sh\necho $$ >{pid}\nhead -c 1000 /dev/zero >$3\nexec sleep 30\n")
    tool.chmod(0o755)
    with serve(tmp_path / "models", version="0.34.0") as stand_in:
        environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
        environ["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        assert start(environ, folder, copy=False, phase="merge", count=1) == -signal.SIGKILL
    number = int(pid.read_text())
    for _ in range(100):
        if (
            not Path(f"/proc/{number}").exists()
            or "Z" in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2][:3]
        ):
            break
        signal.sigtimedwait([], 0.05)
    else:
        pytest.fail("the tool goes on writing without anybody to look at it")


def test_a_killed_run_whose_model_is_there_is_no_taken_name(tmp_path: Path) -> None:
    folder = tmp_path / "UD-IQ1_S"
    write_set(folder)
    with serve(tmp_path / "models", version="0.34.0") as stand_in:
        environ = {"OLLAMA_HOST": stand_in.url, "OLLAMA_MODELS": str(stand_in.folder)}
        assert start(environ, folder, copy=False, phase="success", count=1) == -signal.SIGKILL
        assert list(stand_in.models()) == [NAME]
        source = source_of(tuple(sorted(folder.glob("*.gguf"))))
        again = plan(source, environ)
        assert again.already
        assert again.blocking is None
        manifest = next(path for path in (stand_in.folder / "manifests").rglob("*") if path.is_file())
        before = manifest.read_text()
        assert register(again, ignore, environ={}) == ()
        assert manifest.read_text() == before
        stand_in.blob(json.loads(before)["layers"][-1]["digest"]).write_text('{"num_ctx": 7}')
        changed = plan(source, environ)
        assert changed.blocking is not None
        assert changed.blocking.code == "name-taken"
