"""The files that are to be registered. Types only."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from kimigguf.catalogue.quants import Quant


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the set. ``sha256`` is lower-case hex, None where nobody has recorded it yet.

    ``verified``: the bytes were found to have that hash, and the file has not been touched since.
    """

    path: Path
    size_bytes: int
    sha256: str | None = None
    verified: bool = False

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A set of files, or a quant of the catalogue that is not on this machine: ``files`` is empty then.

    ``folder`` is where they lie, or the models folder below which they would. ``unread_tensors`` counts tensors of
    types that mainline llama.cpp does not know. ``projectors`` are the names of ``mmproj`` files beside the shards,
    ``links`` of files that are symbolic links, ``unreadable`` of those that this user may not read. ``template`` is
    the chat template in the first shard, None where it has none or was not read. ``named`` is what the user called it,
    ``models_dir`` the models folder that was named for it.
    """

    label: str
    quant: Quant | None
    architecture: str | None
    size_bytes: int
    folder: Path
    files: tuple[SourceFile, ...] = ()
    unread_tensors: int = 0
    projectors: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    template: str | None = None
    named: str | None = None
    models_dir: Path | None = None

    @property
    def pasted(self) -> str:
        """The set in a command to be pasted."""
        place = () if self.models_dir is None else ("--models-dir", str(self.models_dir))
        return shlex.join((self.named or self.label, *place))

    @property
    def pasted_folder(self) -> str:
        """Its folder in a command to be pasted."""
        return shlex.quote(str(self.folder))
