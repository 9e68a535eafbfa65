"""Machine files: the shipped ones, a user's own, and what a bad one is told."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from kimigguf.errors import UsageError
from kimigguf.hardware.machines import load_file, load_machine, machine_names, save, to_data, to_toml
from kimigguf.hardware.snapshot import (
    Accelerator,
    Backend,
    Cpu,
    Disk,
    DiskKind,
    Driver,
    Machine,
    MemoryKind,
    NumaNode,
    PcieLink,
    Ram,
    Unknown,
)
from kimigguf.profile_files import shipped
from kimigguf.units import GIB, TIB

SHIPPED = sorted(path.stem for path in (shipped() / "machines").glob("*.toml"))
NAMED = {
    "8x-b200": (2 * TIB, 8 * 180 * GIB),
    "8x-h200": (2 * TIB, 8 * 143771 * 2**20),
    "epyc-768g-rtx-pro-6000": (768 * GIB, 96 * GIB),
    "epyc-1536g-cpu": (1536 * GIB, 0),
    "epyc-2t-2x-rtx-6000-ada": (2 * TIB, 2 * 49140 * 2**20),
    "xeon-768g-2x-rtx-3090": (768 * GIB, 48 * GIB),
    "gb300-station": (492 * GIB, 256703 * 2**20),
    "mac-studio-512g": (512 * GIB, 0),
    "threadripper-256g-rtx-4090": (256 * GIB, 24564 * 2**20),
    "laptop-64g": (64 * GIB, 0),
}
NO_USER: Mapping[str, str] = {}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_machine_is_whole(name: str) -> None:
    machine = load_machine(name, NO_USER)
    assert machine.name == name, "a file is called as the machine in it"
    assert machine.source.startswith(("https://", "constructed: "))
    assert machine.ram.total_bytes
    assert machine.cpu.cores
    assert machine.accelerators is not None
    assert all(card.total_bytes and card.backend and card.memory_kind and card.name for card in machine.accelerators)
    assert machine.disks
    assert all(disk.kind and disk.free_bytes is not None for disk in machine.disks)
    assert machine.ram.available_bytes is None, "a described machine is at rest"
    if machine.is_unified:
        assert {card.total_bytes for card in machine.accelerators} == {machine.ram.total_bytes}


@pytest.mark.parametrize("name", NAMED)
def test_the_named_machines_have_what_their_names_say(name: str) -> None:
    machine = load_machine(name, NO_USER)
    own = sum(a.total_bytes or 0 for a in machine.accelerators or () if a.memory_kind is MemoryKind.DISCRETE)
    assert (machine.ram.total_bytes, own) == NAMED[name]


def test_the_laptop_cannot_even_stream_the_smallest_quant() -> None:
    (disk,) = load_machine("laptop-64g", NO_USER).disks or ()
    assert disk.free_bytes is not None
    assert disk.free_bytes < 594_040_923_616


FULL = Machine(
    name="full",
    source="detected",
    note='with "quotes" and ünicode',
    system="Linux",
    cpu=Cpu(model="X", cores=8, isa=("avx2",), quota_cores=1.5),
    ram=Ram(total_bytes=GIB, available_bytes=GIB // 2, numa=(NumaNode(index=0, total_bytes=GIB, cpus=8),)),
    accelerators=(
        Accelerator(name="A", backend=Backend.CUDA, memory_kind=MemoryKind.DISCRETE, total_bytes=10, free_bytes=5),
        Accelerator(name="A", backend=Backend.CUDA, memory_kind=MemoryKind.DISCRETE, total_bytes=10, free_bytes=5),
        Accelerator(name="A", backend=Backend.CUDA, pcie=PcieLink(generation=5, width=16), ecc=False),
        Accelerator(),
    ),
    disks=(Disk(mount="/", kind=DiskKind.NVME, members=("a", "b"), read_only=True), Disk(mount="/x")),
    drivers=(Driver(backend=Backend.CUDA, version="1"),),
    unknown=(Unknown(what="a", reason="b"),),
    notices=("n",),
)


@pytest.mark.parametrize(
    "machine",
    [
        FULL,
        Machine(name="a", source="b"),
        Machine(name="a", source="b", accelerators=(), disks=()),
        Machine(name="a", source="b", cpu=Cpu(isa=()), accelerators=(Accelerator(),)),
    ],
)
def test_a_saved_machine_is_read_back_equal(tmp_path: Path, machine: Machine) -> None:
    save(machine, tmp_path / "m.toml")
    assert load_file(tmp_path / "m.toml") == machine
    assert load_machine(str(tmp_path / "m.toml"), NO_USER) == machine


def test_equal_cards_are_written_once() -> None:
    assert to_toml(FULL).count("[[accelerators]]") == 3
    assert "count = 2" in to_toml(FULL)


def test_json_has_every_field_and_null_for_unknown() -> None:
    data = to_data(Machine(name="a", source="b"))
    assert data["accelerators"] is None
    assert data["ram"]["total_bytes"] is None
    assert data["unknown"] == ()


def test_a_file_is_not_overwritten_unasked_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists") as caught:
        save(FULL, path)
    assert caught.value.code == "file-exists"
    assert path.read_text() == "mine"
    save(FULL, path, overwrite=True)
    assert load_file(path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["m.toml"]


def test_a_file_system_without_hard_links_gets_its_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    save(FULL, tmp_path / "m.toml")
    assert load_file(tmp_path / "m.toml") == FULL
    with pytest.raises(UsageError, match="exists"):
        save(FULL, tmp_path / "m.toml")


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.toml"
    real = Path.hardlink_to

    def late(self: Path, target: Path) -> None:
        path.write_text("another's")
        real(self, target)

    monkeypatch.setattr(Path, "hardlink_to", late)
    with pytest.raises(UsageError, match="exists"):
        save(FULL, path)
    assert path.read_text() == "another's"
    assert [p.name for p in tmp_path.iterdir()] == ["m.toml"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        save(FULL, tmp_path / "no" / "m.toml")
    assert caught.value.code == "cannot-write"


def test_a_users_own_file_comes_first_and_a_bare_file_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profiles" / "machines"
    folder.mkdir(parents=True)
    (folder / "8x-b200.toml").write_text('name = "8x-b200"\nsource = "mine"\n')
    environ = {"KIMIGGUF_PROFILES": str(tmp_path / "profiles")}
    assert load_machine("8x-b200", environ).source == "mine"
    assert set(SHIPPED) <= set(machine_names(environ))
    monkeypatch.chdir(tmp_path)
    save(FULL, Path("box"))
    assert load_machine("box", environ) == FULL


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"', "source"),
        ('name = "x"\nsource = "y"\nram = {total = "1GiB"}', "ram.total"),
        ('name = "x"\nsource = "y"\nram = {total_bytes = "900G"}', "ambiguous"),
        ('name = "x"\nsource = "y"\n[[accelerators]]\nmemory_kind = "shared"', "discrete"),
        ('name = "x"\nsource = "y"\n[[accelerators]]\ncount = 0', "count"),
        ('name = "x"\nsource = "y"\n[[accelerators]]\ntotal_bytes = 5\nfree_bytes = 6', "free_bytes"),
        ('name = "x"\nsource = "y"\nram = {total_bytes = -5}', "negative"),
        ('name = "x"\nsource = "y"\n[[disks]]\nmount = "/"\nkind = "floppy"', "nvme"),
        ("name = ", "TOML"),
        ("\udcff", "TOML"),
    ],
)
def test_a_bad_file_is_told_its_key_and_the_allowed_values(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        load_machine(str(path), NO_USER)
    assert caught.value.code == "bad-profile"
    assert str(path) in caught.value.message
    assert said in f"{caught.value.message} {caught.value.cause}"


@pytest.mark.parametrize("text", ["8x-b20", "no-such/machine.toml", "", "/", "../../etc/passwd"])
def test_an_unknown_machine_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        load_machine(text, NO_USER)


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        load_machine("8x-b20", NO_USER)
    assert "8x-b200" in (caught.value.hint or "")


def test_the_schemas_documentation_names_every_key() -> None:
    text = (shipped() / "machines" / "README.md").read_text()
    for part in (Machine, Cpu, Ram, NumaNode, Accelerator, PcieLink, Disk, Driver, Unknown):
        for field in fields(part):
            if field.name not in {"cpu", "ram", "accelerators", "disks", "drivers", "unknown"}:
                assert f"`{field.name}`" in text, f"{part.__name__}.{field.name} is not documented"
    for kind in (*Backend, *MemoryKind, *DiskKind):
        assert kind.value in text
