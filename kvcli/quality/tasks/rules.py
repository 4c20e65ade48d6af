"""Instruction retention task: rules at the beginning of a long text, checked separately (after arXiv 2510.00231)."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.quality.prose import distinct, hide, name
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import has
from kvcli.quality.tasks.needles import fact

MOST = 25  # most words of an answer

Check = Callable[[str, tuple[str, ...]], bool]
# Rule and its check. {0}, {1}, ... are words drawn for the context; the checked answer is never empty.
RULES: dict[str, tuple[str, Check]] = {
    "begin": ("Begin every answer with the word {0}.", lambda a, w: a.split()[0].strip(".,:;!*") == w[0]),
    "end": ("End every answer with the word {1}.", lambda a, w: a.split()[-1].strip(".,:;!*") == w[1]),
    "avoid": ("Never write the word depot; write {2} instead.", lambda a, w: has(a, w[2]) and not has(a, "depot")),
    "short": (f"Use at most {MOST} words.", lambda a, w: len(a.split()) <= MOST),
    "right": ("Name the keeper that is asked for.", lambda a, w: has(a, w[3])),
}


def kept(answer: str, question: Question) -> dict[str, bool]:
    """Return by rule whether the answer follows it; an empty answer follows none."""
    words = question.references
    return {rule: bool(answer.split()) and check(answer, words) for rule, (_, check) in RULES.items()}


def score(answer: str, question: Question) -> float:
    held = kept(answer, question)
    return sum(held.values()) / len(held)


def instructions(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    words = tuple(distinct(rng, 5, name))
    key = words[4]
    rules = " ".join(rule.format(*words) for rule, _ in RULES.values())
    text = hide(draw.prose.sentences(rng, size), [(draw.depth, fact(key, words[3], "keeper"))])
    expected = f"{words[0]}: the keeper of {words[2]} {key} is {words[3]}. {words[1]}"
    question = Question(f"What is the keeper of depot {key}?", "", words[:4], expected)
    return Context(f"Rules for every answer: {rules}\n\n{text}", (question,))


TASKS = (Task("instructions", "five rules at the head of the text, each scored", instructions, score, detail=kept),)
