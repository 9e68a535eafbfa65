"""The command line's contract: help, exit codes, start-up, and how failures are shown."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from kimigguf.cli import app as cli_app
from kimigguf.cli.app import App, cli, run
from kimigguf.cli.show import Mode, Show
from kimigguf.errors import (
    ExitCode,
    IntegrityError,
    KimiggufError,
    MachineError,
    NetworkError,
    ServerError,
    UsageError,
)

HEAVY = {"numpy", "huggingface_hub", "openai", "xllamacpp", "gguf", "ollama", "pydantic", "rich", "httpx", "psutil"}
COMMANDS = list(cli_app._COMMANDS)


def test_help_imports_no_heavy_library_and_no_command() -> None:
    report = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kimigguf", "--help"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in report.stderr.splitlines() if "import time:" in line}
    assert "kimigguf.cli.app" in imported
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}
    assert not {
        name for name in imported if name.startswith("kimigguf.cli.") and name.split(".")[2] not in {"app", "show"}
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.short_help == cli_app._COMMANDS[name]
    assert run([name, "--help"]) == ExitCode.DONE
    assert f"kimigguf {name}" in capsys.readouterr().out.partition("\n")[2]


@pytest.mark.parametrize(
    "words", [*((name,) for name in COMMANDS), *(("quality-probe", name) for name in ("compare", "exact", "protocol"))]
)
def test_no_help_is_wider_than_80_columns_and_every_option_is_described(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal would break an example within a word; click itself wraps whatever is no example."""
    assert run([*words, "--help"]) == ExitCode.DONE
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []
    command: click.Command | None = cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(cli), word)
    assert command is not None
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_no_argument_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.USAGE
    assert "kimigguf serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["recomend"], "recommend", "kimigguf --help"),
        (["recommend", "--prefer", "beauty"], "quality", "kimigguf recommend --help"),
        (["serve", "--prot", "1"], "--port", "kimigguf serve --help"),
    ],
)
def test_a_mistyped_line_is_answered_like_any_other_error(
    argv: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert f"try: {hint}" in err


def test_a_hint_is_never_folded_so_that_it_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    hint = f"rm '/models/{'a folder with a long name/' * 12}x.gguf'"
    Show().error(UsageError("it is there", code="c", hint=hint))
    assert hint in capsys.readouterr().err


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, mode: Mode = Mode.HUMAN) -> int:
    def raise_it(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", raise_it)
    return run([], App(show=Show(mode), environ={}))


@pytest.mark.parametrize(
    ("kind", "code"),
    [(UsageError, 2), (MachineError, 3), (NetworkError, 4), (IntegrityError, 5), (ServerError, 6)],
)
def test_each_kind_of_failure_has_its_exit_code(
    kind: type[KimiggufError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("it happened", code="some-code", cause="a reason", hint="kimigguf recommend")
    assert fails_with(error, monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in ("it happened", "some-code", "a reason", "kimigguf recommend"))


def test_a_failure_under_json_is_one_object_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = IntegrityError("shard 3 is damaged", code="bad-shard", hint="kimigguf verify UD-IQ1_M")
    assert fails_with(error, monkeypatch, Mode.JSON) == ExitCode.INTEGRITY
    out, err = capsys.readouterr()
    assert out == ""
    record = json.loads(err)
    assert record["schema"] == "kimigguf.error/1"
    assert (record["code"], record["exit_code"], record["cause"]) == ("bad-shard", 5, None)


def test_a_bug_is_shown_as_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(ZeroDivisionError("surprise"), monkeypatch) == ExitCode.BUG
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "surprise" in err
    assert "bug in kimigguf" in err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch) == ExitCode.INTERRUPTED
    assert fails_with(click.Abort(), monkeypatch) == ExitCode.INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_130_however_often_it_comes(number: signal.Signals) -> None:
    code = (
        "import time; from kimigguf.cli import app\n"
        "app.cli.main = lambda **_: (print('up', flush=True), time.sleep(30))\n"
        "app.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.02)
    _, err = process.communicate(timeout=10)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in err


def test_a_closed_pipe_is_no_failure() -> None:
    code = (
        f"{sys.executable} -m kimigguf recommend --machine epyc-768g-rtx-pro-6000 -v | head -1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("mode", ["--json", "-v"])
def test_a_full_stdout_is_told_and_is_no_bug(mode: str) -> None:
    code = f"{sys.executable} -m kimigguf recommend --machine epyc-768g-rtx-pro-6000 {mode} > /dev/full"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.MACHINE
    assert "cannot write the answer" in done.stderr or "cannot-write" in done.stderr
    assert "Traceback" not in done.stderr


def test_messages_are_never_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show()
    show.error(UsageError("the file [red]x[/red] [0]", code="c", hint="rm '[bold]'"))
    show.note("[red]plain[/red]")
    err = capsys.readouterr().err
    assert "[red]x[/red] [0]" in err
    assert "'[bold]'" in err
    assert "[red]plain[/red]" in err
