"""Probe samples: texts with hidden facts and questions about them, to find heads that retrieve distant tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcli.engine.forward_request import Draft, Rows
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose, distinct, hide, name, number
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import share_of_references
from kvcli.quality.tasks.needles import ask, fact

if TYPE_CHECKING:
    from kvcli.chat.model import Model

KEYS = 4  # facts in one text, with a question about each
TWIN = str.maketrans("0123456789", "5678901234")


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """A question with its right answer, as token ids."""

    ids: list[int]
    value: range  # indices of the value in `ids`
    needle: int  # position in the text where the same value begins


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """A text and questions about it."""

    context: list[int]
    asked: tuple[ProbeQuestion, ...]

    def draft(self) -> Draft:
        """Return all questions with answers as branches of a draft tree after the text, so that one pass covers all."""
        ids: list[int] = []
        parent: list[int] = []
        for one in self.asked:
            start = len(ids)
            ids += one.ids[:-1]  # the row after the answer is not needed
            parent += [-1, *range(start, len(ids) - 1)]
        return Draft(ids, parent)

    def rows(self) -> Rows:
        """Return the rows of the pass over the questions, after a text whose last token is pending."""
        return Rows.build(self.context[-1], len(self.context) - 1, self.draft())

    def scored(self) -> list[tuple[int, int]]:
        """Return (row of that pass, token it has to predict) for each token of each value."""
        found, start = [], 1
        for one in self.asked:
            found += [(start + j - 1 if j else 0, one.ids[j]) for j in one.value]
            start += len(one.ids) - 1
        return found

    def targets(self) -> list[int]:
        """Return the position of the same token in the text, for each entry of `scored`."""
        return [one.needle + i for one in self.asked for i in range(len(one.value))]


def samples(
    model: Model, n: int, length: int, seed: int, haystack: str | None = None, task: Task | None = None
) -> list[ProbeSample]:
    """Generate `n` texts of about `length` tokens with four facts each, by `seed`. `haystack` replaces the prose.

    `task`: another task whose questions have one answer each. Raises BadInput if the facts do not fit into `length`.
    """
    prompts, prose = Prompts(model.tokenizer), Prose(haystack)
    task = task or Task("recall", "facts hidden in prose, all asked for", _recall, share_of_references, is_binary=True)
    found = []
    for index in range(n):
        context = fitted(task, SampleSeed(task.name, seed, length, index, prose), prompts)
        ids = prompts.context(context.text)
        found.append(ProbeSample(ids, tuple(_asked(prompts, context, ids, q) for q in context.questions)))
    return found


def _recall(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    keys, values = distinct(rng, KEYS, name), distinct(rng, KEYS, number)
    depths = [(i + rng.random()) / KEYS for i in range(KEYS)]
    facts = [(depth, fact(k, v)) for depth, k, v in zip(depths, keys, values, strict=True)]
    return Context(hide(draw.prose.sentences(rng, size), facts), tuple(map(ask, keys, values)))


def _asked(prompts: Prompts, context: Context, ids: list[int], question: Question) -> ProbeQuestion:
    """Locate the value in text and answer by comparing their ids with those of twins with another value."""
    (value,) = question.references
    twin = value.translate(TWIN)

    def answered(text: str) -> list[int]:
        return prompts.question(replace(question, prefix=question.prefix + text))

    said = answered(question.expected)
    in_answer = _differ(said, answered(question.expected.replace(value, twin)))
    in_text = _differ(ids, prompts.context(context.text.replace(value, twin)))
    n = min(len(in_answer), len(in_text))
    return ProbeQuestion(said, in_answer[:n], in_text.start)


def _differ(a: Sequence[int], b: Sequence[int]) -> range:
    """Return the range in `a` from its first to its last difference from `b`."""
    short = min(len(a), len(b))
    start = next((i for i in range(short) if a[i] != b[i]), short)
    same = next((i for i in range(short - start) if a[-1 - i] != b[-1 - i]), short - start)
    return range(start, len(a) - same)
