"""Questions made anew from a seed, so that no model can have seen them: each template draws its own numbers and words.

A suite names templates with counts; the same seed makes the same questions, so a run can be repeated and continued.
"""

import random
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from itertools import pairwise
from typing import Final, TypeAlias

from kimigguf.errors import UsageError
from kimigguf.probe.basics import BASICS
from kimigguf.probe.code_items import CODE
from kimigguf.probe.limits import LIMITS
from kimigguf.probe.suites import Checker, Exact, Item, JsonSchema, Number, Regex
from kimigguf.probe.words import ALONE, DAYS, NAMES, TOWNS, WORDS

Made: TypeAlias = tuple[str, Checker]
"""A prompt and how its answer is checked."""
Template: TypeAlias = Callable[[random.Random], Made]

_MOST_ATTEMPTS: Final = 20_000
_TOKENS_A_LINE: Final = 13
"""Of a needle's text, as K3's and SmolLM2's tokenizers count it, give or take two."""
NEEDLES: Final[Mapping[str, int]] = {f"needle-{size}k": size * 1000 for size in (1, 2, 4, 8, 16, 32, 60, 120, 250, 500)}
"""Templates of one fact in a long text, with the tokens of that text."""
DEPTHS: Final = (0.02, 0.5, 0.98, 0.25, 0.75)
"""Where the facts of a needle's first five questions stand, then again from the first."""


def make(template: str, count: int, seed: int) -> tuple[Item, ...]:
    """``count`` items of a template, no two alike. A higher count leaves the first ones as they are.

    Each is a cluster of its own: the templates are chosen, not drawn, and only the questions in them are chance. What
    is found holds for these kinds of questions; whoever would speak for other kinds too must ask those.

    Raises:
        UsageError: ``bad-suite`` for a template that there is not.
    """
    known = {**TEMPLATES, **NEEDLES}
    if template not in known:
        raise UsageError(
            f"there is no template {template!r}", code="bad-suite", hint="there are: " + ", ".join(sorted(known))
        )
    made: dict[str, Checker] = {}
    for attempt in range(_MOST_ATTEMPTS):
        if len(made) == count:
            break
        chance = random.Random(f"{seed}/{template}/{attempt}")  # noqa: S311 -- questions, not secrets
        prompt, check = _draw(template, chance, attempt)
        made.setdefault(prompt, check)
    if len(made) < count:
        raise UsageError(f"{template} has no {count} different questions", code="bad-suite", hint="ask for fewer")
    category = "long context" if template in NEEDLES else TEMPLATES[template][0]
    return tuple(
        Item(id=f"{template}-{number}", prompt=prompt, check=check, category=category, tokens=NEEDLES.get(template))
        for number, (prompt, check) in enumerate(made.items(), 1)
    )


def _draw(template: str, chance: random.Random, attempt: int) -> Made:
    if template in NEEDLES:
        return needle(chance, NEEDLES[template], DEPTHS[attempt % len(DEPTHS)])
    return TEMPLATES[template][1](chance)


def _product(chance: random.Random) -> Made:
    a, b = chance.randint(123, 989), chance.randint(12, 98)
    return f"What is {a} * {b}? {ALONE}", Number(value=a * b)


def _chain(chance: random.Random) -> Made:
    a, b, c, d = chance.randint(300, 999), chance.randint(100, 299), chance.randint(3, 9), chance.randint(11, 99)
    return f"Compute ({a} - {b}) * {c} + {d}. {ALONE}", Number(value=(a - b) * c + d)


def _remainder(chance: random.Random) -> Made:
    a, b = chance.randint(10_000, 99_999), chance.choice((7, 9, 11, 13, 17, 19))
    return f"What is the remainder when {a:,} is divided by {b}? {ALONE}", Number(value=a % b)


def _percent(chance: random.Random) -> Made:
    price, down, up = 20 * chance.randint(5, 45), 5 * chance.randint(1, 6), 10 * chance.randint(1, 4)
    value = price * (100 - down) * (100 + up) / 10_000
    text = f"A tool that cost {price} euros gets {down} % cheaper, then the new price rises by {up} %."
    return f"{text} What does it cost now, in euros? {ALONE}", Number(value=value, tolerance=0.006)


def _base(chance: random.Random) -> Made:
    value = chance.randint(130, 1000)
    return f"Write the decimal number {value} in binary. Answer with the binary digits alone.", Exact(
        values=(f"{value:b}", f"0b{value:b}")
    )


def _weekday(chance: random.Random) -> Made:
    first, day = chance.randrange(7), chance.randint(9, 30)
    text = f"If the 1st of a month is a {DAYS[first]}, what weekday is day {day} of that month?"
    return f"{text} Answer with the weekday alone.", Exact(value=DAYS[(first + day - 1) % 7])


def _days_between(chance: random.Random) -> Made:
    start = date(2021, 1, 1) + timedelta(days=chance.randrange(1000))
    span = chance.randint(20, 140)
    return f"How many days are there from {start} to {start + timedelta(days=span)}? {ALONE}", Number(value=span)


def _order(chance: random.Random) -> Made:
    """A line of people, told by who stands directly before whom, in mixed order: one answer follows."""
    line = chance.sample(NAMES, 6)
    facts = [f"{before} is directly before {after}." for before, after in pairwise(line)]
    chance.shuffle(facts)
    place = chance.randint(1, 6)
    words = ("first", "second", "third", "fourth", "fifth", "sixth")
    text = f"Six people stand in a line. {' '.join(facts)} Who is {words[place - 1]}?"
    return f"{text} Answer with the name alone.", Exact(value=line[place - 1])


def _ages(chance: random.Random) -> Made:
    young, factor = chance.randint(2, 9), chance.choice((3, 4, 5))
    later = young * (factor - 2)
    one, two = chance.sample(NAMES, 2)
    text = f"{one} is {factor} times as old as {two}. In {later} years {one} will be twice as old as {two} is then."
    return f"{text} How old is {two} now? {ALONE}", Number(value=young)


def _sequence(chance: random.Random) -> Made:
    start, first, grows = chance.randint(2, 40), chance.randint(2, 9), chance.randint(1, 5)
    values = [start]
    for step in range(6):
        values.append(values[-1] + first + step * grows)
    shown = ", ".join(map(str, values[:-1]))
    return f"The differences of this sequence grow evenly: {shown}. What comes next? {ALONE}", Number(value=values[-1])


def _letters(chance: random.Random) -> Made:
    words = " ".join(chance.sample(WORDS, 3))
    letter = chance.choice([letter for letter in "aeilrt" if letter in words])
    return f"How many times does the letter {letter} occur in '{words}'? {ALONE}", Number(value=words.count(letter))


def _backwards(chance: random.Random) -> Made:
    word = chance.choice(WORDS)
    return f"Write the word '{word}' backwards. Answer with the word alone.", Exact(value=word[::-1])


def _sorted(chance: random.Random) -> Made:
    words = chance.sample(WORDS, 6)
    text = f"Sort these words alphabetically and write them separated by commas and nothing else: {', '.join(words)}"
    return text, Regex(pattern=r"(?i)^\W*" + r",\s*".join(sorted(words)) + r"\W*$")


def _acronym(chance: random.Random) -> Made:
    words = chance.sample(WORDS, 5)
    text = f"Take the third letter of each word and write them as one word in capitals: {' '.join(words)}."
    return f"{text} Answer with that word alone.", Exact(value="".join(word[2] for word in words).upper())


def _record(chance: random.Random) -> Made:
    name, town, age = chance.choice(NAMES), chance.choice(TOWNS), chance.randint(19, 88)
    tools = chance.sample(("saw", "drill", "plane", "chisel", "clamp"), 2)
    text = f"{name}, {age}, moved to {town} last spring and sells a {tools[0]} and a {tools[1]}."
    wanted = "the keys name (string), age (integer), town (string) and items (array of strings, in the order given)"
    value = {"name": name, "age": age, "town": town, "items": tools}
    schema = {
        "type": "object",
        "required": sorted(value),
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "town": {"type": "string"},
            "items": {"type": "array", "items": {"type": "string"}},
        },
    }
    return f"Turn this into a JSON object with {wanted}, and write only the JSON: {text}", JsonSchema(
        schema=schema, value=value
    )


def _totals(chance: random.Random) -> Made:
    towns = chance.sample(TOWNS, 4)
    sales = [(town, chance.randint(2, 90)) for town in towns for _ in range(2)]
    chance.shuffle(sales)
    value = {town: sum(amount for name, amount in sales if name == town) for town in sorted(towns)}
    text = "; ".join(f"{town} {amount}" for town, amount in sales)
    task = "Add up the sales of each town and write only a JSON object from town to total (integer)"
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    return f"{task}: {text}", JsonSchema(schema=schema, value=value)


def _table(chance: random.Random) -> Made:
    towns = chance.sample(TOWNS, 6)
    people = chance.sample(range(11, 99), 6)
    years = [chance.randint(900, 1899) for _ in towns]
    limit = sorted(years)[2]
    best = max((n for n in range(6) if years[n] > limit), key=lambda n: people[n])
    rows = "\n".join(f"{towns[n]} | {years[n]} | {people[n]},{chance.randint(100, 999)}" for n in range(6))
    text = f"town | founded | people\n{rows}\nWhich town that was founded after {limit} has the most people?"
    return f"{text} Answer with its name alone.", Exact(value=towns[best])


def _trace(chance: random.Random) -> Made:
    stop, skip, factor = chance.randint(7, 13), chance.choice((2, 3, 4)), chance.randint(2, 5)
    total = sum(factor * n - 1 for n in range(1, stop) if n % skip)
    loop = f"for n in range(1, {stop}):\n    if n % {skip} == 0:\n        continue\n    total += {factor} * n - 1"
    return f"What does this Python program print? {ALONE}\ntotal = 0\n{loop}\nprint(total)", Number(value=total)


def needle(chance: random.Random, tokens: int, depth: float) -> Made:
    """One fact in a text of about ``tokens`` tokens of invented log lines, at ``depth`` of it (0 is its beginning)."""
    lines = [
        f"{chance.choice(TOWNS)} station reports {chance.randint(10, 99)} crates of {chance.choice(WORDS)} in store."
        for _ in range(tokens // _TOKENS_A_LINE)
    ]
    word, code = chance.choice(WORDS), chance.randint(10_000, 99_999)
    lines.insert(round(depth * len(lines)), f"The code of the {word} vault is {code}.")
    text = "\n".join(lines)
    return f"{text}\n\nWhat is the code of the {word} vault? {ALONE}", Number(value=code)


_SUMS: Final[Mapping[str, str]] = {
    "German": "Wie viel ist {a} plus {b}? Antworte nur mit der Zahl.",
    "French": "Combien font {a} plus {b} ? Réponds seulement par le nombre.",
    "Spanish": "¿Cuánto es {a} más {b}? Responde solo con el número.",
    "Chinese": "{a}加{b}等于多少？只回答数字。",  # noqa: RUF001 -- that is how Chinese is written
    "Japanese": "{a}と{b}を足すといくつですか。数字だけで答えてください。",
    "Russian": "Сколько будет {a} плюс {b}? Ответь только числом.",
}


def _language(chance: random.Random) -> Made:
    a, b = chance.randint(120, 979), chance.randint(120, 979)
    return _SUMS[chance.choice(sorted(_SUMS))].format(a=a, b=b), Number(value=a + b)


TEMPLATES: Final[Mapping[str, tuple[str, Template]]] = {
    "product": ("arithmetic", _product),
    "chain": ("arithmetic", _chain),
    "remainder": ("arithmetic", _remainder),
    "percent": ("arithmetic", _percent),
    "base": ("arithmetic", _base),
    "weekday": ("reasoning", _weekday),
    "days-between": ("reasoning", _days_between),
    "order": ("reasoning", _order),
    "ages": ("reasoning", _ages),
    "sequence": ("reasoning", _sequence),
    "letters": ("text", _letters),
    "backwards": ("text", _backwards),
    "sorted": ("text", _sorted),
    "acronym": ("text", _acronym),
    "record": ("json", _record),
    "totals": ("json", _totals),
    "table": ("extraction", _table),
    "trace": ("code", _trace),
    "language": ("languages", _language),
    **BASICS,
    **CODE,
    **LIMITS,
}
"""Every template with its category."""
