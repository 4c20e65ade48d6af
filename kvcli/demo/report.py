"""Seeded field reports: headed sections of facts, findings, notes and filler, with page marks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvcli import demo
from kvcli.demo import between, pick

# one digit, so that counting and comparing section numbers needs single tokens only
MAX_SECTIONS = 9


@dataclass(frozen=True)
class Fact:
    """A retrievable sentence: The ATTRIBUTE of ENTITY is VALUE."""

    attribute: str
    entity: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of {self.entity} is {self.value}."


@dataclass(frozen=True)
class Finding:
    """The main finding of one section, with its page.

    The last finding says that it is the last, which tells a summary where to end.
    """

    section: int
    text: str
    page: int
    is_last: bool

    @property
    def sentence(self) -> str:
        last = ", the last" if self.is_last else ""
        return f"Main finding of section {self.section}{last}: {self.text} [p. {self.page}]."


@dataclass(frozen=True)
class Note:
    """A field note of two to four sentences that name one place."""

    section: int
    place: str
    text: str

    @property
    def paragraph(self) -> str:
        return f"Field note {self.section}: {self.text}"


@dataclass
class Report:
    """A report's text and all facts, findings and notes in it."""

    n_sections: int
    text: str = ""
    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@dataclass(frozen=True)
class Attribute:
    """An attribute of one kind of entity, and the function that draws its value."""

    name: str
    kind: str
    draw: Callable[[Random], str]


ATTRIBUTES = [
    # listed twice, because the access code is the main example
    Attribute("access code", "depot", lambda rng: demo.digits(rng, 5)),
    Attribute("access code", "depot", lambda rng: demo.digits(rng, 5)),
    Attribute("keeper", "depot", demo.person),
    Attribute("paint", "depot", lambda rng: pick(rng, demo.COLOURS)),
    Attribute("badge number", "surveyor", lambda rng: demo.digits(rng, 4)),
    Attribute("home", "surveyor", demo.place),
    Attribute("depth", "well", lambda rng: demo.digits(rng, 3) + " metres"),
    Attribute("reading", "gauge", lambda rng: f"{demo.digits(rng, 2)}.{demo.digits(rng, 1)} bar"),
    Attribute("stock", "depot", demo.goods),
]


def entity(rng: Random, kind: str) -> str:
    """A name for an entity of this kind, as in "depot Varholt" or "gauge K-482"."""
    if kind == "surveyor":
        return f"{kind} {demo.person(rng)}"
    if kind == "gauge" and rng.random() < 0.5:
        return f"{kind} {chr(65 + between(rng, 0, 25))}-{demo.digits(rng, 3)}"
    return f"{kind} {demo.place(rng)}"


def filler(rng: Random) -> str:
    """A filler sentence. Its words are random, so that no answer can be derived from the grammar."""
    thing, event, action = demo.thing, pick(rng, demo.EVENTS), pick(rng, demo.ACTIONS)
    match between(rng, 0, 7):
        case 0:
            return f"The {thing(rng)} near {demo.place(rng)} {event} {pick(rng, demo.TIMES)}."
        case 1:
            return f"{demo.person(rng)} {action} the {thing(rng)} and the {thing(rng)}."
        case 2:
            return f"{pick(rng, demo.TIMES).capitalize()}, the crew {action} the {thing(rng)}."
        case 3:
            return (
                f"We {action} {demo.digits(rng, 2)} metres of {pick(rng, demo.NOUNS)} because the {thing(rng)} {event}."
            )
        case 4:
            return f"The {thing(rng)} {event} while {demo.person(rng)} {action} the {thing(rng)}."
        case 5:
            return f"No one at {demo.place(rng)} {action} the {thing(rng)} {pick(rng, demo.TIMES)}."
        case 6:
            amount = f"{demo.digits(rng, 1)} {pick(rng, demo.UNITS)} of {pick(rng, demo.GOODS)}"
            return f"A {thing(rng)} and {amount} were {action} {pick(rng, demo.TIMES)}."
        case _:
            condition = f"If the {thing(rng)} is {pick(rng, demo.ADJECTIVES)}"
            return f"{condition}, the {pick(rng, demo.NOUNS)} must be {action}."


def note_text(rng: Random, place: str) -> str:
    """Two to four sentences, one or two of which name the place."""
    naming = [
        f"The {demo.thing(rng)} at {place} {pick(rng, demo.EVENTS)} {pick(rng, demo.TIMES)}.",
        f"{demo.person(rng)} {pick(rng, demo.ACTIONS)} the {demo.thing(rng)} of {place}.",
        f"The {demo.thing(rng)} left {place} {pick(rng, demo.TIMES)}.",
    ]
    sentences = demo.shuffled(rng, naming)[: 1 if rng.random() < 2 / 3 else 2]
    sentences += [filler(rng) for _ in range(between(rng, 1, 2))]
    return " ".join(demo.shuffled(rng, sentences))


def finding_text(rng: Random) -> str:
    return (
        f"the {pick(rng, demo.ADJECTIVES)} {pick(rng, demo.NOUNS)} at {demo.place(rng)} "
        f"{pick(rng, demo.EVENTS)} {pick(rng, demo.TIMES)}"
    )


def new_fact(rng: Random, facts: list[Fact], near: float) -> Fact:
    """A new fact. With probability `near` it is about an entity already named: a close distractor."""
    told = {(f.attribute, f.entity) for f in facts[-400:]}
    if facts and rng.random() < near:
        owner = pick(rng, facts).entity
        kind = owner.split()[0]
        attribute = pick(rng, [a for a in ATTRIBUTES if a.kind == kind])
    else:
        attribute = pick(rng, ATTRIBUTES)
        owner = entity(rng, attribute.kind)
    while (attribute.name, owner) in told:
        owner = entity(rng, attribute.kind)
    return Fact(attribute.name, owner, attribute.draw(rng))


def write_report(
    rng: Random, n_tokens: float, fact_share: float, near: float = 0.2, n_sections: int | None = None, rich: bool = True
) -> Report:
    """Write a report of about `n_tokens`. `fact_share`: share of facts among sentences; `near`: of close distractors in
    them.

    A `rich` report has one finding a section and a note in every second one; otherwise it has facts and filler only.
    """
    if n_sections is None:
        n_sections = max(1, min(MAX_SECTIONS, round(n_tokens / (110 + rng.random() * 290))))
    # a page has 70 to 250 tokens, fewer in short documents
    page_length = max(70.0, min(250.0, n_tokens / (2 + rng.random() * 12)))
    section_length = n_tokens / n_sections

    report = Report(n_sections)
    count = "1 section" if n_sections == 1 else f"{n_sections} sections"
    out = [f"Field report of {demo.place(rng)}. This report has {count}.\n[p. 1]\n"]
    page, on_page = 1, 0
    for section in range(1, n_sections + 1):
        out.append(f"\n## Section {section}: {pick(rng, demo.TOPICS)} at {demo.place(rng)}\n")
        on_page += 14
        used, end = 14, section_length * (0.8 + rng.random() * 0.4)
        due = ["finding"] * rich + ["note"] * (rich and rng.random() < 0.5)
        while used < end or due:
            if due and (rng.random() < 0.2 or used >= end):
                if due.pop(int(rng.random() * len(due))) == "finding":
                    finding = Finding(section, finding_text(rng), page, section == n_sections)
                    report.findings.append(finding)
                    text, n = finding.sentence, 30
                else:
                    place = demo.place(rng)
                    note = Note(section, place, note_text(rng, place))
                    report.notes.append(note)
                    text, n = f"\n{note.paragraph}\n", 50
            elif rng.random() < fact_share:
                fact = new_fact(rng, report.facts, near)
                report.facts.append(fact)
                text, n = fact.sentence, 15
            else:
                text, n = filler(rng), 14
            out.append(text + " ")
            used += n
            on_page += n
            if on_page > page_length:
                page, on_page = page + 1, 0
                out.append(f"\n[p. {page}]\n")
    report.text = "".join(out).replace(" \n", "\n").replace("\n ", "\n").strip()
    return report
