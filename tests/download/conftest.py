"""A repository of random shards on a loopback hub, and a policy small enough for tests."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.hub import COMMIT, Hub, serve

from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.download.fetch import download
from kimigguf.download.policy import Policy
from kimigguf.download.store import StoredSet, set_folder
from kimigguf.events import Event

REPOSITORY = "owner/Model-GGUF"
QUANT = "UD-X"
KIB = 1 << 10

FAST = Policy(
    connections=4,
    shards=2,
    part_bytes=64 * KIB,
    mark_bytes=8 * KIB,
    stall_seconds=0.5,
    patience_seconds=3.0,
    backoff_seconds=0.01,
    backoff_max_seconds=0.05,
)


def write_shards(root: Path, sizes: tuple[int, ...], *, seed: int = 1, quant: str = QUANT) -> RemoteSet:
    """Random shards under ``root``, and the set as the hub would list it."""
    folder = root / REPOSITORY / quant
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, size in enumerate(sizes, start=1):
        name = f"Model-{quant}-{number:05}-of-{len(sizes):05}.gguf"
        data = random.Random(f"{seed} {number}").randbytes(size)
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        files.append(RemoteFile(path=f"{quant}/{name}", size_bytes=size, sha256=digest))
    return RemoteSet(repository=REPOSITORY, commit=COMMIT, quant=quant, files=tuple(files))


@dataclass(slots=True, kw_only=True)
class Scene:
    """A hub with one set, and where it is fetched to."""

    hub: Hub
    root: Path
    remote: RemoteSet
    models: Path
    events: list[Event]

    @property
    def folder(self) -> Path:
        return set_folder(self.models, self.remote)

    def environ(self, **more: str) -> dict[str, str]:
        return {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.models / "no-login"), **more}

    def get(self, policy: Policy = FAST, *, wait: bool = False, **environ: str) -> StoredSet:
        return download(
            self.remote,
            self.folder,
            environ=self.environ(**environ),
            listen=self.events.append,
            policy=policy,
            wait=wait,
        )

    def served(self, number: int) -> Path:
        """The hub's file of a shard, counted from 1."""
        return self.root / REPOSITORY / self.remote.files[number - 1].path

    def assert_whole(self) -> None:
        """Every shard is there, bit for bit, and nothing else is."""
        for file in self.remote.files:
            data = (self.folder / file.name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file.sha256
        assert not list(self.folder.glob("*.part"))
        assert not list((self.folder / ".kimigguf").glob("*.journal"))

    def assert_nothing_wrong(self) -> None:
        """Whatever lies under a final name is right."""
        for file in self.remote.files:
            if (path := self.folder / file.name).exists():
                assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    root = tmp_path / "root"
    remote = write_shards(root, (3 * KIB, 700 * KIB + 11, 500 * KIB))
    with serve(root) as hub:
        yield Scene(hub=hub, root=root, remote=remote, models=tmp_path / "models", events=[])
