"""Answers that must keep to a form, made anew from a seed: so many words, no such letter, lines of a kind."""

import random
from typing import Final

from kimigguf.probe.suites import Checker, Exact, Regex
from kimigguf.probe.words import NAMES, TOWNS, WORDS

_TOPICS: Final = ("the sea", "winter", "a market", "a forest", "the night sky", "a railway station", "bread", "a storm",
                  "an old library", "the desert", "a village fair", "rain")  # fmt: skip
_LONGEST_ACROSTIC: Final = 6
_WORD: Final = r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*"


def _exact_words(chance: random.Random) -> tuple[str, Checker]:
    topic, count = chance.choice(_TOPICS), chance.randint(4, 9)
    text = f"Describe {topic} in exactly {count} words. Write only these words, separated by single blanks"
    return f"{text}, without punctuation.", Regex(pattern=rf"^\s*{_WORD}(?: {_WORD}){{{count - 1}}}\s*$")


def _without_letter(chance: random.Random) -> tuple[str, Checker]:
    topic, letter = chance.choice(_TOPICS), chance.choice("aiosn")
    text = f"Write one English sentence of at least six words about {topic} that does not contain the letter {letter}."
    avoided = f"[^{letter}{letter.upper()}]"
    # Letters and what is none exclude each other, so that no answer, however long, has many ways to be read.
    pattern = rf"^(?={avoided}*$)\W*(?:[^\W\d_]+\W+){{5,}}[^\W\d_]+\W*$"
    return f"{text} Write only the sentence.", Regex(pattern=pattern)


def _lines(chance: random.Random) -> tuple[str, Checker]:
    count, mark, end = chance.randint(3, 6), chance.choice(("*", ">", "+", "=")), chance.choice((";", "!", "..."))
    text = f"List {count} things that are found in {chance.choice(('a kitchen', 'a school', 'a garage', 'a park'))}."
    form = f"Write one per line; each line starts with '{mark} ' and ends with '{end}'. Write nothing else."
    line = rf"{_literally(mark)} \S[^\n]*{_literally(end)}"
    return f"{text} {form}", Regex(pattern=rf"^\s*{line}(?:\n{line}){{{count - 1}}}\s*$")


def _literally(mark: str) -> str:
    return "".join(f"[{character}]" for character in mark)


def _acrostic(chance: random.Random) -> tuple[str, Checker]:
    word = chance.choice([word for word in WORDS if len(word) <= _LONGEST_ACROSTIC and "q" not in word])
    lines = r"\n".join(rf"\W*[{letter}{letter.upper()}][^\n]*" for letter in word)
    text = f"Write {len(word)} short lines whose first letters spell the word '{word}', top to bottom."
    return f"{text} Write only these lines.", Regex(pattern=rf"^{lines}\s*$")


_LIVES: Final = {
    "German": ("{a} wohnt in {x}.", "Wo wohnt {a}? Antworte nur mit dem Ort."),
    "French": ("{a} habite à {x}.", "Où habite {a} ? Réponds seulement par le lieu."),
    "Spanish": ("{a} vive en {x}.", "¿Dónde vive {a}? Responde solo con el lugar."),
    "Chinese": ("{a}住在{x}。", "{a}住在哪里？只回答地名。"),  # noqa: RUF001 -- that is how Chinese is written
    "Japanese": ("{a}は{x}に住んでいます。", "{a}はどこに住んでいますか。地名だけで答えてください。"),
    "Russian": ("{a} живёт в городе {x}.", "Где живёт {a}? Ответь только названием."),
    "Polish": ("{a} mieszka w miejscowości {x}.", "Gdzie mieszka {a}? Podaj tylko nazwę."),
    "Dutch": ("{a} woont in {x}.", "Waar woont {a}? Antwoord alleen met de plaats."),
}


def _where_in(chance: random.Random) -> tuple[str, Checker]:
    fact, question = _LIVES[chance.choice(sorted(_LIVES))]
    names, towns = chance.sample(NAMES, 5), chance.sample(TOWNS, 5)
    facts = " ".join(fact.format(a=name, x=town) for name, town in zip(names, towns, strict=True))
    asked = chance.randrange(5)
    return f"{facts} {question.format(a=names[asked])}", Exact(value=towns[asked])


LIMITS: Final = {
    "limit-words": ("instructions", _exact_words),
    "limit-letter": ("instructions", _without_letter),
    "limit-lines": ("instructions", _lines),
    "limit-acrostic": ("instructions", _acrostic),
    "language-where": ("languages", _where_in),
}
"""Every template with its category."""
