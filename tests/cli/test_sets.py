"""What verify, repair and remove say about a set: every hint can be pasted, and none is about another set."""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import serve

from kimigguf.catalogue.profiles import load_model
from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show

REPOSITORY = "unsloth/Kimi-K3-GGUF"


@dataclass(slots=True, kw_only=True)
class Desk:
    """The command line in a folder of its own, and what it has printed."""

    capsys: pytest.CaptureFixture[str]
    environ: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = run([*arguments], App(show=Show(), environ=self.environ))
        out, err = self.capsys.readouterr()
        return code, out, err

    def error(self, *arguments: str, code: int) -> dict[str, Any]:
        found, out, err = self(*arguments, "--json")
        assert found == code, (out, err)
        assert out == ""
        record: dict[str, Any] = json.loads(err.splitlines()[-1])
        return record


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Desk(capsys=capsys, environ={"KIMIGGUF_MODELS": str(tmp_path / "none"), "HF_HOME": str(tmp_path / "home")})


@pytest.fixture
def fetched(desk: Desk, tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[Path]:
    """UD-IQ1_M, downloaded into a models folder with a blank in its name; the folder of the set."""
    root = tmp_path / "root"
    shutil.copytree(tiny("UD-IQ1_M"), root / REPOSITORY / "UD-IQ1_M")
    commit = str(load_model().repository.commit)
    with serve(root, commit=commit) as hub:
        desk.environ |= {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        code, _, err = desk("download", "UD-IQ1_M", "--models-dir", "my models", "--quiet")
        assert code == 0, err
        yield tmp_path / "my models" / "unsloth--Kimi-K3-GGUF" / "UD-IQ1_M" / commit[:12]


# -- removing ----------------------------------------------------------------------------------------------------------


def test_the_hint_about_a_foreign_set_deletes_its_files_and_nothing_else(
    desk: Desk, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """`rm -r sp ace` pasted would delete `sp` and `ace`; `rm -r` of the folder would take the other set along."""
    place = tmp_path / "sp ace"
    shutil.copytree(tiny("UD-IQ1_M"), place)
    error = desk.error("remove", "--yes", "sp ace", code=2)
    assert error["code"] == "foreign-set"
    assert "sp ace" in error["message"]
    mine = sorted(map(str, place.iterdir()))
    assert shlex.split(error["hint"]) == ["rm", "--", *mine]
    shutil.copytree(tiny("UD-IQ2_XXS"), place, dirs_exist_ok=True)
    (place / "notes.txt").write_text("mine")
    assert shlex.split(desk.error("remove", "--yes", mine[0], code=2)["hint"]) == ["rm", "--", *mine]


def test_a_foreign_set_is_refused_at_once_and_not_after_a_yes(desk: Desk, tiny: Callable[[str], Path]) -> None:
    shutil.copytree(tiny("UD-IQ1_M"), "tiny")
    error = desk.error("remove", "tiny", code=2)
    assert error["code"] == "foreign-set"
    assert "--yes" not in error["hint"]
    assert len([*Path("tiny").iterdir()]) == len([*tiny("UD-IQ1_M").iterdir()])


def test_what_is_not_here_is_not_offered_for_download_by_remove(desk: Desk) -> None:
    assert desk.error("remove", "--yes", "UD-IQ1_M", code=5)["hint"] == "kimigguf list"
    error = desk.error("remove", "UD-IQ1_M", "--models-dir", "a b", code=5)
    assert (error["code"], error["hint"]) == ("not-downloaded", "kimigguf list --models-dir 'a b'")


def test_the_command_that_confirms_means_the_same_set(desk: Desk, fetched: Path) -> None:
    error = desk.error("remove", "UD-IQ1_M", "--models-dir", "my models", code=2)
    assert (error["code"], error["hint"]) == (
        "not-confirmed",
        "kimigguf remove --yes --models-dir 'my models' UD-IQ1_M",
    )
    code, _, err = desk(*shlex.split(error["hint"])[1:])
    assert code == 0, err
    assert not fetched.exists()


# -- paths and options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "repair", "remove"])
@pytest.mark.parametrize("text", ["./nope", "nope/", "nope.gguf", "/no/such/Kimi-K3-00001-of-00002.gguf"])
def test_a_path_that_leads_nowhere_is_no_quant_that_is_unknown(desk: Desk, command: str, text: str) -> None:
    error = desk.error(command, text, code=2)
    assert (error["code"], error["message"]) == ("no-such-file", f"there is no file or folder {text}")


def test_a_word_that_is_no_path_is_still_held_against_the_quants(desk: Desk) -> None:
    assert desk.error("verify", "UD-IQ1_X", code=2)["code"] == "unknown-quant"


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_the_command_that_fetches_keeps_the_models_folder(desk: Desk, command: str) -> None:
    error = desk.error(command, "UD-IQ1_M", "--models-dir", "a b", code=5)
    assert error["hint"] == "kimigguf download --models-dir 'a b' UD-IQ1_M"


def test_the_command_that_repairs_repairs_the_set_that_was_verified(desk: Desk, fetched: Path) -> None:
    gone = sorted(fetched.glob("*.gguf"))[1]
    gone.unlink()
    code, out, _ = desk("verify", "--quick", "UD-IQ1_M", "--models-dir", "my models")
    assert code == 5
    assert out.splitlines()[-1] == "fetch what is bad: kimigguf repair --models-dir 'my models' UD-IQ1_M"
    code, out, _ = desk("verify", "--quick", str(fetched))
    assert shlex.split(out.splitlines()[-1])[-2:] == ["repair", str(fetched)]
    assert desk("repair", str(fetched))[0] == 0
    assert gone.exists()


def test_a_foreign_set_is_repaired_by_importing_it_where_the_user_is_looking(
    desk: Desk, tiny: Callable[[str], Path]
) -> None:
    shutil.copytree(tiny("UD-IQ1_M"), "sp ace")
    error = desk.error("repair", "sp ace", "--models-dir", "my models", code=2)
    assert error["code"] == "foreign-set"
    assert shlex.split(error["hint"]) == [
        "kimigguf",
        "import",
        "--models-dir",
        "my models",
        str(Path("sp ace").absolute()),
    ]


# -- what the exit code says -------------------------------------------------------------------------------------------


def test_a_set_that_nothing_vouches_for_is_not_verified(desk: Desk, tiny: Callable[[str], Path]) -> None:
    """A script reads exit code 0 as verified."""
    shutil.copytree(tiny("UD-IQ1_M"), "tiny")
    code, out, _ = desk("verify", "tiny")
    count = len([*Path("tiny").iterdir()])
    assert code == 1
    of = f"{count} of {count} shards"
    assert out.splitlines()[-1] == f"NOT VERIFIED: nobody has said what the hash of {of} should be"
    code, out, _ = desk("verify", "tiny", "--json")
    assert (code, json.loads(out)["good"]) == (1, None)


def test_a_quick_look_proves_only_what_was_hashed_before(desk: Desk, fetched: Path) -> None:
    assert desk("verify", "--quick", str(fetched))[0] == 0
    touched = min(fetched.glob("*.gguf"))
    os.utime(touched, ns=(1, 1))
    code, out, _ = desk("verify", "--quick", str(fetched))
    assert code == 1
    assert out.splitlines()[-1].endswith("shards were not hashed; without --quick they are")
    assert desk("verify", str(fetched))[0] == 0


def test_help_says_when_verify_exits_with_1(desk: Desk) -> None:
    _, out, _ = desk("verify", "--help")
    assert "with 1 if one can be neither proved nor refuted" in " ".join(out.split())
