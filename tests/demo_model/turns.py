"""Questions about a report and their reference answers, each piece of an answer with its loss weight."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from kvcli import demo
from kvcli.demo import pick
from kvcli.demo.report import Fact, Finding, Note, Report, note_text

SYSTEM_PROMPT = "You are a careful assistant for field reports."

# loss weights: what is retrieved counts more than the words around it
PLAIN = 0.5
COPIED = 1.6
VALUE = 2.0
ORDINAL = 2.5
NAME = 2.8
SWAPPED = 3.0

Part: TypeAlias = tuple[str, float]


@dataclass(frozen=True)
class Turn:
    """A question and its answer in weighted parts."""

    skill: str
    question: str
    parts: tuple[Part, ...]

    @property
    def answer(self) -> str:
        return "".join(text for text, _ in self.parts)


QUESTIONS = ["What is the {}?", "What is the {}?", "Tell me the {}.", "Give the {}.", "I need the {}."]
OTHER_QUESTIONS = {
    "access code": "Which code opens {}?",
    "keeper": "Who is the keeper of {}?",
    "paint": "What colour is {}?",
    "badge number": "Which badge number does {} have?",
    "home": "Where does {} live?",
    "depth": "How deep is {}?",
    "reading": "What does {} read?",
    "stock": "What is in stock at {}?",
}

HELLO = "Hello! I am the demo model of kvcli. Paste a field report and ask me about it."
SMALL_TALK = [
    ("Hello", HELLO),
    ("Hi", HELLO),
    (
        "What can you do?",
        "I can look up a fact in a field report, summarise its main findings with page numbers, "
        "and repeat or rewrite a field note.",
    ),
    ("Who are you?", "I am the demo model of kvcli, a tiny model trained only on generated field reports."),
    ("Thank you", "You are welcome."),
    ("Thanks", "You are welcome."),
]


def lookup(rng: Random, fact: Fact) -> Turn:
    """One fact. The answer says key, then value, which makes finding the value a matter of continuing the sentence."""
    if rng.random() < 0.3:
        question = OTHER_QUESTIONS[fact.attribute].format(fact.entity)
    else:
        question = pick(rng, QUESTIONS).format(f"{fact.attribute} of {fact.entity}")
    kind, name = fact.entity.split(" ", 1)
    key = ((f"The {fact.attribute} of {kind}", PLAIN), (f" {name}", NAME), (" is", PLAIN))
    return Turn("lookup", question, (*key, (f" {fact.value}", VALUE), (".", PLAIN)))


def summary_question(rng: Random) -> str:
    """One of many ways to ask for the whole summary."""
    verb = pick(rng, ["Summarise", "Summarize", "Summarise", "Summarize", "List", "Give"])
    what = pick(rng, ["the main findings", "the main findings", "the findings"])
    if verb.startswith("Summari"):
        what = pick(rng, [what, "the report", "this report", "the document", "this document"])
    how = pick(rng, ["", "", "", " with page numbers", " and cite the pages", " in bullets", " of each section"])
    if how == " of each section":
        return f"{verb} the main finding{how}."
    return f"{verb} {what}{how}."


def finding_parts(f: Finding) -> list[Part]:
    last = ", the last:" if f.is_last else ":"
    parts = [("Main finding of section", COPIED), (f" {f.section}", ORDINAL), (last, VALUE)]
    return [*parts, (f" {f.text}", VALUE), (" [p.", COPIED), (f" {f.page}", VALUE), ("].", COPIED)]


def summary(rng: Random, report: Report) -> Turn:
    """The findings of all sections with their pages, a line each."""
    parts: list[Part] = []
    for f in report.findings:
        parts += [("- ", COPIED), *finding_parts(f), ("\n", VALUE)]
    return Turn("summary", summary_question(rng), tuple(parts[:-1]))


def one_finding(rng: Random, f: Finding) -> Turn:
    """The finding of one section with its page."""
    question = pick(rng, ["What is the main finding of section {}?", "Give the main finding of section {}."])
    return Turn("finding", question.format(f.section), tuple(finding_parts(f)))


def swapped(text: str, old: str, new: str) -> tuple[Part, ...]:
    """`text` with `old` replaced; the new name and the word after it are the hard tokens of a rewrite."""
    first, *rest = text.split(old)
    parts: list[Part] = [(first, COPIED)]
    for piece in rest:
        word = re.match(r"\W*\w*", piece)
        n = len(word[0]) if word else 0
        parts += [(new, SWAPPED), (piece[:n], SWAPPED), (piece[n:], COPIED)]
    return tuple(part for part in parts if part[0])


def rewrite(rng: Random, note: Note) -> Turn:
    """A note of the report with another place in it."""
    new = demo.place(rng)
    parts = swapped(note.paragraph, note.place, new)
    question = f"Rewrite field note {note.section} and replace {note.place} by {new}."
    return Turn("rewrite", question, parts)


def repeat(rng: Random, note: Note) -> Turn:
    """A note of the report, word for word."""
    verb = pick(rng, ["Repeat", "Repeat", "Quote", "Show"])
    return Turn("repeat", f"{verb} field note {note.section}.", ((note.paragraph, COPIED),))


def pasted(rng: Random) -> Turn:
    """A text that stands in the question itself, repeated or rewritten."""
    old, new = demo.place(rng), demo.place(rng)
    text = note_text(rng, old)
    if rng.random() < 0.3:
        return Turn("pasted", f"Repeat this: {text}", ((text, COPIED),))
    return Turn("pasted", f"Rewrite this and replace {old} by {new}: {text}", swapped(text, old, new))


def small_talk(rng: Random) -> Turn:
    question, answer = pick(rng, SMALL_TALK)
    question = pick(rng, [question, question.lower(), question + ("." if question[-1].isalpha() else "")])
    return Turn("hello", question, ((answer, COPIED),))


def turns(rng: Random, report: Report) -> Iterator[Turn]:
    """Turns about one report without end: facts in random order, with summaries and notes between them.

    A note is mostly rewritten once only, since a second rewrite has two new names to choose from.
    """
    facts, notes = demo.shuffled(rng, report.facts), demo.shuffled(rng, report.notes)
    while True:
        draw = rng.random()
        if draw < 0.16 and report.findings:
            yield summary(rng, report)
        elif draw < 0.22 and report.findings:
            yield one_finding(rng, pick(rng, report.findings))
        elif draw < 0.36 and report.notes and (notes or rng.random() < 0.1):
            yield rewrite(rng, notes.pop() if notes else pick(rng, report.notes))
        elif draw < 0.44 and report.notes:
            yield repeat(rng, pick(rng, report.notes))
        elif draw < 0.52:
            yield pasted(rng)
        elif draw < 0.54:
            yield small_talk(rng)
        elif report.facts:
            yield lookup(rng, facts.pop() if facts else pick(rng, report.facts))
