"""What the loopback Ollama keeps (blobs, manifests) and its rules for making a model of files."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from gguf import GGUFReader

_SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NAME: Final = re.compile(r"(?:[\w.-]+/){0,2}[\w.-]+(?::[\w.-]{1,80})?")
_DIGEST: Final = re.compile(r"sha256[:-][0-9a-f]{64}")
_KEEPS_SHARDS: Final = (0, 35, 0)


class Refusal(Exception):  # noqa: N818 -- it is an answer of the server
    """What Ollama answers instead: a status and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(slots=True, kw_only=True)
class Ollama:
    """A running stand-in and what it is told to be."""

    url: str
    folder: Path
    version: str = "0.35.1"
    full_at_bytes: int | None = None
    """The file system of ``folder`` holds no more than this."""
    drop_after_bytes: int | None = None
    """The next upload is cut off, once, after this many bytes."""
    bytes_per_second: float | None = None
    load_error: str | None = None
    """Set: loading a model fails with this text, as 500."""
    load_seconds: float = 0.0
    create_error: str | None = None
    thinking: str = "The user greets me."
    content: str = "Hello."
    done_reason: str = "stop"
    template: str = "{{ .Prompt }}"
    capabilities: tuple[str, ...] = ("completion", "tools", "thinking")
    engine_url: str | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    chats: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of all chat requests."""
    user: int | None = None
    """Set: the user that the server runs as, who may touch only blobs of its own."""
    watch: Callable[[], None] | None = None
    """Called whenever a file in ``folder`` has grown."""
    received_bytes: int = 0
    """Of blobs, whether they were kept or not."""
    taken: list[str] = field(default_factory=list)
    """The digests of all blobs that came whole."""
    peak_bytes: int = 0
    """The most that ever lay in ``folder``."""
    loaded: set[str] = field(default_factory=set)
    before: Callable[[str, str], None] | None = None
    """Called with method and path before every answer."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def used_bytes(self) -> int:
        """Files that have another name outside the folder take no disk of it."""
        found = [path.stat() for path in self.folder.rglob("*") if path.is_file()]
        return sum(file.st_size for file in found if file.st_nlink == 1)

    def restart(self) -> None:
        """Do what a start does: remove every blob that no manifest names."""
        kept = self.named()
        for blob in self.blobs.iterdir():
            if blob.name.replace("-", ":", 1) not in kept:
                blob.unlink()
        self.loaded.clear()

    def named(self) -> set[str]:
        """The digests that some manifest names."""
        return {layer["digest"] for model in self.models().values() for layer in [*model["layers"], model["config"]]}

    def models(self) -> dict[str, dict[str, Any]]:
        root = self.folder / "manifests"
        return {
            f"{path.parent.name}:{path.name}": cast("dict[str, Any]", json.loads(path.read_text()))
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def blob(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise Refusal(400, "invalid digest format")
        return self.blobs / digest.replace(":", "-", 1)

    def note_usage(self) -> None:
        with self._lock:
            used = self.used_bytes()
            self.peak_bytes = max(self.peak_bytes, used)
        if self.watch is not None:
            self.watch()
        if self.full_at_bytes is not None and used > self.full_at_bytes:
            raise Refusal(500, f"write {self.blobs}/sha256-1234: no space left on device")

    def touch(self, blob: Path) -> None:
        """As registering does; the system refuses it for another user's file."""
        if self.user not in {None, 0, blob.stat().st_uid}:
            raise Refusal(500, f"chtimes {blob}: operation not permitted")
        os.utime(blob)

    def adopt(self, blob: Path) -> None:
        """What the server has written itself belongs to its user."""
        if self.user is not None:
            os.chown(blob, self.user, -1)

    def add_blob(self, data: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blob(digest).write_bytes(data)
        self.note_usage()
        return digest

    def manifest_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise Refusal(400, "invalid model name")
        model, _, tag = name.partition(":")
        owner = model if "/" in model else f"library/{model}"
        return self.folder / "manifests" / "registry.ollama.ai" / owner / (tag or "latest")

    def manifest(self, name: str) -> dict[str, Any]:
        path = self.manifest_path(name)
        if not path.is_file():
            raise Refusal(404, f"model '{name}' not found")
        return cast("dict[str, Any]", json.loads(path.read_text()))


def _shard_key(name: str, reader: GGUFReader) -> tuple[str, int, int] | None:
    """Prefix, index from 0 and count of a split file; None for a whole one. Refuses as Ollama's create does."""

    def number(key: str) -> int | None:
        found = reader.get_field(key)
        return None if found is None else int(found.contents())

    count = number("split.count")
    if count is None or count <= 1:
        return None
    match = _SPLIT.fullmatch(name.rpartition("/")[2])
    if match is None or int(match[2]) == 0:
        raise Refusal(400, f'invalid split GGUF: split GGUF "{name}" must use llama.cpp split filename pattern')
    index = int(match[2]) - 1
    if int(match[3]) != count:
        text = f'split GGUF "{name}" filename count {int(match[3])} does not match metadata count {count}'
        raise Refusal(400, f"invalid split GGUF: {text}")
    if number("split.no") != index:
        text = f'split GGUF "{name}" filename index {index} does not match metadata index {number("split.no")}'
        raise Refusal(400, f"invalid split GGUF: {text}")
    return match[1], index, count


def make_layers(ollama: Ollama, files: dict[str, str], say: Callable[[str], None]) -> tuple[list[dict[str, Any]], str]:
    """The model layers that ``files`` make, and their architecture."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    whole: list[str] = []
    architecture = "unknown"
    for name in sorted(files):
        blob = ollama.blob(files[name])
        say("parsing GGUF")
        ollama.touch(blob)
        try:
            reader = GGUFReader(blob)
        except (ValueError, IndexError) as error:
            raise Refusal(400, "invalid file magic") from error
        found = reader.get_field("general.architecture")
        architecture = str(found.contents()) if found is not None else architecture
        key = _shard_key(name, reader)
        if key is None:
            whole.append(files[name])
        else:
            groups.setdefault((key[0], key[2]), {})[key[1]] = files[name]
    digests = list(whole)
    for (prefix, count), parts in groups.items():
        if len(parts) != count:
            text = f'split GGUF "{prefix}" has {len(parts)} shards, expected {count}'
            raise Refusal(400, f"invalid split GGUF: {text}")
        ordered = [parts[index] for index in range(count)]
        digests += ordered if _numbers(ollama.version) >= _KEEPS_SHARDS else [_merge(ollama, ordered)]
    return [
        {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": digest,
            "size": ollama.blob(digest).stat().st_size,
        }
        for digest in digests
    ], architecture


def _merge(ollama: Ollama, digests: list[str]) -> str:
    """One file of all shards, through the two temporary files that Ollama writes. (Its bytes are no GGUF here.)"""
    with tempfile.NamedTemporaryFile(prefix="split-gguf-", dir=ollama.blobs) as first:
        for digest in digests:
            with ollama.blob(digest).open("rb") as shard:
                shutil.copyfileobj(shard, first)
        first.flush()
        with tempfile.NamedTemporaryFile(prefix="sha256-", dir=ollama.blobs, delete=False) as second:
            try:
                first.seek(0)
                shutil.copyfileobj(first, second)
                second.flush()
                ollama.note_usage()
                second.seek(0)
                digest = f"sha256:{hashlib.file_digest(second, 'sha256').hexdigest()}"
                Path(second.name).rename(ollama.blob(digest))
            finally:
                Path(second.name).unlink(missing_ok=True)
    return digest


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
