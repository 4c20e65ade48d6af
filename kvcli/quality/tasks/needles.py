"""Needle tasks: facts hidden in a text; questions ask for one, several or all (after RULER, arXiv 2404.06654)."""

from __future__ import annotations

from kvcli.demo import person, shuffled
from kvcli.quality.prose import distinct, hide, listed, name, number, uuid
from kvcli.quality.sample import Context, Make, Question, Rounds, SampleSeed, Task, as_many
from kvcli.quality.score import share_of_references

KEYS = 4  # needles of one kind in tasks with several
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths of the passkey grid
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.".split(". ")


def fact(key: str, value: str, what: str = "access code") -> str:
    return f"The {what} of depot {key} is {value}."


def ask(key: str, value: str, what: str = "access code", **meta: object) -> Question:
    """Return the question for one value by its key."""
    prefix = f"The {what} of depot {key} is"
    return Question(f"What is the {what} of depot {key}?", prefix, (value,), f" {value}.", meta)


def single(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    key, value = name(rng), number(rng)
    text = hide(draw.prose.sentences(rng, size), [(draw.depth, fact(key, value))])
    return Context(text, (ask(key, value, depth=round(draw.depth, 3)),))


def single_uuid(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    key, value = name(rng), uuid(rng)
    text = hide(draw.prose.sentences(rng, size), [(draw.depth, fact(key, value, "serial number"))])
    return Context(text, (ask(key, value, "serial number", depth=round(draw.depth, 3)),))


def multikey(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    keys, values = distinct(rng, KEYS, name), distinct(rng, KEYS, number)
    depths = [draw.depth] + [rng.random() for _ in keys[1:]]
    facts = [(depth, fact(k, v)) for depth, k, v in zip(depths, keys, values, strict=True)]
    text = hide(draw.prose.sentences(rng, size), facts)
    return Context(text, (ask(keys[0], values[0], depth=round(draw.depth, 3)),))


def multikey_all(draw: SampleSeed, size: int) -> Context:
    """Write a text of needles only, which differ by their keys."""
    rng = draw.rng()
    pairs: dict[str, str] = {}
    while len(pairs) < size:
        pairs.setdefault(name(rng), number(rng))
    asked = min(size - 1, int(draw.depth * size))
    key, value = list(pairs.items())[asked]
    text = " ".join(fact(k, v) for k, v in pairs.items())
    return Context(text, (ask(key, value, depth=round(draw.depth, 3)),))


def multivalue(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    key, values = name(rng), distinct(rng, KEYS, number)
    facts = [(rng.random(), f"One access code of depot {key} is {value}.") for value in values]
    question = f"What are all {KEYS} access codes of depot {key}?"
    prefix = f"The access codes of depot {key} are"
    asked = Question(question, prefix, tuple(values), f" {listed(values)}.")
    return Context(hide(draw.prose.sentences(rng, size), facts), (asked,))


def multiquery(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    keys, values = distinct(rng, KEYS, name), distinct(rng, KEYS, number)
    facts = [(rng.random(), fact(k, v)) for k, v in zip(keys, values, strict=True)]
    question = f"What are the access codes of depots {listed(keys)}?"
    expected = " ".join(fact(k, v) for k, v in zip(keys, values, strict=True))
    prefix = f"The access code of depot {keys[0]} is"
    asked = Question(question, prefix, tuple(values), expected.removeprefix(prefix))
    return Context(hide(draw.prose.sentences(rng, size), facts), (asked,))


def passkey(draw: SampleSeed, size: int) -> Context:
    """Write five short sentences repeatedly, with one needle at a depth of the grid."""
    rng = draw.rng()
    key, value, depth = name(rng), number(rng), DEPTHS[draw.index % len(DEPTHS)]
    noise = [NOISE[i % len(NOISE)].rstrip(".") + "." for i in range(size)]
    return Context(hide(noise, [(depth, fact(key, value))]), (ask(key, value, depth=depth),))


def mqar(draw: SampleSeed, size: int) -> Context:
    """Write many pairs and ask for several: multi-query associative recall (Zoology, arXiv 2312.04927)."""
    rng = draw.rng()
    keys, values = distinct(rng, 16, name), distinct(rng, 16, person)
    depths = [(i + rng.random()) / len(keys) for i in range(len(keys))]
    facts = [(d, fact(k, v, "keeper")) for d, k, v in zip(depths, keys, values, strict=True)]
    chosen = sorted(shuffled(rng, range(len(keys)))[:KEYS])
    asked = [ask(keys[i], values[i], "keeper", depth=round(depths[i], 3)) for i in chosen]
    return Context(hide(draw.prose.sentences(rng, size), facts), tuple(asked))


def late_questions(draw: SampleSeed, size: int) -> Context:
    """Write a chat in reverse order: the first question is about the latest fact, the last about the earliest."""
    rng = draw.rng()
    turns = 6
    keys, values = distinct(rng, turns, name), distinct(rng, turns, number)
    depths = [(i + rng.random()) / turns for i in range(turns)]
    facts = [(d, fact(k, v)) for d, k, v in zip(depths, keys, values, strict=True)]
    order = range(turns - 1, -1, -1)
    asked = [ask(keys[i], values[i], turn=turn, depth=round(depths[i], 3)) for turn, i in enumerate(order, 1)]
    return Context(hide(draw.prose.sentences(rng, size), facts), tuple(asked), is_dialogue=True)


def _grid(n: int) -> int:
    """Round n up to whole rounds of the grid's depths."""
    return -(-n // len(DEPTHS)) * len(DEPTHS)


def _exact(name: str, about: str, make: Make, least: int = 1, rounds: Rounds = as_many) -> Task:
    """Return a task whose questions have one reference each, so that scores are 0 or 1."""
    return Task(name, about, make, share_of_references, is_binary=True, least=least, rounds=rounds)


TASKS = (
    _exact("niah_single", "one number hidden in prose", single),
    _exact("niah_uuid", "one serial number of 32 digits, to be copied exactly", single_uuid),
    _exact("niah_multikey", "four keys hidden, one asked for", multikey),
    _exact("niah_multikey_all", "a text of nothing but needles, one asked for", multikey_all, least=KEYS),
    Task("niah_multivalue", "four values of one key, all asked for", multivalue, share_of_references),
    Task("niah_multiquery", "four keys asked for at once", multiquery, share_of_references),
    _exact("passkey", "one number in repeated sentences, length by depth", passkey, rounds=_grid),
    _exact("mqar", "sixteen pairs, four asked for", mqar),
    _exact("late_questions", "a conversation that asks for ever earlier facts", late_questions),
)
