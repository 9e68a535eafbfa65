"""Machines as text files: unpacks a capture from tests/data/hardware into a folder and makes a Host of it.

A capture begins with ``# provenance: real`` or ``# provenance: constructed`` and says where it is from. Then, each
introduced by a line: ``@@ path`` (a file, its text follows), ``@@hex path`` (bytes in hex), ``@@link path -> target``,
``@@size mount total free`` (what statvfs says; ``hang`` for a mount that never answers), ``@@direct mount
yes|no`` (whether O_DIRECT works), ``@@quota mount bytes|none`` (what quotas leave), ``@@env NAME=value``,
``@@run argv`` (a command, its output follows), ``@@system darwin``.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kimigguf.hardware.host import CommandError, FileSystemSize, Host

DATA = Path(__file__).parents[1] / "data" / "hardware"
HANG = threading.Event()
"""Never set: what a hung probe waits for."""


@dataclass(slots=True)
class _Unpacked:
    root: Path
    system: str = "linux"
    environ: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    direct: dict[str, bool] = field(default_factory=dict)
    rooms: dict[str, int | None] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)

    def add(self, header: str, body: str) -> None:
        kind, _, rest = header.partition(" ")
        path = self.root / rest.partition(" -> ")[0].lstrip("/")
        match kind:
            case "@@":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(body)
            case "@@hex":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes.fromhex(body))
            case "@@link":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(rest.partition(" -> ")[2])
            case "@@size":
                mount, *numbers = rest.split(" ")
                self.sizes[mount] = None if numbers == ["hang"] else (int(numbers[0]), int(numbers[1]))
            case "@@direct":
                mount, word = rest.split(" ")
                self.direct[mount] = {"yes": True, "no": False}[word]
            case "@@quota":
                mount, word = rest.split(" ")
                self.rooms[mount] = None if word == "none" else int(word)
            case "@@env":
                name, _, value = rest.partition("=")
                self.environ[name] = value
            case "@@run":
                self.commands[rest] = body
            case "@@system":
                self.system = rest
            case _:
                raise ValueError(header)

    def run(self, argv: Sequence[str]) -> str:
        try:
            return self.commands[" ".join(argv)]
        except KeyError:
            raise CommandError(f"there is no command {argv[0]}") from None

    def direct_io_of(self, mount: str) -> bool:
        try:
            return self.direct[mount]
        except KeyError:
            raise OSError(13, "no folder there can be written, and no file near the top be read") from None

    def quota_room(self, mount: str) -> int | None:
        try:
            return self.rooms[mount]
        except KeyError:
            raise OSError(38, "Function not implemented") from None

    def size_of(self, mount: str) -> FileSystemSize:
        if mount not in self.sizes:
            raise OSError(2, "No such file or directory")
        size = self.sizes[mount]
        if size is None:
            HANG.wait()
            raise OSError(5, "Input/output error")
        return FileSystemSize(total_bytes=size[0], free_bytes=size[1])


def provenance(text: str) -> str:
    """``real`` or ``constructed``.

    Raises:
        ValueError: The capture does not say.
    """
    first = text.partition("\n")[0]
    word = first.removeprefix("# provenance: ").split(",")[0].strip()
    if word not in {"real", "constructed"}:
        raise ValueError(f"a capture says whether it is real or constructed, not {first!r}")
    return word


def unpack(text: str, root: Path) -> Host:
    """A Host of a capture's text."""
    provenance(text)
    unpacked = _Unpacked(root=root)
    header, body = "", list[str]()
    for line in [*text.splitlines(), "@@end"]:
        if line.startswith("@@"):
            if header:
                unpacked.add(header, "\n".join(body) + "\n")
            header, body = line, []
        else:
            body.append(line)
    return Host(
        root=root,
        system=unpacked.system,
        environ=unpacked.environ,
        run=unpacked.run,
        size_of=unpacked.size_of,
        direct_io_of=unpacked.direct_io_of,
        quota_room=unpacked.quota_room,
    )


def load(name: str, root: Path) -> Host:
    """A Host of the capture ``name`` in tests/data/hardware."""
    return unpack((DATA / f"{name}.capture").read_text(), root)


Loader = Callable[[str], Host]
