"""Bundled demo models: locations of their weights and of the example documents."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TypeVar

# by name; the small model drafts for the other
BUNDLED = {"demo": "weights", "demo-small": "weights-small"}


def weights_dir(name: str = "demo") -> Path:
    """Folder with the weights, tokenizer and model card, as transformers loads it."""
    return Path(str(files(__name__))) / BUNDLED[name]


def report_path() -> Path:
    """The example document: a generated field report of about twenty pages."""
    return Path(str(files(__name__))) / "report.md"


def sample_path() -> Path:
    """The sample PDF: a generated field report of twenty pages with findings planted in it."""
    return Path(str(files(__name__))) / "sample.pdf"


# Vocabulary of the demo world: word lists, and the names and numbers drawn from them.

T = TypeVar("T")

ONSETS = "B Br D Dr F G Gr H J K Kl L M N P R S Sk St T Tr V W Z".split()
NUCLEI = "ar en ol un ir al or em ush ik an eth ov el ul im".split()
PLACE_ENDINGS = (
    "holt mar den wick by sund ford lok gart ness vik rum stad mere dale tov lin bek mond ras heim ster pol nau tor"
).split()
FIRST_NAME_ENDINGS = "a o is e us y in".split()
SURNAME_ENDINGS = "son ova ley man ert ini ak dal quist berg".split()

ADJECTIVES = (
    "old cold narrow broken heavy quiet grey wet loose bright rusted hollow steep shallow dry northern southern "
    "eastern western lower upper wooden iron copper stone dusty clean frozen slow sudden minor major spare hidden "
    "open sealed damp pale dark worn stable"
).split()
NOUNS = (
    "pump valve ridge cable road bridge channel filter shelter mast gate lamp panel tunnel fence crane boiler ladder "
    "wall roof beacon tank drill slope stream marsh path cellar tower mill barn dam pier ditch shaft hatch engine "
    "rail wagon kiln weir sluice antenna hoist"
).split()
EVENTS = (
    "leaked failed cracked froze moved settled collapsed drifted sank stopped recovered improved shifted rattled "
    "held dried flooded narrowed widened cooled"
).split()
ACTIONS = (
    "repaired inspected moved measured cleaned marked sealed painted replaced tested opened closed watched drained "
    "lifted photographed counted sketched covered reached"
).split()
TIMES = (
    "before dawn, at noon, after the storm, in the evening, during the night, on the second day, last week, "
    "in early spring, at low tide, after the thaw, without delay, for two hours, in heavy rain, before the frost"
).split(", ")
GOODS = "salt rope oil sand timber wire grain coal glass nails tar paper cement cloth seed bricks".split()
UNITS = "crates sacks barrels bundles boxes carts".split()
COLOURS = "red blue green yellow white black orange purple brown silver".split()
TOPICS = "drainage roads power water storage weather transport repairs lighting safety supplies soil".split()


def pick(rng: Random, choices: Sequence[T]) -> T:
    """Pick one of `choices`, drawn with `random()` alone, whose stream Python guarantees between versions."""
    return choices[int(rng.random() * len(choices))]


def between(rng: Random, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    """The items in random order."""
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def place(rng: Random) -> str:
    """A place name. It always has two tokens, so that swapping one name for another keeps every distance."""
    return pick(rng, ONSETS) + pick(rng, NUCLEI) + pick(rng, PLACE_ENDINGS)


def person(rng: Random) -> str:
    """A first name and a surname, always two tokens each."""
    first = pick(rng, ONSETS) + pick(rng, NUCLEI) + pick(rng, FIRST_NAME_ENDINGS)
    return first + " " + pick(rng, ONSETS) + pick(rng, NUCLEI) + pick(rng, SURNAME_ENDINGS)


def digits(rng: Random, n: int) -> str:
    """A number of `n` digits without a leading zero."""
    return str(between(rng, 1, 9)) + "".join(str(between(rng, 0, 9)) for _ in range(n - 1))


def thing(rng: Random) -> str:
    """A noun, often with an adjective before it."""
    return (pick(rng, ADJECTIVES) + " " if rng.random() < 0.6 else "") + pick(rng, NOUNS)


def goods(rng: Random) -> str:
    """An amount of goods, as in "45 sacks of salt"."""
    return f"{digits(rng, 2)} {pick(rng, UNITS)} of {pick(rng, GOODS)}"


def split_pattern() -> str:
    """Pattern that splits text before merging. A copied string must be split alike in report and answer.

    A name is split before its ending, so every place is two tokens. A digit is one token together with the space before
    it, so that the space does not use up a position of the copying window.
    """
    first = f" ?(?:{'|'.join(sorted(ONSETS, key=len, reverse=True))})(?:{'|'.join(NUCLEI)})"
    endings = PLACE_ENDINGS + FIRST_NAME_ENDINGS + SURNAME_ENDINGS
    return rf"{first}(?=(?:{'|'.join(endings)})(?!\p{{L}}))| ?[0-9]| ?\p{{L}}+| ?[^\s\p{{L}}0-9]+|\n+| +"
