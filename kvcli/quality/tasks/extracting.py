"""Extraction tasks: repeat a span of the text word for word, and put facts into JSON."""

from __future__ import annotations

import json

from kvcli.demo import COLOURS, person, pick
from kvcli.demo.report import filler
from kvcli.quality.prose import hide, name, number
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import likeness, share_of_fields
from kvcli.quality.tasks.needles import fact

NOTES = 3


def copy_span(draw: SampleSeed, size: int) -> Context:
    """Write numbered notes of three sentences; the question asks to repeat one."""
    rng = draw.rng()
    notes = [" ".join(filler(rng) for _ in range(3)) for _ in range(NOTES)]
    depths = sorted([draw.depth, *(rng.random() for _ in notes[1:])])
    asked = depths.index(draw.depth)
    hidden = [(d, f"\nField note {i}: {note}\n") for i, (d, note) in enumerate(zip(depths, notes, strict=True), 1)]
    text = hide(draw.prose.sentences(rng, size), hidden).replace(" \n", "\n").replace("\n ", "\n")
    prefix = f"Field note {asked + 1}:"
    meta = {"depth": round(draw.depth, 3)}
    question = Question(f"Repeat field note {asked + 1}.", prefix, (notes[asked],), f" {notes[asked]}", meta)
    return Context(text, (question,))


def json_extract(draw: SampleSeed, size: int) -> Context:
    """Write three facts about one depot, and about other depots; the question asks for one depot as JSON."""
    rng = draw.rng()
    depots = [name(rng) for _ in range(3)]
    known = [{"access code": number(rng), "keeper": person(rng), "paint": pick(rng, COLOURS)} for _ in depots]
    facts = [(rng.random(), fact(d, v, k)) for d, of in zip(depots, known, strict=True) for k, v in of.items()]
    text = hide(draw.prose.sentences(rng, size), facts)
    wanted = json.dumps(known[0])
    question = (
        f"Give the access code, the keeper and the paint of depot {depots[0]} as a JSON object with the keys "
        '"access code", "keeper" and "paint".'
    )
    prefix = '{"access code":'
    asked = Question(question, prefix, (wanted,), wanted.removeprefix(prefix))
    return Context(text, (asked,))


def _exact(answer: str, question: Question) -> dict[str, bool]:
    return {"exact": likeness(answer, question) == 1}


TASKS = (
    Task("copy_span", "a note of three sentences, word for word", copy_span, likeness, detail=_exact),
    Task("json_extract", "three facts as a JSON object", json_extract, share_of_fields),
)
