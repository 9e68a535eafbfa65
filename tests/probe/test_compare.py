import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from fakes.browser import browser
from rich.console import Console

from kimigguf.catalogue.profiles import load_model
from kimigguf.errors import UsageError
from kimigguf.probe.calls import Arm, Call, Reply
from kimigguf.probe.client import Endpoint
from kimigguf.probe.compare import Comparison, compare, compare_page, draw
from kimigguf.probe.cost import Costs, SideCosts, economics
from kimigguf.probe.report import record
from kimigguf.probe.score import score, solved
from kimigguf.probe.suites import Item, Number, Suite

SUITE = Suite(
    name="sums",
    items=tuple(Item(id=f"i{n}", prompt="?", check=Number(value=n)) for n in range(30)),
    sha256="0" * 64,
)


def reply(content: str, seconds: float) -> Reply:
    return Reply(
        content=content, thinking="", finish_reason="stop", tool_calls=0, prompt_tokens=5, completion_tokens=50,
        first_token_seconds=0.5, seconds=seconds, max_tokens=None,
    )  # fmt: skip


def finished(folder: Path, *, wrong: int, seconds: float, costs: Costs) -> Path:
    """The folder of a run whose candidate answered ``wrong`` items wrongly."""
    calls = [
        Call(
            arm=arm,
            item=f"i{n}",
            repeat=0,
            outcome=reply("777" if arm is Arm.CANDIDATE and n < wrong else str(n), seconds),
        )
        for n in range(30)
        for arm in Arm
    ]
    found = economics(calls, solved(SUITE, calls), costs, None, parallel=1)
    scores = dataclasses.replace(score(SUITE, calls, tolerance=0.05), economics=found)
    sides = [Endpoint(role=role, url=f"http://{role}/v1", model="kimi-k3") for role in ("candidate", "reference")]
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(record(scores, *sides)))
    return folder


def exact(folder: Path, kld: float, size: int) -> None:
    answer = {
        "schema": "kimigguf.quality-exact/1",
        "candidate": {"name": "x", "size_bytes": size},
        "mean": {"mean": kld, "error": 0.01},
        "same_top": {"mean": 0.8, "error": 0.01},
    }
    (folder / "exact.json").write_text(json.dumps(answer))


def compared(tmp_path: Path, *, more: bool) -> Comparison:
    costs = Costs(candidate=SideCosts(usd_per_hour=2.0)) if more else Costs()
    small = finished(tmp_path / "UD-IQ1_S", wrong=12, seconds=20.0, costs=costs)
    large = finished(tmp_path / "mine", wrong=1, seconds=40.0, costs=costs)
    if more:
        exact(small, 0.5645, 1)
        exact(large, 0.1779, 861_277_858_912)
    return compare([small, large], load_model(environ={}))


def text(comparison: Comparison, width: int) -> str:
    console = Console(width=width, no_color=True, record=True, file=None)
    with console.capture() as captured:
        draw(console, comparison)
    return captured.get()


def test_what_lies_beside_a_run_is_compared_too(tmp_path: Path) -> None:
    found = compared(tmp_path, more=True)
    assert [(run.label, run.divergence) for run in found.runs] == [("mine", 0.1779), ("UD-IQ1_S", 0.5645)]
    # The exact comparison knows the file's size where the name says nothing; where it does, the catalogue is right.
    assert [run.size_bytes for run in found.runs] == [861_277_858_912, 594_040_923_616]
    costs = [run.usd_per_solved_task for run in found.runs]
    assert costs == [pytest.approx(2 / 3600 * 40 * 30 / 29), pytest.approx(2 / 3600 * 20 * 30 / 18)]
    assert "0.5645" in text(found, 140)


@pytest.mark.parametrize("width", [80, 120])
def test_all_that_is_compared_fits_the_terminal(width: int, tmp_path: Path) -> None:
    shown = text(compared(tmp_path, more=True), width)
    assert max(map(len, shown.splitlines())) <= width
    for word in ("UD-IQ1_S", "861.3 GB", "96.7 % [83.3 %, 99.4 %]", "0.1779", "verdict", "not enough samples"):
        assert word in shown


def test_columns_that_nobody_can_fill_are_left_out(tmp_path: Path) -> None:
    shown = text(compared(tmp_path, more=False), 140)
    assert "divergence" not in shown
    assert "solved task" not in shown
    assert "594.0 GB" in shown  # known of one is enough


def test_a_browser_shows_the_comparison_on_any_screen_without_asking_anyone(tmp_path: Path) -> None:
    path = tmp_path / "compared.html"
    path.write_text(compare_page(compared(tmp_path, more=True)), encoding="utf-8")
    with browser(tmp_path) as tab:
        tab.open(path)
        for width in (360, 1280):
            tab.look(width=width)
            assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        tab.look(width=900, dark=True)
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
        assert tab.evaluate("document.querySelectorAll('circle').length") == 4
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        assert tab.complaints == []


def test_the_same_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", wrong=2, seconds=20.0, costs=Costs())
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    for second in (one, copy):
        with pytest.raises(UsageError, match="one and the same run") as error:
            compare([one, second], load_model(environ={}))
        assert error.value.code == "same-run"


def test_the_reference_has_the_same_share_of_right_answers_here_as_in_the_runs_own_report(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", wrong=2, seconds=20.0, costs=Costs())
    report = json.loads((one / "report.json").read_text())
    report["metrics"][0]["reference"], report["arms"][1]["right"] = 0.75, 30
    (one / "report.json").write_text(json.dumps(report))
    found = compare([one], load_model(environ={}))
    assert found.reference_right == 0.75
    assert "75.0 % right, the mean of all times it was asked" in text(found, 140)
