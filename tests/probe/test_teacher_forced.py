import json
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.perplexity import SAID
from fakes.served import small_model

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode
from kimigguf.probe.divergence import Logits
from kimigguf.probe.suites import Item, Suite
from kimigguf.probe.teacher_forced import suite_text

TEXT = "\n".join(f"Crate {n} holds {n * 7} saws, {n * 3} planes and no hammers; Oslo asked for {n}." for n in range(90))
OWN = """A llama lives in the Andes, where it carries wool, maize and salt over passes of four thousand metres. It spits
when it is annoyed, and hums to its young. Farmers shear it every second year; the fleece has two coats, of which the
inner one is spun. The Inca built their roads for its feet, not for wheels. Why, then, would an engineer name a program
for it? Because the first letters fitted, and nobody minded an animal that is patient, strong and seldom in a bad mood.
In the museum of a small town there hangs a picture of one, painted on a door by a smith who had never seen it: he gave
it hooves like a cow's, a tail like a fox's, and the face of his brother in law, who was not amused. Visitors from far
away have asked what the beast is called. The keeper says that it depends on the weather, and on who is asking. On rainy
days it is a camel that was washed too hot; on feast days it is the patron of all who carry more than they can.
"""
"""Prose of our own, for a model that can read."""


class Exact:
    """``quality-probe exact`` with the native engine, and what it said."""

    def __init__(self, native_bin: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.environ = {**os.environ, "KIMIGGUF_LLAMA_SERVER": str(native_bin)}
        self.capsys = capsys
        self.text = folder / "text.txt"
        self.text.write_text(TEXT, encoding="utf-8")

    def __call__(self, *arguments: str | Path, code: int = ExitCode.DONE) -> dict[str, Any]:
        sized: list[str] = ["--context", "128", "--chunks", "4", "--text", str(self.text)]
        words: list[str] = ["quality-probe", "exact", "--json", *sized, *map(str, arguments)]
        assert run(words, App(show=Show(), environ=self.environ)) == code
        shown = self.capsys.readouterr()
        answer: dict[str, Any] = json.loads(shown.out if code == ExitCode.DONE else shown.err.splitlines()[-1])
        return answer


@pytest.fixture
def exact(native_bin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Exact:
    return Exact(native_bin, tmp_path, capsys)


@pytest.mark.native
@pytest.mark.engine
def test_a_k3_is_itself_and_another_quant_of_it_is_not(
    exact: Exact, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    logits, folder = tmp_path / "kept" / "q2.logits", tmp_path / "run"
    same = exact(tiny("UD-Q2_K_XL"), "--reference", tiny("UD-Q2_K_XL"), "--logits", logits)
    assert same["schema"] == "kimigguf.quality-exact/1"
    assert (same["context_tokens"], same["chunks"], same["scored_tokens"]) == (128, 4, 4 * 63)
    assert abs(same["mean"]["mean"]) < 0.001  # the file holds 16 bits for each word, so not quite nothing
    assert same["same_top"]["mean"] > 0.97
    assert "Q2_K_XL" in same["reference"]["name"]

    other = exact(tiny("UD-IQ1_M"), "--logits", logits, "--out", folder)
    assert other["reference"] == same["reference"]  # the note beside the logits has it
    assert other["mean"]["mean"] > 0.5
    assert other["same_top"]["mean"] < 0.5
    assert json.loads((folder / "exact.json").read_text()) == other


@pytest.mark.native
@pytest.mark.engine
def test_a_coarser_small_model_is_measured_as_worse_than_the_finer_one(
    exact: Exact, native_bin: Path, tmp_path: Path
) -> None:
    fine, coarse = small_model()[0], tmp_path / "coarse.gguf"
    made = [str(native_bin / "llama-quantize"), "--allow-requantize", str(fine), str(coarse), "Q2_K", "2"]
    subprocess.run(made, check=True, capture_output=True)
    exact.text.write_text(OWN)
    found = exact(coarse, "--reference", fine, "--context", "112", "--chunks", "2")
    assert found["scored_tokens"] == 110
    assert 0.1 < found["mean"]["mean"] < 2
    assert 0.3 < found["same_top"]["mean"] < 0.95
    assert found["perplexity_ratio"]["mean"] > 1
    assert "significant" in found["meaning"]


@pytest.mark.native
def test_kept_logits_of_another_reference_text_or_size_are_refused(
    exact: Exact, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model, other, logits = tiny("UD-IQ1_M"), tiny("UD-Q2_K_XL"), tmp_path / "kept.logits"
    first = exact(model, "--reference", model, "--logits", logits)
    made = logits.read_bytes()
    text = tmp_path / "other.txt"
    text.write_text(TEXT[::-1])
    named: dict[str, str | Path] = {"reference": other, "text": text, "context": "96", "chunks": "3"}
    for what, value in named.items():
        refused = exact(model, "--logits", logits, f"--{what}", value, code=ExitCode.USAGE)
        assert refused["code"] == "other-logits"
        assert f"made with another {what} (by " in refused["message"]
        assert str(logits) in refused["hint"]
    assert logits.read_bytes() == made
    again = exact(model, "--reference", model, "--logits", logits)
    assert (again["reference"], again["mean"]) == (first["reference"], first["mean"])
    assert again["reference"]["name"] is not None

    moved = tmp_path / "elsewhere" / "kept.logits"
    moved.parent.mkdir()
    moved.write_bytes(made)
    unknown = exact(model, "--reference", model, "--logits", moved, code=ExitCode.USAGE)
    assert "nothing beside" in unknown["message"]
    words = ["quality-probe", "exact", "--json", str(model), "--logits", str(moved)]
    assert run(words, App(show=Show(), environ=exact.environ)) == ExitCode.DONE  # as it is, nothing else being named
    assert json.loads(exact.capsys.readouterr().out)["reference"]["name"] is None


@pytest.mark.native
def test_what_the_tool_would_go_on_with_in_silence_is_refused(
    exact: Exact, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model, logits = tiny("UD-IQ1_M"), tmp_path / "k3.logits"
    assert exact(model, "--reference", small_model()[0], code=ExitCode.USAGE)["code"] == "other-vocabulary"
    exact(model, "--reference", model, "--logits", logits)
    assert exact(small_model()[0], "--logits", logits, code=ExitCode.USAGE)["code"] == "other-vocabulary"
    logits.write_bytes(logits.read_bytes()[:-1])
    cut = exact(model, "--logits", logits, code=ExitCode.INTEGRITY)
    assert cut["code"] == "bad-logits"
    assert str(logits) in cut["hint"]


@pytest.mark.native
@pytest.mark.parametrize("text", ["", "short", "a b c " * 70], ids=["empty", "short", "one chunk"])
def test_a_text_that_fills_no_two_chunks_is_refused_and_leaves_no_file(
    exact: Exact, tiny: Callable[[str], Path], tmp_path: Path, text: str
) -> None:
    exact.text.write_text(text)
    logits = tmp_path / "k3.logits"
    model = tiny("UD-IQ1_M")
    failed = exact(model, "--reference", model, "--logits", logits, "--context", "320", code=ExitCode.USAGE)
    assert failed["code"] == "text-too-short"
    assert not list(tmp_path.glob("k3.logits*"))


@pytest.mark.native
def test_too_few_tokens_for_statistics_are_refused_before_the_candidate_runs(
    exact: Exact, tiny: Callable[[str], Path]
) -> None:
    model = tiny("UD-IQ1_M")
    failed = exact(model, "--reference", model, "--context", "32", "--chunks", "4", code=ExitCode.USAGE)
    assert (failed["code"], "only 60 tokens" in failed["message"]) == ("text-too-short", True)


@pytest.mark.native
def test_what_kills_the_tool_is_told_and_leaves_no_file(
    exact: Exact, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model, logits = tiny("UD-IQ1_M"), tmp_path / "k3.logits"
    failed = exact(model, "--reference", model, "--logits", logits, "--", "--no-such-flag", code=ExitCode.SERVER)
    assert "no-such-flag" in json.dumps(failed)
    assert not list(tmp_path.glob("k3.logits*"))


@pytest.mark.parametrize(("lost", "code"), [(0, ExitCode.DONE), (2, ExitCode.DONE), (9, ExitCode.MACHINE)])
def test_last_words_that_a_busy_machine_swallowed_are_asked_for_again(
    lost: int, code: ExitCode, tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for llama-perplexity, which ends without waiting for its own log."""
    runs, said = tmp_path / "runs", tmp_path / "said"
    for name in ("llama-server", "llama-perplexity"):
        script = f'echo >>"{runs}"\n[ "$(wc -l <"{runs}")" -gt {lost} ] && cat "{said}"\nexit 0\n'
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / name).chmod(0o755)
    said.write_text(SAID, encoding="utf-8")
    size = Logits(context_tokens=128, vocabulary=320, chunks=4)
    kept = tmp_path / "logits"
    kept.write_bytes(struct.pack("<8sIii", b"_logits_", 128, 320, 4).ljust(size.size_bytes, b"\0"))
    app = App(show=Show(), environ={"KIMIGGUF_LLAMA_SERVER": str(tmp_path), "PATH": os.environ["PATH"]})
    words = ["quality-probe", "exact", str(tiny("UD-IQ1_M")), "--logits", str(kept), "--json"]
    assert run(words, app) == code
    assert len(runs.read_text().splitlines()) == min(lost, 2) + 1
    shown = capsys.readouterr()
    assert ("0.450413" in shown.out) == (code == ExitCode.DONE)
    assert ("no-statistics" in shown.err) == (code == ExitCode.MACHINE)


def test_without_the_tool_or_a_reference_nothing_is_run(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny("UD-IQ1_M"))
    app = App(show=Show(), environ={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert run(["quality-probe", "exact", model], app) == ExitCode.USAGE
    assert "--reference" in capsys.readouterr().err
    assert run(["quality-probe", "exact", model, "--reference", model], app) == ExitCode.MACHINE
    assert "no-perplexity-tool" in capsys.readouterr().err


def test_a_suite_is_read_in_an_order_that_is_mixed_and_always_the_same() -> None:
    items = tuple(Item(id=f"i{n}", prompt=f"question {n}") for n in range(30))
    suite = Suite(name="s", items=items, sha256="a" * 64)
    text = suite_text(suite)
    assert text == suite_text(suite)
    assert sorted(text.split("\n\n")) == sorted(f"question {n}" for n in range(30))
    assert text.split("\n\n") != [f"question {n}" for n in range(30)]
