"""Small programs to write, made anew from a seed: what they must do is drawn, and so is what they are tried on.

The tests hold results worked out here, not a solution, so that a question says nothing but what it asks.
"""

import random
from typing import Final

from kimigguf.probe.suites import Checker, PythonTest
from kimigguf.probe.words import WORDS

_ONLY: Final = "Answer with one Python code block and nothing else; the standard library is all there is."


def _tests(name: str, cases: list[tuple[object, object]]) -> PythonTest:
    """One line for each case, ``name(argument) == result``, with the case in its message."""
    lines = [f"got = {name}({given!r})\nassert got == {wanted!r}, f'{name} gives {{got!r}}'" for given, wanted in cases]
    return PythonTest(code="\n".join(lines))


def _filtered_sum(chance: random.Random) -> tuple[str, Checker]:
    yes, no = chance.sample((2, 3, 4, 5, 6, 7), 2)
    while no % yes == 0 or yes % no == 0:
        yes, no = chance.sample((2, 3, 4, 5, 6, 7), 2)
    rows = [[chance.randint(-60, 99) for _ in range(chance.randint(3, 12))] for _ in range(4)] + [[], [0, yes * no]]
    cases: list[tuple[object, object]] = [(row, sum(n for n in row if n % yes == 0 and n % no != 0)) for row in rows]
    text = f"that returns the sum of those numbers in a list of integers that {yes} divides and {no} does not."
    return f"Write a Python function pick(numbers) {text} {_ONLY}", _tests("pick", cases)


def _duration(chance: random.Random) -> tuple[str, Checker]:
    """Units that nobody has, so that a known parser is of no use."""
    big, small = chance.sample("bcfgkmpqtz", 2)
    worth = chance.choice((7, 12, 18, 25, 40))
    pairs = [(chance.randint(1, 30), chance.randint(0, worth * 2)) for _ in range(3)]
    cases: list[tuple[object, object]] = [(f"{a}{big}{b}{small}", a * worth + b) for a, b in pairs]
    cases += [(f"{pairs[0][0]}{big}", pairs[0][0] * worth), (f"{pairs[1][0]}{small}", pairs[1][0])]
    text = (
        f"One {big} is {worth} {small}. Lengths are written like '{pairs[0][0]}{big}{pairs[0][1]}{small}'; either part "
        f"may be missing. Write a Python function total(text) that returns such a length in {small}, as an integer."
    )
    return f"{text} {_ONLY}", _tests("total", cases)


def _turned(chance: random.Random) -> tuple[str, Checker]:
    degrees, mirrored = chance.choice((90, 180, 270)), chance.choice((None, "left to right", "top to bottom"))
    way, turns = chance.choice((("clockwise", degrees // 90), ("counterclockwise", 4 - degrees // 90)))
    rows, columns = chance.choice(((2, 3), (3, 2), (3, 4)))
    grids = [[[chance.randint(0, 9) for _ in range(columns)] for _ in range(rows)] for _ in range(3)] + [[[5]]]

    def turned(grid: list[list[int]]) -> list[list[int]]:
        for _ in range(turns):
            grid = [list(row) for row in zip(*grid[::-1], strict=True)]
        if mirrored == "left to right":
            return [row[::-1] for row in grid]
        return grid if mirrored is None else grid[::-1]

    then = "" if mirrored is None else f" and then mirrored {mirrored}"
    text = (
        f"Write a Python function turn(grid) that returns a list of lists of numbers turned {way} by {degrees} degrees"
    )
    cases: list[tuple[object, object]] = [(grid, turned(grid)) for grid in grids]
    return f"{text}{then}. {_ONLY}", _tests("turn", cases)


def _ranked(chance: random.Random) -> tuple[str, Checker]:
    letter, most = chance.choice("aeilnr"), chance.randint(2, 4)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(6, 12))) for _ in range(4)] + [""]

    def ranked(text: str) -> list[str]:
        found = {word for word in text.split() if letter in word}
        return sorted(found, key=lambda word: (-word.count(letter), len(word), word))[:most]

    text = (
        f"Write a Python function ranked(text) that takes the different words of a text (separated by blanks) that "
        f"contain the letter {letter}, and returns a list of at most {most} of them: those with more {letter}'s first, "
        "among these the shorter ones first, and among these in alphabetical order."
    )
    cases: list[tuple[object, object]] = [(each, ranked(each)) for each in texts]
    return f"{text} {_ONLY}", _tests("ranked", cases)


CODE: Final = {
    "code-sum": ("code", _filtered_sum),
    "code-duration": ("code", _duration),
    "code-turn": ("code", _turned),
    "code-ranked": ("code", _ranked),
}
"""Every template with its category."""
