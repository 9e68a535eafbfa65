"""Questions that any chat model answers, made anew from a seed: they tell a broken server, not a fine difference.

A small model gets most of them right and some wrong, so a wrong chat template, a damaged shard or a lost prompt shows
within a hundred short answers; a large one gets nearly all, and then the harder templates must tell.
"""

import random
from collections.abc import Mapping
from typing import Final

from kimigguf.probe.suites import Checker, JsonSchema, Number, Regex
from kimigguf.probe.words import ALONE, NAMES, TOWNS, WORDS

_CAPITALS: Final[Mapping[str, str]] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo",
    "Russia": "Moscow", "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Austria": "Vienna",
    "Poland": "Warsaw", "Hungary": "Budapest", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Kenya": "Nairobi", "Thailand": "Bangkok", "South Korea": "Seoul", "Iran": "Tehran", "Iraq": "Baghdad",
    "Canada": "Ottawa", "India": "New Delhi", "Belgium": "Brussels", "Argentina": "Buenos Aires",
}  # fmt: skip
_OPPOSITES: Final[Mapping[str, str]] = {
    "hot": "cold", "up": "down", "big": "small", "black": "white", "day": "night", "left": "right", "fast": "slow",
    "old": "new|young", "open": "closed?|shut", "full": "empty", "happy": "sad|unhappy", "rich": "poor", "wet": "dry",
    "high": "low", "long": "short", "hard": "soft|easy", "early": "late", "light": "dark(?:ness)?|heavy",
    "true": "false", "win": "lose", "buy": "sell", "push": "pull", "strong": "weak", "clean": "dirty",
    "love": "hate|hatred", "inside": "outside", "above": "below", "first": "last", "start": "end|stop|finish",
    "loud": "quiet|soft",
}  # fmt: skip
_CONTINENTS: Final[Mapping[str, str]] = {
    "France": "Europe", "Germany": "Europe", "Italy": "Europe", "Spain": "Europe", "Norway": "Europe",
    "Poland": "Europe", "Greece": "Europe", "Ireland": "Europe", "Japan": "Asia", "China": "Asia", "India": "Asia",
    "Thailand": "Asia", "Vietnam": "Asia", "Iraq": "Asia", "Mongolia": "Asia", "Nepal": "Asia", "Kenya": "Africa",
    "Nigeria": "Africa", "Ghana": "Africa", "Morocco": "Africa", "Ethiopia": "Africa", "Uganda": "Africa",
    "Senegal": "Africa", "Angola": "Africa", "Brazil": "South America", "Peru": "South America",
    "Chile": "South America", "Bolivia": "South America", "Canada": "North America", "Mexico": "North America",
}  # fmt: skip
_PAST: Final[Mapping[str, str]] = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "take": "took", "give": "gave", "write": "wrote",
    "speak": "spoke", "drink": "drank", "sing": "sang", "swim": "swam", "begin": "began", "buy": "bought",
    "think": "thought", "teach": "taught", "catch": "caught", "find": "found", "know": "knew", "grow": "grew",
    "fly": "flew", "drive": "drove", "break": "broke", "choose": "chose", "fall": "fell", "feel": "felt",
    "keep": "kept", "leave": "left", "lose": "lost", "sell": "sold", "tell": "told",
}  # fmt: skip
_COLOURS: Final = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple", "brown", "pink")
_THINGS: Final = ("car", "door", "coat", "boat", "chair", "bag", "hat", "house", "bike", "cup")


def _one_of(right: str, others: tuple[str, ...] | list[str]) -> Regex:
    """The right word is in the answer and no other one that was to choose from."""
    wrong = "|".join(other for other in others if other != right)
    return Regex(pattern=rf"(?is)^(?!.*\b(?:{wrong})\b).*\b({right})\b")


def _capital(chance: random.Random) -> tuple[str, Checker]:
    land = chance.choice(sorted(_CAPITALS))
    return f"What is the capital of {land}? Answer with its name alone.", Regex(pattern=rf"(?i)\b({_CAPITALS[land]})\b")


def _opposite(chance: random.Random) -> tuple[str, Checker]:
    word = chance.choice(sorted(_OPPOSITES))
    text = f"What is the opposite of '{word}'? Answer with one word."
    return text, Regex(pattern=rf"(?i)\b({_OPPOSITES[word]})\b")


def _continent(chance: random.Random) -> tuple[str, Checker]:
    land = chance.choice(sorted(_CONTINENTS))
    text = f"On which continent is {land}? Answer with its name alone."
    return text, _one_of(_CONTINENTS[land], sorted({*_CONTINENTS.values()}))


def _past(chance: random.Random) -> tuple[str, Checker]:
    verb = chance.choice(sorted(_PAST))
    text = f"What is the past tense of the verb '{verb}'? Answer with one word."
    return text, Regex(pattern=rf"(?i)\b({_PAST[verb]})\b")


def _small_sum(chance: random.Random) -> tuple[str, Checker]:
    a, b = chance.randint(1, 12), chance.randint(1, 12)
    return f"What is {a} + {b}? {ALONE}", Number(value=a + b)


def _where(chance: random.Random) -> tuple[str, Checker]:
    names, towns = chance.sample(NAMES, 2), chance.sample(TOWNS, 2)
    facts = " ".join(f"{name} lives in {town}." for name, town in zip(names, towns, strict=True))
    asked = chance.randrange(2)
    return f"{facts} In which town does {names[asked]} live? Answer with the town alone.", _one_of(towns[asked], towns)


def _colour_of(chance: random.Random) -> tuple[str, Checker]:
    things, colours = chance.sample(_THINGS, 2), chance.sample(_COLOURS, 2)
    facts = " ".join(f"The {thing} is {colour}." for thing, colour in zip(things, colours, strict=True))
    asked = chance.randrange(2)
    return f"{facts} What colour is the {things[asked]}? Answer with one word.", _one_of(colours[asked], colours)


def _small_json(chance: random.Random) -> tuple[str, Checker]:
    name, age = chance.choice(NAMES), chance.randint(19, 88)
    text = f'Write only a JSON object with the key "name" ({name}) and the key "age" ({age}).'
    schema = {
        "type": "object",
        "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
    return text, JsonSchema(schema=schema, value={"name": name, "age": age})


def _notice(chance: random.Random) -> tuple[str, Checker]:
    """A fact at the head of some 300 tokens: whoever has lost the front of the conversation cannot know it."""
    name, town = chance.choice(NAMES), chance.choice(TOWNS)
    rest = [place for place in TOWNS if place != town]
    lines = [
        f"{chance.choice(rest)} station has {chance.randint(10, 99)} crates of {chance.choice(WORDS)} in store."
        for _ in range(14)
    ]
    text = "\n".join([f"Important: the letter for {name} goes to {town}.", *lines])
    return f"{text}\n\nTo which town does the letter for {name} go? Answer with the town alone.", _one_of(town, TOWNS)


BASICS: Final = {
    "capital": ("knowledge", _capital),
    "opposite": ("knowledge", _opposite),
    "continent": ("knowledge", _continent),
    "past": ("knowledge", _past),
    "small-sum": ("arithmetic", _small_sum),
    "where": ("extraction", _where),
    "colour-of": ("extraction", _colour_of),
    "small-json": ("json", _small_json),
    "notice": ("long context", _notice),
}
"""Every template with its category."""
