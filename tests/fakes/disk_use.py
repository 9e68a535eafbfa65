"""What folders really take of the disk, by the blocks of their files, watched while something runs."""

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self


class DiskUse:
    """Blocks of the files below some folders, less what they were at first. A file of several names counts once."""

    def __init__(self, *folders: Path, every_seconds: float = 0.002) -> None:
        self._folders = folders
        self._every = every_seconds
        self._before = 0
        self._before = self.now_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-use")
        self._lock = threading.Lock()
        self.peak_bytes = 0

    def _files(self) -> Iterable[tuple[int, int]]:
        for folder in self._folders:
            for path in [folder, *folder.rglob("*")]:
                try:
                    found = path.stat()
                except OSError:
                    continue  # gone meanwhile
                if path.is_file():
                    yield found.st_ino, found.st_blocks * 512

    def now_bytes(self) -> int:
        """What is taken on top now."""
        return sum(dict(self._files()).values()) - self._before

    def look(self) -> None:
        """Take this moment into the peak."""
        taken = self.now_bytes()
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, taken)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.look()
