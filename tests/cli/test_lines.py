"""Prose fits 80 columns between its words and under its indent; what is to be pasted stays in one piece."""

import io

import pytest
from rich.cells import cell_len
from rich.text import Text

from kimigguf.cli.lines import LineConsole, laid_out, unbroken
from kimigguf.cli.show import Show
from kimigguf.errors import MachineError

COLUMNS = 80
PROSE = (
    "  - 632.5 GB more RAM would hold it, or a local NVMe with room for the files, from which it could stream experts",
    "PASSED  memory       CUDA0: 12.3 GiB planned but for its compute buffers, 12.4 GiB reported by the engine's log",
    "             since it was ready +2.0 MiB: context checkpoints +1.0 MiB, prompt cache +1.9 MiB, unexplained 0 B",
    "    this is why the setting has the value it has, which is a sentence that needs more than a line [llama.cpp]",
    "note: 缓存 前缀 与 上下文 检查点 一起 占用 的 内存 在 计划 中 单独 列出 因此 不会 超过 可用 的 内存",
    "a plain sentence that begins at the left edge and goes on for longer than eighty columns has no indent to keep",
)


def drawn(text: str, columns: int = COLUMNS) -> list[str]:
    return laid_out(Text(text), columns).plain.split("\n")


@pytest.mark.parametrize("columns", [40, 79, COLUMNS])
@pytest.mark.parametrize("text", PROSE)
def test_no_word_is_broken_and_no_line_is_wider_than_the_console(text: str, columns: int) -> None:
    lines = drawn(text, columns)
    assert len(lines) > 1
    assert " ".join(lines).split() == text.split()
    assert max(cell_len(line) for line in lines) <= columns


@pytest.mark.parametrize(("text", "hang"), list(zip(PROSE, (4, 21, 13, 4, 6, 0), strict=True)))
def test_the_further_lines_keep_the_indent_of_the_first(text: str, hang: int) -> None:
    first, *further = drawn(text)
    assert text.startswith(first)
    assert {len(line) - len(line.lstrip()) for line in further} == {hang}


@pytest.mark.parametrize(
    "pasted",
    [
        "kimigguf serve UD-IQ1_M --port 8080 --models-dir '/srv/my models'",
        "kimigguf plan tiny --machine box.toml --context 131072",
        "kimigguf stop --name tiny",
        "journalctl -u ollama -n 100",
        "sudo sysctl -w kernel.numa_balancing=0",
        "CUDA_VISIBLE_DEVICES=0 kimigguf serve tiny --detach",
        "https://example.org/a/very/long/address/that/is/wider/than/any/window/of/eighty/columns/could/be.html",
        "/srv/models/kimi-k3/UD-IQ1_M/Kimi-K3-UD-IQ1_M-00001-of-00016.gguf",
    ],
)
def test_what_is_to_be_pasted_stays_on_one_line_wherever_it_stands(pasted: str) -> None:
    for before in range(60, 80):
        lines = drawn(f"try: {'x' * before} {pasted}, or ask somebody who knows better than this line does")
        assert any(pasted in line for line in lines), lines


def test_the_sentence_around_a_command_is_no_part_of_it() -> None:
    text = "kimigguf recommend says which quant fits; stop it with kimigguf stop --name tiny, or ask the engine's log"
    pieces = [text[begin:end] for begin, end in unbroken(text)]
    assert pieces[:2] == ["kimigguf recommend", "says"]
    assert "kimigguf stop --name tiny," in pieces
    assert pieces[-2:] == ["engine's", "log"]


def test_a_line_that_the_shell_goes_on_from_is_left_alone() -> None:
    text = f"  curl {'-H x ' * 30}\\"
    assert drawn(text) == [text]


def test_colours_survive_the_break() -> None:
    line = Text.assemble(("PASSED  ", "green"), "word " * 30)
    assert [line.plain[span.start : span.end] for span in laid_out(line, COLUMNS).spans] == ["PASSED  "]


def test_code_is_written_as_it_is() -> None:
    console = LineConsole(file=io.StringIO(), width=COLUMNS, force_terminal=True, highlight=False)
    console.print(PROSE[0], soft_wrap=True)
    assert console.file.getvalue() == PROSE[0] + "\n"  # type: ignore[attr-defined]  # it is the StringIO from above


def test_a_log_or_pipe_of_unknown_width_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = LineConsole(file=io.StringIO(), force_terminal=False)
    console.print(PROSE[0], markup=False)
    assert console.file.getvalue() == PROSE[0] + "\n"  # type: ignore[attr-defined]  # it is the StringIO from above


def test_an_error_hangs_below_its_labels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    Show().error(MachineError("word " * 30, code="some-code", cause="reason " * 20, hint="do this " * 20))
    shown = capsys.readouterr().err.splitlines()
    assert max(map(len, shown)) <= COLUMNS
    assert [line[:9] for line in shown if not line.startswith(" ")] == ["error: wo", "because: ", "try: do t"]
    assert {len(line) - len(line.lstrip()) for line in shown} == {0, len("error: "), len("because: "), len("try: ")}
