"""One run of a fetch: ranges of several shards at once, hashed as they come, named only when the hash is right."""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from kimigguf.download import disk
from kimigguf.download.hashing import hash_file, write_marks
from kimigguf.download.manifest import Manifest, with_verified, write_manifest
from kimigguf.download.parts import Source, stream
from kimigguf.download.policy import Pace, Policy
from kimigguf.download.shard import Shard, Verdict
from kimigguf.download.store import FileState, cannot_write, look
from kimigguf.download.transport import Connections, Lost, origin
from kimigguf.errors import IntegrityError, NetworkError
from kimigguf.events import Advance, Listener, Notice, Step

_TICK_SECONDS: Final = 0.25
_JOIN_SECONDS: Final = 20.0


class Transfer:
    """One run of a fetch: workers take parts, hashers follow, the caller's thread shows progress and minds Ctrl-C."""

    def __init__(
        self,
        sources: list[Source],
        folder: Path,
        manifest: Manifest,
        *,
        policy: Policy,
        environ: Mapping[str, str],
        listen: Listener,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._policy = policy
        self._environ = environ
        self._listen = listen
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._pace = Pace(policy, self._stop.is_set)
        self._shards = [Shard(source, folder, policy) for source in sources]
        self._waiting: list[Shard] = []
        self._active: list[Shard] = []
        self._work = threading.Condition()
        """Guards the three lists, the manifest and the failure; told when there is something to take or to see."""
        self._connections: list[Connections] = []
        self._threads: list[threading.Thread] = []
        self._notices: list[str] = []
        self._fetched: set[str] = set()
        """Names of those that this run has brought in."""
        self._told: set[tuple[str, str]] = set()

    # -- the caller's thread -------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            remaining = self._sort_out()
            if self._waiting:
                self._listen(Step(text="checking the disk"))
                disk.require(self._folder, remaining)
                self._fetch()
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def _sort_out(self) -> int:
        """Leave what is verified, hash what claims to be whole, queue the rest. Returns the bytes that are to come."""
        found, remaining = look(self._folder), 0
        files = {file.name: file for file in found.files} if found else {}
        for shard in self._shards:
            file = files[shard.source.name]
            if file.state is FileState.VERIFIED or (file.state is FileState.UNVERIFIED and self._adopt(shard)):
                shard.done = True
                continue
            self._waiting.append(shard)
            if file.state is FileState.MISSING:
                remaining += shard.source.size_bytes
            elif file.state is FileState.PARTIAL:
                remaining += shard.source.size_bytes - file.done_bytes
            else:
                remaining += max(0, shard.source.size_bytes - shard.demote())
        return remaining

    def _adopt(self, shard: Shard) -> bool:
        """Hash a file that is there but not known to be right; False if it is wrong."""
        self._listen(Step(text=f"{shard.source.name} is here, but not known to be right: hashing it"))
        before = shard.path.stat()
        digest = hash_file(shard.path, sha256=shard.source.sha256, listen=self._listen)
        if digest.sha256 != shard.source.sha256:
            self._listen(Notice(text=f"{shard.source.name} is damaged; what is bad of it will be fetched again"))
            return False
        write_marks(shard.path, digest.marks)
        shard.journal_path.unlink(missing_ok=True)  # left over where a run ended between the name and the manifest
        self._record(shard.source.name, before)
        return True

    def _fetch(self) -> None:
        for number in range(self._policy.connections):
            connections = Connections(environ=self._environ, stall_seconds=self._policy.stall_seconds)
            self._connections.append(connections)
            self._start(f"fetch-{number}", partial(self._worker, connections))
        self._start("sync", self._syncer)
        try:
            with self._work:
                self._open_more()
            while not self._finished():
                with self._work:
                    self._work.wait(_TICK_SECONDS)
                self._report()
        finally:
            self._wind_up()
        if self._failure is not None:
            raise self._failure
        self._report()

    def _finished(self) -> bool:
        with self._work:
            return self._failure is not None or not (self._waiting or self._active)

    def _wind_up(self) -> None:
        """Stop and join every thread. One that hangs in a name look-up writes nothing any more, and is left to end."""
        self._stop.set()
        for connections in self._connections:
            connections.interrupt()
        for shard in list(self._active):
            with shard.changed:
                shard.changed.notify_all()
        until = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for shard in list(self._active):
            shard.close()

    def _report(self) -> None:
        with self._work:
            shards, notices = list(self._active), self._notices
            self._notices = []
        for text in notices:
            self._listen(Notice(text=text))
        total, size = sum(shard.done_bytes for shard in self._shards), self._manifest.size_bytes
        if total < size:
            self._advance("fetch", "total", total, size)
        for shard in self._shards:
            done, size, name = shard.done_bytes, shard.source.size_bytes, shard.source.name
            if shard not in shards and not (shard.done and name in self._fetched):
                continue
            self._advance("fetch", name, done, size)
            if done == size:
                self._advance("hash", name, shard.hashed_bytes, size)
        if self._finished():
            self._advance("fetch", "total", total, self._manifest.size_bytes)

    def _advance(self, activity: str, item: str, done: int, total: int) -> None:
        """Tell how far an item is; that it is done is told once."""
        if (activity, item) in self._told:
            return
        if done == total:
            self._told.add((activity, item))
        self._listen(Advance(activity=activity, item=item, done_bytes=done, total_bytes=total))

    # -- threads -------------------------------------------------------------------------------------------------

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except OSError as error:
                self._fail(cannot_write(self._folder, error))
            except BaseException as error:  # noqa: BLE001 -- handed to the caller's thread, which raises it
                self._fail(error)

        # Daemons, so that a name look-up that hangs can't keep a stopped program alive.
        thread = threading.Thread(target=guarded, name=f"kimigguf-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, error: BaseException) -> None:
        with self._work:
            if self._failure is None:
                self._failure = error
            self._stop.set()
            self._work.notify_all()

    def _open_more(self) -> None:
        """Bring shards in, up to the number that may be on their way with parts left to take. Holds ``_work``."""
        most = self._policy.shards
        while (
            self._waiting
            and sum(bool(shard.parts) for shard in self._active) < most
            and len(self._active) < 2 * most + 2  # those that are only being hashed; the network must not run away
        ):
            shard = self._waiting.pop(0)
            shard.open()
            self._active.append(shard)  # from here on it is closed with the rest, whatever comes
            disk.require(self._folder, shard.source.size_bytes - shard.done_bytes, slack=False)
            self._start(f"hash-{shard.source.name}", partial(self._hasher, shard))
        self._work.notify_all()

    def _take(self) -> tuple[Shard, int, int] | None:
        """The next part, from the shard with the fewest in flight; None when the transfer is over."""
        with self._work:
            while not self._stop.is_set():
                self._open_more()
                if ready := [shard for shard in self._active if shard.parts]:
                    shard = min(ready, key=lambda shard: shard.in_flight)
                    shard.in_flight += 1
                    return shard, *shard.parts.popleft()
                self._work.wait(_TICK_SECONDS)
            return None

    def _worker(self, connections: Connections) -> None:
        try:
            while (taken := self._take()) is not None:
                shard, start, end = taken
                try:
                    self._fetch_part(connections, shard, start, end)
                finally:
                    with self._work:
                        shard.in_flight -= 1
                        self._work.notify_all()
        finally:
            connections.close()

    def _fetch_part(self, connections: Connections, shard: Shard, start: int, end: int) -> None:
        """Attempt after attempt until the part is there; an attempt that got further starts the patience anew."""
        at, failures, progress_at = start, 0, time.monotonic()
        while at < end and self._pace.enter():
            before, well, lost = at, False, None
            try:
                at = self._attempt(connections, shard, at, end)
                well = at == end
            except _Progress as progress:
                at, lost = progress.at, progress.lost
            finally:
                self._pace.leave(well=well)
            if at > before:
                failures, progress_at = 0, time.monotonic()
            if lost is not None and not self._stop.is_set():
                failures += 1
                self._settle(shard, lost, failures, time.monotonic() - progress_at)

    def _attempt(self, connections: Connections, shard: Shard, at: int, end: int) -> int:
        """One answer, written and marked as it comes. Returns where it ended.

        Raises:
            _Progress: The line failed; carries how far it got.
        """
        marked, step = at, self._policy.mark
        pieces = stream(connections, shard.source, at, end, tag=shard.tag, stall_seconds=self._policy.stall_seconds)
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    if self._stop.is_set():
                        break
                    shard.write(piece, at)
                    at += len(piece)
                    if at - marked >= step:
                        shard.mark(marked, at)
                        marked = at
                    self._pace.spend(len(piece))
        except Lost as lost:
            raise _Progress(at, lost) from lost
        finally:
            shard.mark(marked, at)
        return at

    def _settle(self, shard: Shard, lost: Lost, failures: int, idle_seconds: float) -> None:
        """Wait before the next attempt, or give up.

        Raises:
            NetworkError: ``hub-unreachable``.
        """
        policy = self._policy
        backoff = min(policy.backoff_max_seconds, policy.backoff_seconds * 2 ** min(failures - 1, 10))
        backoff *= random.uniform(0.5, 1.0)  # noqa: S311 -- so that the workers don't come back all at once
        wait = max(backoff, lost.wait_seconds or 0.0)
        if idle_seconds + wait > policy.patience_seconds:
            asked = f"; it asks to wait {wait:.0f} s" if lost.wait_seconds else ""
            raise NetworkError(
                f"{shard.source.name} does not arrive from {origin(shard.source.url)}",
                code="hub-unreachable",
                cause=f"{lost.reason}, and no byte of this part for {idle_seconds:.0f} s{asked}",
                hint="run the same command again later: it continues with what is there",
            )
        if lost.throttled:
            self._pace.complain(wait)
            self._tell(f"the hub asks for patience ({lost.reason}): {wait:.0f} s, then fewer requests at once")
        elif failures >= 3:  # noqa: PLR2004 -- one or two are everyday life on a long line
            self._tell(f"{shard.source.name}: {lost.reason}; attempt {failures + 1} in {wait:.0f} s")
        self._stop.wait(wait)

    def _tell(self, text: str) -> None:
        with self._work:
            if text not in self._notices:
                self._notices.append(text)

    def _quiet(self, shard: Shard) -> bool:
        """Take back what has not been started of a shard, and wait for what has; False if all is over."""
        with self._work:
            shard.parts.clear()
            while shard.in_flight and not self._stop.is_set():
                self._work.wait(_TICK_SECONDS)
        return not self._stop.is_set()

    def _hasher(self, shard: Shard) -> None:
        for attempt in range(self._policy.hash_retries + 1):
            verdict = shard.follow(self._stop)
            if verdict is Verdict.WRONG and not self._quiet(shard):
                return
            match verdict:
                case Verdict.STOPPED:
                    return
                case Verdict.RIGHT:
                    self._record(shard.source.name, shard.accept())
                    with self._work:
                        self._fetched.add(shard.source.name)
                        self._active.remove(shard)
                        self._open_more()
                    return
                case Verdict.WRONG if attempt < self._policy.hash_retries:
                    self._tell(f"{shard.source.name} arrived with a wrong SHA-256 and is fetched again")
                    shard.discard()
                    with self._work:
                        self._work.notify_all()
                case Verdict.WRONG:
                    shard.remove_part()
        raise IntegrityError(
            f"{shard.source.name} does not have the SHA-256 that the hub lists",
            code="hash-mismatch",
            cause="it was fetched twice, and was wrong both times",
            hint="try without a proxy or mirror (unset HF_ENDPOINT HTTPS_PROXY), or test this machine's memory",
        )

    def _record(self, name: str, stat: os.stat_result) -> None:
        with self._work:
            self._manifest = with_verified(self._manifest, name, stat)
            write_manifest(self._folder, self._manifest)

    def _syncer(self) -> None:
        """Keep the disk at most ``sync_bytes`` or ``sync_seconds`` behind, for the case that the power goes."""
        last = time.monotonic()
        while not self._stop.wait(0.5):
            with self._work:
                shards = list(self._active)
            due = time.monotonic() - last >= self._policy.sync_seconds
            for shard in shards:
                shard.sync(at_least_bytes=1 if due else self._policy.sync_bytes)
            if due:
                last = time.monotonic()


class _Progress(Exception):  # noqa: N818 -- how far an attempt got before the line was lost; caught one call up
    def __init__(self, at: int, lost: Lost) -> None:
        super().__init__(lost.reason)
        self.at = at
        self.lost = lost
