"""Tortures a fetch: a hub that fails by seed, a client that is killed at random instants, and the books kept.

``run(seed, folder)`` plays one seed and raises AssertionError at the first wrong thing. Used in small by the tests and
in full by ``scripts/torture_download``.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fakes.hub import Hub, Request, serve
from fakes.hub_faults import TRANSIENT, Kind, by_seed, none

from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.download import journal
from kimigguf.download.store import set_folder

KIB: Final = 1 << 10
CONNECTIONS, MARK_BYTES, SHARDS = 4, 16 * KIB, 2
SOCKET_BYTES: Final = 512 * KIB
"""What may lie in the buffers of one killed connection: sent by the hub, never read by the client."""
PATIENCE_SECONDS: Final = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one seed did."""

    seed: int
    kills: int
    failures: tuple[str, ...]
    size_bytes: int
    sent_bytes: int

    @property
    def twice_bytes(self) -> int:
        return self.sent_bytes - self.size_bytes


@dataclass(slots=True, kw_only=True)
class Game:
    hub: Hub
    remote: RemoteSet
    truth: dict[str, bytes]
    root: Path
    models: Path
    honest: bool = True
    """The hub sends what it names, or something that can be seen to be wrong before the hash."""

    @property
    def folder(self) -> Path:
        return set_folder(self.models, self.remote)

    def start(self) -> "subprocess.Popen[str]":
        """A client of its own, past its imports."""
        environ = {**os.environ, "HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.models / "none")}
        task = {
            "folder": str(self.folder),
            "remote": {
                "repository": self.remote.repository,
                "commit": self.remote.commit,
                "quant": self.remote.quant,
                "files": [[file.path, file.size_bytes, file.sha256] for file in self.remote.files],
            },
            "policy": {
                "connections": CONNECTIONS,
                "shards": SHARDS,
                "part_bytes": 128 * KIB,
                "mark_bytes": MARK_BYTES,
                "stall_seconds": 0.4,
                "patience_seconds": PATIENCE_SECONDS,
                "backoff_seconds": 0.01,
                "backoff_max_seconds": 0.1,
            },
        }
        client = Path(__file__).with_name("torture_client.py")
        process = subprocess.Popen(
            [sys.executable, str(client), json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
        return process

    def check_disk(self) -> None:
        """Nothing wrong under a final name; nothing claimed by a journal that is not there."""
        for file in self.remote.files:
            truth, path = self.truth[file.name], self.folder / file.name
            if path.exists():
                assert path.read_bytes() == truth, f"{file.name} is wrong under its final name"
            part = self.folder / f"{file.name}.part"
            if part.exists() and self.honest:
                data = part.read_bytes()
                log = self.folder / ".kimigguf" / f"{file.name}.journal"
                for start, end in journal.read(log, size_bytes=file.size_bytes, sha256=file.sha256 or ""):
                    assert data[start:end] == truth[start:end], f"{file.name}: the journal claims what is not there"

    def kept_bytes(self) -> int:
        """Good bytes on disk."""
        total = 0
        for file in self.remote.files:
            log = self.folder / ".kimigguf" / f"{file.name}.journal"
            if (self.folder / file.name).exists():
                total += file.size_bytes
            else:
                total += journal.read(log, size_bytes=file.size_bytes, sha256=file.sha256 or "").total_bytes
        return total


def run(seed: int, folder: Path) -> Outcome:
    """Play one seed in an empty folder."""
    draw = random.Random(seed)
    remote, truth = _shards(draw, folder / "root")
    with serve(folder / "root", commit=remote.commit) as hub:
        hub.send_buffer_bytes = 32 * KIB
        hub.redirect = draw.random() < 0.75
        hub.signed_uses = draw.choice([None, 1, 2])
        hub.signed_seconds = draw.choice([None, 0.2])
        hub.bytes_per_second = draw.choice([200_000, 600_000, 2_000_000])
        kinds = [kind for kind in TRANSIENT if hub.redirect or kind is not Kind.EXPIRED]
        hub.faults = by_seed(seed, rate=draw.choice([0.0, 0.1, 0.3, 0.5]), kinds=kinds, stall_seconds=2.0)
        game = Game(hub=hub, remote=remote, truth=truth, root=folder / "root", models=folder / "models")
        mischief = draw.choice([None, None, None, "changed file", "other shard count", "garbage"])
        # A file that changes between the hub's word and the store's bytes is seen by its ETag if one is known already,
        # else by the hash, like garbage.
        game.honest = mischief not in {"garbage", "changed file"}
        if mischief is not None:
            _arrange(game, mischief, draw)
        kills, failures = _kill_and_see(game, draw)
        _undo(game)
        time.sleep(0.1)  # until the hub has noticed the last kill
        sent_before = sum(hub.sent_bytes.values())
        kept = game.kept_bytes()
        _finish(game)
        _check_books(game, mischief, kills=kills, sent_last=sum(hub.sent_bytes.values()) - sent_before, kept=kept)
        return Outcome(
            seed=seed,
            kills=kills,
            failures=failures,
            size_bytes=remote.size_bytes,
            sent_bytes=sum(hub.sent_bytes.values()),
        )


def _shards(draw: random.Random, root: Path) -> tuple[RemoteSet, dict[str, bytes]]:
    count = draw.randint(2, 4)
    folder = root / "owner" / "Model-GGUF" / "UD-X"
    folder.mkdir(parents=True)
    files, truth = [], {}
    for number in range(1, count + 1):
        name = f"Model-UD-X-{number:05}-of-{count:05}.gguf"
        truth[name] = draw.randbytes(draw.choice([7, 5 * KIB, 300 * KIB, 900 * KIB]) + draw.randint(0, 999))
        (folder / name).write_bytes(truth[name])
        digest = hashlib.sha256(truth[name]).hexdigest()
        files.append(RemoteFile(path=f"UD-X/{name}", size_bytes=len(truth[name]), sha256=digest))
    commit = hashlib.sha1(b"%d" % draw.getrandbits(60), usedforsecurity=False).hexdigest()
    return RemoteSet(repository="owner/Model-GGUF", commit=commit, quant="UD-X", files=tuple(files)), truth


def _arrange(game: Game, mischief: str, draw: random.Random) -> None:
    """Something that no retry cures, from a random request on."""
    at, victim = draw.randint(1, 12), draw.choice(game.remote.files)
    path = game.root / game.remote.repository / victim.path
    seen, done = 0, False

    def before(request: Request) -> None:
        nonlocal seen, done
        seen += request.body
        if seen < at or done:
            return
        done = True
        if mischief == "changed file":
            _replace(path, random.Random(at).randbytes(victim.size_bytes))
        elif mischief == "other shard count":
            for file in game.remote.files:
                (path.parent / file.name).rename(path.parent / f"{file.name[:-8]}{len(game.remote.files) + 1:03}.gguf")
        else:
            _replace(path, game.truth[victim.name][::-1])
            os.utime(path)
            game.hub.lie_about_hash = {path: victim.sha256 or ""}

    game.hub.before = before


def _replace(path: Path, data: bytes) -> None:
    """As an upload does: in one instant, under the readers of the old content."""
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.replace(path)


def _undo(game: Game) -> None:
    game.hub.before, game.hub.faults, game.hub.bytes_per_second = None, none, None
    game.hub.lie_about_hash = {}
    folder = game.root / game.remote.repository / game.remote.quant
    for path in folder.iterdir():
        if path.name not in game.truth:
            path.unlink()
    for name, data in game.truth.items():
        _replace(folder / name, data)


def _kill_and_see(game: Game, draw: random.Random) -> tuple[int, tuple[str, ...]]:
    """Start and kill a few clients; those that end on their own end clearly."""
    kills, failures = 0, []
    for _ in range(draw.randint(1, 3)):
        process = game.start()
        try:
            try:
                process.wait(draw.uniform(0.0, 0.8))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        if process.returncode == -signal.SIGKILL:
            kills += 1
        elif process.returncode != 0:
            assert process.returncode in {3, 4, 5}, f"exit {process.returncode}: {out}{err}"
            assert out.strip(), "a failure without a word"
            failures.append(out.strip().splitlines()[-1])
        game.check_disk()
    return kills, tuple(failures)


def _finish(game: Game) -> None:
    """On a hub that works, the next run ends well."""
    process = game.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"exit {process.returncode}: {out}{err}"
    game.check_disk()
    for file in game.remote.files:
        assert (game.folder / file.name).read_bytes() == game.truth[file.name]
    assert not list(game.folder.glob("*.part"))


def _check_books(game: Game, mischief: str | None, *, kills: int, sent_last: int, kept: int) -> None:
    """The last run fetched what was not kept, and nothing else; a kill cost what it may."""
    missing = game.remote.size_bytes - kept
    if mischief is None:
        assert sent_last <= missing, f"{sent_last} bytes were sent for {missing} that were missing"
        assert kills >= 0
    else:  # what a lying hub sent may have to be fetched once more
        assert sent_last <= 2 * game.remote.size_bytes


def allowed_twice_bytes(kills: int) -> int:
    """By the books: each kill may lose what each connection had not marked, and what lay in its buffers."""
    return kills * CONNECTIONS * (MARK_BYTES + SOCKET_BYTES)


def timed(seed: int, folder: Path) -> tuple[Outcome, float]:
    """``run`` with its duration in seconds."""
    started = time.monotonic()
    return run(seed, folder), time.monotonic() - started
