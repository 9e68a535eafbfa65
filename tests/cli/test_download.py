"""download, verify, list, repair, remove and import, on tiny real shards and a loopback hub."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from fakes.hub import Hub, serve
from fakes.hub_faults import Fault, Kind, always

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.events import Advance
from kimigguf.hardware.mounts import parse_mountinfo
from kimigguf.hardware.snapshot import Disk, DiskKind

REPOSITORY = "unsloth/Kimi-K3-GGUF"
PINNED = str(load_model().repository.commit)
NEWER = "f" * 40


@dataclass(slots=True, kw_only=True)
class House:
    """The command line with a hub, a models folder, and what it has printed."""

    hub: Hub
    root: Path
    models: Path
    capsys: pytest.CaptureFixture[str]
    environ: dict[str, str] = field(default_factory=dict)
    err: str = ""

    def __call__(self, *arguments: str) -> int:
        code = run([*arguments], App(show=Show(), environ=self.environ))
        out, self.err = self.capsys.readouterr()
        self.out = out
        return code

    out: str = ""

    def json(self, *arguments: str, code: int = 0) -> Any:
        assert self(*arguments, "--json") == code, self.err
        return json.loads(self.out)

    def error(self, *arguments: str, code: int) -> Any:
        assert self(*arguments, "--json") == code, (self.out, self.err)
        return json.loads(self.err.splitlines()[-1])

    @property
    def folder(self) -> Path:
        return self.models / "unsloth--Kimi-K3-GGUF" / "UD-IQ1_M" / PINNED[:12]


@pytest.fixture
def house(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    root = tmp_path / "root"
    shutil.copytree(tiny("UD-IQ1_M"), root / REPOSITORY / "UD-IQ1_M")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve(root, commit=PINNED) as hub:
        house = House(hub=hub, root=root, models=tmp_path / "models", capsys=capsys)
        house.environ = {
            "HF_ENDPOINT": hub.url,
            "KIMIGGUF_MODELS": str(house.models),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HOME": str(tmp_path / "no-login"),
        }
        yield house


def names(house: House) -> list[str]:
    return sorted(path.name for path in (house.root / REPOSITORY / "UD-IQ1_M").iterdir())


def test_download_fetches_the_pinned_commit_whole_and_a_second_run_asks_nobody(house: House) -> None:
    answer = house.json("download", "iq1_m")
    assert answer["schema"] == "kimigguf.download/1"
    assert (answer["commit"], answer["state"]) == (PINNED, "whole")
    assert answer["folder"] == str(house.folder)
    assert Path(answer["first"]).name == names(house)[0]
    for name in names(house):
        assert (house.folder / name).read_bytes() == (house.root / REPOSITORY / "UD-IQ1_M" / name).read_bytes()
    assert "Kimi K3 License" in house.err
    before = len(house.hub.requests)
    house.json("download", "UD-IQ1_M")
    assert len(house.hub.requests) == before
    assert "Kimi K3 License" not in house.err


def test_what_people_read_names_the_next_step(house: House) -> None:
    assert house("download", "UD-IQ1_M") == 0
    assert "whole and verified" in house.out
    assert "kimigguf serve UD-IQ1_M" in house.out
    assert house("list") == 0
    assert "whole" in house.out
    assert house("verify", "UD-IQ1_M") == 0
    assert house.out.count("ok ") == len(names(house))


def test_the_headers_are_checked_before_the_first_weight(house: House, tiny: Callable[[str], Path]) -> None:
    folder = house.root / REPOSITORY / "UD-IQ1_M"
    last = names(house)[-1]
    shutil.copy(tiny("UD-IQ1_S") / last.replace("IQ1_M", "IQ1_S"), folder / last)
    error = house.error("download", "UD-IQ1_M", code=5)
    assert last in error["message"] + str(error["cause"])
    assert not list(house.models.rglob("*.part"))
    assert not list(house.models.rglob("*.gguf"))


def test_a_shard_that_is_missing_on_the_hub_is_named(house: House) -> None:
    missing = names(house)[1]
    (house.root / REPOSITORY / "UD-IQ1_M" / missing).unlink()
    error = house.error("download", "UD-IQ1_M", code=5)
    assert missing in error["message"] + error["cause"]


def test_dry_run_shows_the_whole_plan_and_writes_nothing(house: House) -> None:
    plan = house.json("download", "UD-IQ1_M", "--dry-run")
    assert plan["schema"] == "kimigguf.download-plan/1"
    assert [file["name"] for file in plan["files"]] == names(house)
    assert plan["remaining_bytes"] == plan["size_bytes"] == sum(file["size_bytes"] for file in plan["files"])
    assert plan["fits"] is True
    assert not house.models.exists()
    assert house("download", "UD-IQ1_M", "--dry-run") == 0
    assert "fits" in house.out
    house("download", "UD-IQ1_M")
    assert house.json("download", "UD-IQ1_M", "--dry-run")["remaining_bytes"] == 0


def test_dry_run_says_no_when_the_disk_is_too_small(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimigguf.download.disk.free_bytes", lambda _folder: 1000)
    assert house.json("download", "UD-IQ1_M", "--dry-run", code=1)["fits"] is False
    error = house.error("download", "UD-IQ1_M", code=3)
    assert error["code"] == "disk-full"
    assert not house.hub.gets()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "word"),
    [
        (("download", "UD-IQ1_X"), 2, "unknown-quant", "UD-IQ1_"),
        (("download", "UD-Q1_0"), 3, "unsupported-quant", "--force"),
        (("download", "UD-Q1_0", "--dry-run"), 3, "unsupported-quant", "fork"),
        (("download", "UD-Q2_K_XL"), 2, "quant-not-there", "UD-IQ1_M"),
        (("download", "UD-IQ1_M", "--limit-rate", "50M"), 2, "ambiguous-size", "50MB"),
        (("download", "UD-IQ1_M", "--revision", "nope"), 2, "unknown-revision", "commits"),
        (("verify", "UD-IQ1_M"), 5, "not-downloaded", "kimigguf download UD-IQ1_M"),
        (("verify", "/does/not/exist"), 2, "no-such-file", "no file or folder"),
        (("remove", "--yes", "UD-IQ1_M"), 5, "not-downloaded", "kimigguf list"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(
    house: House, arguments: tuple[str, ...], exit_code: int, code: str, word: str
) -> None:
    error = house.error(*arguments, code=exit_code)
    assert error["code"] == code
    assert word in f"{error['message']} {error['cause']} {error['hint']}"


def test_no_hub_says_what_works_without_one(house: House) -> None:
    house.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    error = house.error("download", "UD-IQ1_M", code=4)
    assert error["code"] == "hub-unreachable"
    assert "kimigguf list" in error["hint"]


def test_offline_uses_what_is_whole_and_asks_nobody(house: House) -> None:
    house.environ["HF_HUB_OFFLINE"] = "1"
    assert house.error("download", "UD-IQ1_M", code=4)["code"] == "offline"
    del house.environ["HF_HUB_OFFLINE"]
    house.json("download", "UD-IQ1_M")
    house.environ["HF_HUB_OFFLINE"] = "1"
    before = len(house.hub.requests)
    assert house.json("download", "UD-IQ1_M")["state"] == "whole"
    (house.folder / names(house)[0]).unlink()
    assert house.error("download", "UD-IQ1_M", code=4)["code"] == "offline"
    assert len(house.hub.requests) == before


def test_the_token_reaches_the_hub_alone(house: House) -> None:
    secret = "hf_a_secret_of_this_test"
    house.hub.token = secret
    error = house.error("download", "UD-IQ1_M", code=4)
    assert error["code"] == "gated"
    house.environ["HF_TOKEN"] = secret
    assert house("download", "UD-IQ1_M", "--json") == 0
    assert secret not in house.out + house.err
    assert {request.authorization for request in house.hub.requests if request.host == "cdn"} == {None}
    for place in (house.models, Path(house.environ["XDG_CACHE_HOME"])):
        for path in place.rglob("*"):
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    house.hub.faults = always(Fault(kind=Kind.GARBAGE))
    (house.folder / names(house)[1]).unlink()
    assert house("download", "UD-IQ1_M") == 5
    assert secret not in house.out + house.err


def test_ctrl_c_exits_with_130_and_leaves_nothing_that_looks_whole(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimigguf.download.transfer import Transfer

    def interrupted(_self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Transfer, "_report", interrupted)
    house.hub.bytes_per_second = 1_000_000
    assert house("download", "UD-IQ1_M") == 130
    monkeypatch.undo()
    house.hub.bytes_per_second = None
    for path in house.models.rglob("*.gguf"):
        assert path.read_bytes() == (house.root / REPOSITORY / "UD-IQ1_M" / path.name).read_bytes()
    assert house.json("list")["sets"][0]["state"] == "partial"
    assert house.json("download", "UD-IQ1_M")["state"] == "whole"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_real_stop_ends_a_real_download_at_once_and_loses_nothing(house: House, signal_number: int) -> None:
    house.hub.bytes_per_second = 300_000
    command = [sys.executable, "-m", "kimigguf", "download", "UD-IQ1_M", "--json"]
    process = subprocess.Popen(
        command, env={**os.environ, **house.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while sum(house.hub.sent_bytes.values()) < 1_500_000 and time.monotonic() < until:
        time.sleep(0.02)
    asked = time.monotonic()
    process.send_signal(signal_number)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 10
    assert (process.returncode, out) == (-9 if signal_number == signal.SIGKILL else 130, ""), err
    assert "Traceback" not in err
    house.hub.bytes_per_second = None
    house.hub.sent_bytes.clear()
    assert house.json("list")["sets"][0]["state"] == "partial"
    assert house.json("download", "UD-IQ1_M")["state"] == "whole"


def test_a_log_gets_one_line_in_ten_seconds_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Show().progress() as listen:
        for _ in range(61):
            done = int(now - 100) * 10**9
            listen(Advance(activity="fetch", item="total", done_bytes=done, total_bytes=120 * 10**9))
            listen(Advance(activity="fetch", item="x.gguf", done_bytes=done // 2, total_bytes=40 * 10**9))
            now += 1
        listen(Advance(activity="fetch", item="x.gguf", done_bytes=40 * 10**9, total_bytes=40 * 10**9))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert lines[2] == "fetch total: 30.0 GB of 120.0 GB, 1.0 GB/s, 1 min 30 s left"
    assert lines[-1] == "fetch x.gguf: 40.0 GB of 40.0 GB"


def test_verify_names_the_bad_shard_and_repair_mends_it(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    bad, gone = names(house)[1], names(house)[2]
    path = house.folder / bad
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (house.folder / gone).unlink()
    answer = house.json("verify", "UD-IQ1_M", code=5)
    verdicts = {file["name"]: file["verdict"] for file in answer["files"]}
    assert (verdicts[bad], verdicts[gone]) == ("damaged", "missing")
    assert list(verdicts.values()).count("ok") == len(verdicts) - 2
    assert answer["good"] is False
    assert house("verify", str(path)) == 5
    assert f"damaged    {bad}" in house.out
    house.hub.requests.clear()
    answer = house.json("repair", "UD-IQ1_M")
    assert answer["state"] == "whole"
    assert [file["name"] for file in answer["repaired"]] == [bad, gone]
    assert {Path(str(request.file)).name for request in house.hub.gets()} == {bad, gone}
    assert house.json("verify", "UD-IQ1_M")["good"] is True
    assert house.json("verify", "UD-IQ1_M", "--quick")["hashed_bytes"] == 0


def test_a_quick_look_finds_a_header_that_is_none_and_an_end_that_is_cut(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    path = house.folder / names(house)[1]
    stat = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"PK")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.truncate(house.folder / names(house)[2], 1000)
    answer = house.json("verify", "--quick", "UD-IQ1_M", code=5)
    verdicts = [file["verdict"] for file in answer["files"][:4]]
    assert verdicts == ["ok", "damaged", "wrong-size", "ok"]


def test_verify_of_a_foreign_set_holds_it_against_itself(house: House, tiny: Callable[[str], Path]) -> None:
    answer = house.json("verify", str(sorted(tiny("UD-IQ1_S").iterdir())[1]), code=1)
    assert {file["verdict"] for file in answer["files"]} == {"unknown"}
    assert all(len(file["sha256"]) == 64 for file in answer["files"])


def test_list_tells_whole_partial_and_foreign_apart_and_where_the_hub_has_moved(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    foreign = house.models / "mine"
    foreign.mkdir()
    (foreign / "other.gguf").write_bytes(b"GGUF")
    house.hub.add_commit(NEWER, house.root)
    first, second = house.json("list", "--newest")["sets"]
    assert (first["quant"], first["state"], first["commit"], first["newest_commit"]) == (
        "UD-IQ1_M",
        "whole",
        PINNED,
        NEWER,
    )
    assert (second["state"], second["newest_commit"]) == ("foreign", None)
    (house.folder / names(house)[1]).unlink()
    assert house.json("list")["sets"][0]["state"] == "partial"
    assert house("list", "--newest") == 0
    assert "ffffffffffff" in house.out
    assert "partial" in house.out


def test_a_newer_revision_shares_what_is_unchanged_and_replaces_the_old_one_when_verified(
    house: House, tmp_path: Path
) -> None:
    house.json("download", "UD-IQ1_M")
    newer = tmp_path / "newer"
    shutil.copytree(house.root, newer)
    changed = names(house)[1]
    path = newer / REPOSITORY / "UD-IQ1_M" / changed
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    house.hub.add_commit(NEWER, newer)
    house.hub.requests.clear()
    answer = house.json("download", "UD-IQ1_M", "--revision", "main")
    assert (answer["commit"], answer["state"]) == (NEWER, "whole")
    weights = {Path(str(request.file)).name for request in house.hub.gets() if (request.range or (0, 0))[0] > 0}
    assert weights <= {changed}
    assert not house.folder.exists()
    house.json("download", "UD-IQ1_M", "--keep-previous")
    assert {found["commit"] for found in house.json("list")["sets"]} == {PINNED, NEWER}


def test_a_re_upload_with_another_shard_count_never_mixes_with_the_old_one(house: House, tmp_path: Path) -> None:
    house.json("download", "UD-IQ1_M")
    newer = tmp_path / "newer"
    tiny_k3.write(newer / REPOSITORY / "UD-IQ1_M", tensors_per_shard=70)
    house.hub.add_commit(NEWER, newer)
    answer = house.json("download", "UD-IQ1_M", "--revision", "main")
    assert (answer["commit"], answer["state"]) == (NEWER, "whole")
    assert len(answer["files"]) != len(names(house))
    assert {path.name for path in Path(answer["folder"]).glob("*.gguf")} == {
        path.name for path in (newer / REPOSITORY / "UD-IQ1_M").iterdir()
    }


def test_a_newer_revision_that_fails_leaves_the_old_one_whole(house: House, tmp_path: Path) -> None:
    house.json("download", "UD-IQ1_M")
    newer = tmp_path / "newer"
    shutil.copytree(house.root, newer)
    path = newer / REPOSITORY / "UD-IQ1_M" / names(house)[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    house.hub.add_commit(NEWER, newer)
    house.hub.faults = always(Fault(kind=Kind.GARBAGE), file=names(house)[1])
    house.error("download", "UD-IQ1_M", "--revision", "main", code=5)
    states = {found["commit"]: found["state"] for found in house.json("list")["sets"]}
    assert states[PINNED] == "whole"


def test_the_vision_projector_lies_in_a_folder_of_its_own(house: House) -> None:
    error = house.error("download", "UD-IQ1_M", "--mmproj", "F16", code=2)
    assert error["code"] == "no-projector"
    for kind in ("BF16", "F16"):
        (house.root / REPOSITORY / f"mmproj-{kind}.gguf").write_bytes(kind.encode() * 1000)
    answer = house.json("download", "UD-IQ1_M", "--mmproj", "F16")
    assert Path(answer["mmproj"]).read_bytes() == b"F16" * 1000
    assert Path(answer["mmproj"]).parent != Path(answer["folder"])
    assert house.error("download", "UD-IQ1_M", "--mmproj", "F32", code=2)["hint"].count("mmproj-") == 2
    before = len(house.hub.requests)
    house.json("download", "UD-IQ1_M", "--mmproj", "F16")
    assert len(house.hub.requests) == before
    assert {found["quant"] for found in house.json("list")["sets"]} == {"UD-IQ1_M", "mmproj-F16"}


def test_remove_deletes_ours_shows_what_goes_and_asks(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    (house.folder / "notes.txt").write_text("mine")
    (house.folder / f"{names(house)[1]}.copy").write_bytes(b"an import that was killed")
    assert house.error("remove", "UD-IQ1_M", code=2)["code"] == "not-confirmed"
    assert (house.folder / names(house)[0]).exists()
    assert house("remove", "--yes", "UD-IQ1_M") == 0
    assert str(house.folder) in house.err
    assert "notes.txt is not ours" in house.err
    assert [path.name for path in house.folder.iterdir()] == ["notes.txt"]


def test_remove_by_folder_takes_that_revision_only_and_never_what_is_foreign(
    house: House, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    house.json("download", "UD-IQ1_M")
    house.hub.add_commit(NEWER, house.root)
    house.json("download", "UD-IQ1_M", "--revision", "main", "--keep-previous")
    assert house.json("remove", "--yes", str(house.folder))["removed"][0]["folder"] == str(house.folder)
    assert [found["commit"] for found in house.json("list")["sets"]] == [NEWER]
    theirs = tmp_path / "theirs"
    shutil.copytree(tiny("UD-IQ1_S"), theirs)
    assert house.error("remove", "--yes", str(theirs), code=2)["code"] == "foreign-set"
    assert list(theirs.iterdir())


def test_import_takes_shards_from_elsewhere_and_download_fetches_only_the_rest(house: House, tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    shutil.copytree(house.root / REPOSITORY / "UD-IQ1_M", place)
    (place / names(house)[2]).unlink()
    answer = house.json("import", str(place), code=1)
    assert answer["state"] == "partial"
    assert [file["how"] is not None for file in answer["imported"]].count(False) == 1
    house.hub.requests.clear()
    assert house.json("download", "UD-IQ1_M")["state"] == "whole"
    assert len(list(place.iterdir())) == len(names(house)) - 1
    assert house.error("import", str(tmp_path / "cache"), code=2)["code"] == "which-quant"


def unsettle(house: House, how: str) -> None:
    """Make a verified set one that has to be hashed again."""
    match how:
        case "touched":
            for name in names(house):
                os.utime(house.folder / name, ns=(1, 1))
        case "no manifest":
            (house.folder / "kimigguf.json").unlink()
        case "broken manifest":
            (house.folder / "kimigguf.json").write_text("{")
            error = house.error("verify", str(house.folder), code=5)
            assert error["code"] == "bad-manifest"
            remove, ours = error["hint"].partition(": ")[2].split(" && ")
            assert ours == f"kimigguf import {house.folder}"
            subprocess.run(remove.split(), check=True)


def farm(house: House, tmp_path: Path) -> Path:
    """A folder of symlinks to the shards of the set."""
    place = tmp_path / "farm"
    place.mkdir()
    for name in names(house):
        (place / name).symlink_to(house.folder / name)
    return place


def assert_every_shard_survived(house: House) -> None:
    assert {path.name for path in house.folder.glob("*.gguf*")} == set(names(house))
    for name in names(house):
        assert not (house.folder / name).is_symlink()
        assert (house.folder / name).read_bytes() == (house.root / REPOSITORY / "UD-IQ1_M" / name).read_bytes()


@pytest.mark.parametrize("how", ["touched", "no manifest", "broken manifest"])
@pytest.mark.parametrize("place", ["its folder", "a shard", "the models folder", "a symlink farm", "a linked folder"])
def test_import_of_the_set_itself_by_any_name_destroys_nothing(
    house: House, tmp_path: Path, how: str, place: str
) -> None:
    house.json("download", "UD-IQ1_M")
    inodes = [(house.folder / name).stat().st_ino for name in names(house)]
    unsettle(house, how)
    (tmp_path / "linked").symlink_to(house.folder)
    path = {
        "its folder": house.folder,
        "a shard": house.folder / names(house)[0],
        "the models folder": house.models,
        "a symlink farm": farm(house, tmp_path),
        "a linked folder": tmp_path / "linked",
    }[place]
    answer = house.json("import", str(path))
    assert answer["state"] == "whole"
    assert {file["how"] for file in answer["imported"]} == {"in place"}
    assert_every_shard_survived(house)
    assert [(house.folder / name).stat().st_ino for name in names(house)] == inodes
    assert house.json("verify", "UD-IQ1_M")["good"] is True


def test_import_of_the_folder_above_passes_by_a_bad_copy_that_is_found_first(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    unsettle(house, "no manifest")
    first = house.models / "a-copy"
    shutil.copytree(house.folder, first, ignore=shutil.ignore_patterns(".kimigguf"))
    for path in first.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert house.json("import", str(house.models))["state"] == "whole"
    assert_every_shard_survived(house)
    (house.folder / names(house)[1]).write_bytes((first / names(house)[1]).read_bytes())
    answer = house.json("import", str(house.models), code=1)
    assert "SHA-256" in answer["imported"][1]["reason"]
    assert (house.folder / names(house)[1]).exists()


def test_import_makes_real_files_of_a_set_that_is_links_to_elsewhere(house: House, tmp_path: Path) -> None:
    house.json("download", "UD-IQ1_M")
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name in names(house):
        (house.folder / name).rename(place / name)
        (house.folder / name).symlink_to(place / name)
    unsettle(house, "no manifest")
    assert house.json("import", str(house.folder))["state"] == "whole"
    assert_every_shard_survived(house)
    assert len(list(place.iterdir())) == len(names(house))


def test_repair_never_writes_to_the_file_that_a_link_in_the_set_leads_to(house: House, tmp_path: Path) -> None:
    house.json("download", "UD-IQ1_M")
    theirs, ours = tmp_path / "theirs.gguf", house.folder / names(house)[1]
    theirs.write_bytes(bytes(ours.stat().st_size))
    ours.unlink()
    ours.symlink_to(theirs)
    assert house.json("repair", "UD-IQ1_M")["state"] == "whole"
    assert_every_shard_survived(house)
    assert not any(theirs.read_bytes())


@pytest.fixture
def unsaid(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Nobody has named a models folder, and the machine has an NVMe drive with room."""
    drive = tmp_path / "nvme"
    drive.mkdir()
    del house.environ["KIMIGGUF_MODELS"]
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    one = Disk(mount=str(drive), kind=DiskKind.NVME, free_bytes=10**13)
    monkeypatch.setattr("kimigguf.download.disk.read_all", lambda: (one,))
    monkeypatch.setattr("kimigguf.download.place._SYSTEM", frozenset())  # these tests run under /tmp
    house.models = drive / "kimigguf" / "models"
    return house


def test_without_a_word_models_go_to_the_nvme_drive_and_every_command_finds_them_there(
    unsaid: House, tmp_path: Path
) -> None:
    assert unsaid.json("download", "UD-IQ1_M", "--dry-run")["folder"] == str(unsaid.folder)
    assert not unsaid.models.exists()
    (unsaid.root / REPOSITORY / "mmproj-F16.gguf").write_bytes(b"F16")
    answer = unsaid.json("download", "UD-IQ1_M", "--mmproj", "F16")
    assert answer["folder"] == str(unsaid.folder)
    assert Path(answer["mmproj"]).is_relative_to(unsaid.models)
    assert "models go to" in unsaid.err
    assert unsaid.json("list")["models_dir"] == str(unsaid.models)
    assert unsaid.json("verify", "UD-IQ1_M")["good"] is True
    assert unsaid.json("download", "UD-IQ1_M")["folder"] == str(unsaid.folder)
    assert "models go to" not in unsaid.err
    assert not (tmp_path / "data" / "kimigguf" / "models").exists()


def test_import_links_on_the_data_folders_own_disk_rather_than_copies_to_a_faster_one(
    unsaid: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = unsaid.root / REPOSITORY / "UD-IQ1_M"
    monkeypatch.setattr("kimigguf.download.bring.needs_room", lambda _source, _folder: True)
    assert unsaid.json("import", str(place))["folder"] == str(unsaid.folder)
    shutil.rmtree(unsaid.models)
    (tmp_path / "data" / "kimigguf" / "chosen.toml").unlink()
    monkeypatch.setattr("kimigguf.download.bring.needs_room", lambda _source, _folder: False)
    assert unsaid.json("import", str(place))["folder"].startswith(str(tmp_path / "data"))
    assert unsaid.json("download", "UD-IQ1_M")["folder"].startswith(str(tmp_path / "data"))


def test_a_network_mount_is_filled_if_the_configuration_names_it_and_not_otherwise(
    unsaid: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = parse_mountinfo(f"22 1 0:1 / / rw - ext4 /dev/vda rw\n30 22 0:40 / {tmp_path} rw - nfs4 server:/home rw\n")
    monkeypatch.setattr("kimigguf.download.disk.read_all", lambda: ())
    monkeypatch.setattr("kimigguf.download.disk.read_mounts", lambda: mounts)
    assert unsaid.error("download", "UD-IQ1_M", code=3)["code"] == "network-mount"
    (tmp_path / "config" / "kimigguf").mkdir(parents=True)
    (tmp_path / "config" / "kimigguf" / "config.toml").write_text(f'models_dir = "{unsaid.models}"')
    assert unsaid.json("download", "UD-IQ1_M")["folder"] == str(unsaid.folder)


def test_an_old_revision_that_the_new_one_links_into_is_not_removed(house: House) -> None:
    house.json("download", "UD-IQ1_M")
    house.hub.add_commit(NEWER, house.root)
    newer = house.folder.with_name(NEWER[:12])
    newer.mkdir()
    for name in names(house):
        (newer / name).symlink_to(house.folder / name)
    assert house.json("download", "UD-IQ1_M", "--revision", "main")["state"] == "whole"
    assert "links into it" in house.err
    assert_every_shard_survived(house)
    assert house.json("verify", str(newer))["good"] is True
