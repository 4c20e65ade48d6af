"""Facts hidden in a text and asked for: what shows which heads fetch something from far back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcli.engine.rows import Draft, Rows
from kvcli.quality.fit import fitted
from kvcli.quality.prompt import Prompts
from kvcli.quality.prose import Prose, distinct, hide, name, number
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import share_of_references
from kvcli.quality.tasks.needles import ask, fact

if TYPE_CHECKING:
    from kvcli.chat.model import Model

KEYS = 4  # facts in one text, all of them asked for
TWIN = str.maketrans("0123456789", "5678901234")


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """A question with its right answer, as ids."""

    ids: list[int]
    value: range  # which of `ids` are the value
    needle: int  # position in the text where the same value begins


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """A text and questions about it."""

    context: list[int]
    asked: tuple[ProbeQuestion, ...]

    def draft(self) -> Draft:
        """All questions with their answers as branches below the last token of the text: one pass answers them all."""
        ids: list[int] = []
        parent: list[int] = []
        for one in self.asked:
            start = len(ids)
            ids += one.ids[:-1]  # nothing is asked of the row behind the answer
            parent += [-1, *range(start, len(ids) - 1)]
        return Draft(ids, parent)

    def rows(self) -> Rows:
        """The pass that reads the questions, behind a text of which all but the last token is stored."""
        return Rows.build(self.context[-1], len(self.context) - 1, self.draft())

    def scored(self) -> list[tuple[int, int]]:
        """(row of that pass, the token it has to name) for each token of each value."""
        found, start = [], 1
        for one in self.asked:
            found += [(start + j - 1 if j else 0, one.ids[j]) for j in one.value]
            start += len(one.ids) - 1
        return found

    def targets(self) -> list[int]:
        """Where in the text the same token stands, for each of `scored`."""
        return [one.needle + i for one in self.asked for i in range(len(one.value))]


def samples(
    model: Model, n: int, length: int, seed: int, haystack: str | None = None, task: Task | None = None
) -> list[ProbeSample]:
    """`n` texts of about `length` tokens with four facts each, drawn by `seed`. `haystack` replaces the prose.

    `task`: another one whose questions have one answer each. Raises BadInput where that many tokens do not hold them.
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
    """The value is found, in the text and in the answer, where both differ from their twins with another value."""
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
    """From the first to the last place where `a` is not `b`."""
    short = min(len(a), len(b))
    start = next((i for i in range(short) if a[i] != b[i]), short)
    same = next((i for i in range(short - start) if a[-1 - i] != b[-1 - i]), short - start)
    return range(start, len(a) - same)
