"""``kimigguf logs`` on a long log."""

from pathlib import Path

import pytest

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show


@pytest.mark.parametrize(("count", "shown"), [("0", ""), ("2", "two\nthree"), ("9", "one\ntwo\nthree")])
def test_only_the_end_of_a_long_log_can_be_asked_for(
    count: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs = tmp_path / "kimigguf" / "logs"
    logs.mkdir(parents=True)
    (logs / "serve-8080-1.log").write_text("one\ntwo\nthree")
    assert run(["logs", "-n", count, "-f"], App(show=Show(), environ={"XDG_STATE_HOME": str(tmp_path)})) == 0
    assert capsys.readouterr().out == shown
