"""Types of a quality sample: the task, its context and questions, the scoring function, and the random seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.quality.prose import Prose


GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a context."""

    text: str
    prefix: str  # start of the answer, which the model continues
    references: tuple[str, ...]  # strings that the answer has to contain
    expected: str  # a right answer after the prefix; its length in tokens sets the limit of an answer
    meta: Mapping[str, object] = field(default_factory=dict)
    max_new: int = 0  # tokens; set when the context is fitted


@dataclass(frozen=True, slots=True)
class Context:
    """A text and questions about it. Each question is asked separately, from the same KV cache."""

    text: str
    questions: tuple[Question, ...]
    is_dialogue: bool = False  # questions follow each other in one conversation instead


@dataclass(frozen=True, slots=True)
class SampleSeed:
    """Random seed of one context. A longer form of a context has the same needles with more text between them."""

    task: str
    seed: int
    length: int  # requested tokens, prompt and answer together
    index: int
    prose: Prose

    def rng(self) -> Random:
        """Return a random generator with the same numbers every time."""
        return Random(f"{self.seed} {self.task} {self.length} {self.index}")

    @property
    def depth(self) -> float:
        """Depth of the needle, as a share of the text; the golden ratio spreads any number of contexts evenly."""
        return (Random(f"{self.seed} {self.task} {self.length}").random() + self.index * GOLDEN) % 1


def as_many(n: int) -> int:
    """Return the number of contexts at one length: as many as requested."""
    return n


Make = Callable[[SampleSeed, int], Context]
Rounds = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question. `make(draw, size)` writes a context of a size that grows with its length in tokens."""

    name: str
    about: str  # one-line description for users
    make: Make
    score: Callable[[str, Question], float]  # the answer, prefix included -> 0 to 1
    is_binary: bool = False  # scores are 0 or 1
    least: int = 1  # the smallest size
    rounds: Rounds = as_many  # contexts at one length, from the requested number
    detail: Callable[[str, Question], Mapping[str, bool]] | None = None  # parts of the score, shown separately
