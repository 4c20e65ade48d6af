"""Variable tracking task: a chain of assignments is scattered over the text, and all names are asked (RULER's vt)."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from kvcli.demo import pick
from kvcli.quality.prose import distinct, hide, number
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import share_of_references

HOPS = 4


def _letters(rng: Random) -> str:
    return "".join(pick(rng, ascii_uppercase) for _ in range(5))


def _chain(names: list[str], value: str) -> list[str]:
    """Return the assignments VAR A = 12345; VAR B = VAR A; ..."""
    links = [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    return [f"VAR {names[0]} = {value}.", *links]


def _question(value: str) -> str:
    return f"Find all variables that are assigned the value {value} in the text above."


def _prefix(value: str) -> str:
    return f"By the chain of assignments in the text above, {HOPS + 1} variables are assigned the value {value}:"


def vt(draw: SampleSeed, size: int) -> Context:
    """Write a solved example, then the chain to follow."""
    rng = draw.rng()
    names, values = distinct(rng, 2 * (HOPS + 1), _letters), distinct(rng, 2, number)
    shown, asked = names[: HOPS + 1], names[HOPS + 1 :]
    example = f"{' '.join(_chain(shown, values[0]))}\n{_question(values[0])}\n{_prefix(values[0])} {', '.join(shown)}."
    depths = sorted(rng.random() for _ in asked)
    text = hide(draw.prose.sentences(rng, size), list(zip(depths, _chain(asked, values[1]), strict=True)))
    question = Question(_question(values[1]), _prefix(values[1]), tuple(asked), f" {', '.join(asked)}.")
    return Context(f"Example:\n{example}\n\nNow follow the assignments in this text.\n{text}", (question,))


TASKS = (Task("vt", "a chain of five variables with one value, all asked for", vt, share_of_references),)
