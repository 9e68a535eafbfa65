"""The words that made-up questions are made of: everyday ones, and names of nobody and nowhere."""

from typing import Final

ALONE: Final = "Answer with the number alone."
NAMES: Final = (
    "Abel", "Bea", "Carl", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena", "Milo", "Nora",
)  # fmt: skip
WORDS: Final = (
    "lantern", "copper", "orchard", "velvet", "harbour", "granite", "meadow", "thistle", "saddle", "pebble", "timber",
    "falcon", "marble", "ribbon", "canyon", "walnut", "anchor", "candle", "bramble", "mirror", "kettle", "glacier",
    "feather", "compass", "barley", "quarry", "hammer", "spindle", "juniper", "beacon",
)  # fmt: skip
TOWNS: Final = ("Torva", "Lund", "Mirel", "Askel", "Pendry", "Quill", "Sarn", "Vesper", "Wold", "Yarrow")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
